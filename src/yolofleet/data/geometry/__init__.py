"""Boxes, masks and labels: formats, overlap, suppression, letterbox, tiles."""
