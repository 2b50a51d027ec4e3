"""Validation on all ranks."""
