"""From a data set to tensors: its files, the index of its labels, decoded images, augmented micro-batches.

It imports ``config`` and ``support``. Start reading in ``input/sample.py``.
"""
