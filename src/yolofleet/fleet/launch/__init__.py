"""Start the processes of a run, watch them, and go on after a failure."""
