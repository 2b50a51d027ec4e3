"""The first minutes on a GPU: ``make gpu-check`` (docs/doctor.md)."""
