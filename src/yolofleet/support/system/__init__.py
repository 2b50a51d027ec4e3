"""What the operating system says and does: processes, control groups, signals, child processes. No torch."""
