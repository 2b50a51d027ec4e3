"""Settings of all verbs: declared once, read, merged with their sources, checked. No torch.

It imports ``support``, ``storage``, and the list of families. Start reading in ``load.py``.
"""
