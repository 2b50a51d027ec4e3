"""Darknet's networks from .cfg files."""
