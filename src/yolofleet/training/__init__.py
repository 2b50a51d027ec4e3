"""One rank's part of a training: the step, the loop around it, and what it shares with other ranks.

It imports ``inference`` and the rooms before it. Start reading in ``step.py``.
"""
