"""Files: writes, locks, downloads, archives, and opening of untrusted files. No torch."""
