import numpy as np

VERSION: int

def suppress(
    boxes: np.ndarray, scores: np.ndarray, groups: np.ndarray, iou: float, out: np.ndarray, /
) -> int: ...
