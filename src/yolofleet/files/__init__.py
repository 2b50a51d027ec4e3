"""Files: every write, lock and download, archives, and the opening of files that a stranger made. No torch."""
