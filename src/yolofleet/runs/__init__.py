"""Plan a run as a value before any process starts, then build and execute it on every rank."""
