"""Measure a training, a data path or an inference."""
