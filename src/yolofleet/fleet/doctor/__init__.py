"""Inspect machines and their network, and explain logs."""
