import numpy as np

VERSION: int

def take(
    points: np.ndarray, lengths: np.ndarray, counts: np.ndarray, numbers: np.ndarray, /
) -> tuple[bytearray, bytearray, bytearray]: ...
def cut(
    points: np.ndarray,
    lengths: np.ndarray,
    counts: np.ndarray,
    factors: np.ndarray,
    offsets: np.ndarray,
    turned: bool,
    window: tuple[float, float, float, float],
    out_points: np.ndarray,
    out_lengths: np.ndarray,
    out_counts: np.ndarray,
    is_cut: np.ndarray,
    boxes: np.ndarray,
    /,
) -> tuple[int, int]: ...
def raster(
    points: np.ndarray,
    lengths: np.ndarray,
    counts: np.ndarray,
    size_hw: tuple[int, int],
    windows: np.ndarray,
    out: np.ndarray,
    /,
) -> None: ...
