"""Data sets on disk, up to the index of their labels: ``yolofleet data``."""
