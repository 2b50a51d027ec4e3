"""`yolofleet weights`: what a file holds."""

from __future__ import annotations


