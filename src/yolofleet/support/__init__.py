"""What every room uses: text, errors, the operating system, devices, random numbers. It imports no other room.

Start reading in ``errors.py``.
"""
