"""A run that does not depend on the launcher: a process on one of its hosts supervises it."""
