import numpy as np

VERSION: int

def decode(
    file: bytes | np.ndarray, reduction: int, seen: tuple[int, int, int, int], out: np.ndarray, /
) -> int: ...
