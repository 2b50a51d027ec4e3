"""Losses of the families, and the assignment of labels to outputs."""
