"""What measures trainings and machines: benchmarks, the self-test, the search for hyperparameters.

It imports ``fleet`` and the rooms before it. Start reading in ``bench.py``.
"""
