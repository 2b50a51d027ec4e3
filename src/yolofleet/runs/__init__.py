"""A run as a value: planned before anything is started, then built and done by the ranks."""
