"""Runs that do not depend on the launcher."""
