"""Render a run as a job of SLURM or Kubernetes."""
