"""Trained networks as files of other runtimes: written, compared with our own output, and run from here."""
