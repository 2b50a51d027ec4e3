"""Use of a trained network: evaluation, prediction, export.

It imports ``runs`` and the rooms before it. Start reading in ``evaluate/run.py``.
"""
