"""Start a job on this machine or on all hosts, follow it, explain its end."""
