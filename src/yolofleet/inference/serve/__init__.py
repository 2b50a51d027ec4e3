"""Predictions over HTTP: yolofleet serve."""
