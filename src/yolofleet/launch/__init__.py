"""Where a run runs: on this machine, on several, under a scheduler. Nothing here imports torch."""
