"""The training of a rank: the step, the loop around it, its state. Read ``step.py`` first."""
