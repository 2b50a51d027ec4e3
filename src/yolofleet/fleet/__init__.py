"""Hosts, launchers and checks of machines. This package knows nothing of detection and imports no torch."""
