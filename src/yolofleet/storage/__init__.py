"""Files on this machine and in stores: writes, locks, caches, opening of untrusted files, YAML, downloads, mirrors. No torch.

It imports ``support`` alone. Start reading in ``atomic.py``; ``mirror.py`` makes the files of a store files of this machine.
"""
