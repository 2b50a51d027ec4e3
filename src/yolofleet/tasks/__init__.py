"""What networks find: their labels, their predictions, how good these are, and how they are shown and written.

A task is one object, and ``boxes`` is the first. Networks name their task; inference and training ask it for everything
that depends on what is found. It imports ``runs`` and the rooms above it. Start reading in ``task.py``.
"""
