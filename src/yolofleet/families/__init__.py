"""Model families: what their networks and losses share, a folder for each family, and files of weights.

It imports ``data`` and the rooms before it. ``config`` imports ``family.py`` and ``table.py``, which have no torch.
Start reading in ``family.py``.
"""
