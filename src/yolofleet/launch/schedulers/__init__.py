"""SLURM, Kubernetes and Ray."""
