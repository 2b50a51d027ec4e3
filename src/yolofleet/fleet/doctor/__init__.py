"""Check a machine, a fleet or a log for what hinders a distributed run."""
