"""Boxes and labels: formats, overlap, suppression, letterbox, tiles."""
