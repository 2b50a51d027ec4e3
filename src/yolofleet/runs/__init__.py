"""What a run leaves: checkpoints, status, rows, pictures, pages, the board, and copies of these elsewhere.

It imports ``families`` and the rooms before it. Start reading in ``report/folder.py``.
"""
