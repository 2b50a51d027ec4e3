"""The first minutes on a GPU: ``make test-gpu STAGES=all`` (docs/doctor.md)."""
