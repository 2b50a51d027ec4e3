"""The ranks of a run: communication, gradient buckets, exact sums, batch norm, watchdog."""
