"""States of a run: stored, kept in memory, copied to a store."""
