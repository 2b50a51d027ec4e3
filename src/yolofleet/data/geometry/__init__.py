"""Boxes: formats, overlap, suppression, letterbox, tiles."""
