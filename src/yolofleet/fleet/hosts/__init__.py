"""Hosts: connections to them, and the host agent that runs a job there."""
