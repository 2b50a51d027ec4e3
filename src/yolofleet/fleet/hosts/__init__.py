"""The machines of a fleet, and the agent that runs a job on each."""
