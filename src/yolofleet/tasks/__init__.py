"""What networks find: their labels, their predictions, how good these are, and how they are shown and written.

A task is one object (``task.py``), and ``boxes`` is the first. It imports ``runs`` and the rooms above it. Networks name
their task; inference and training ask it for everything that depends on what is found.
"""
