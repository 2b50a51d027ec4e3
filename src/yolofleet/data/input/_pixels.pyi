import numpy as np

from yolofleet.data.geometry.view import Look
from yolofleet.data.input.augment import Placed

VERSION: int

def render(
    placed: list[Placed], window: tuple[int, int, int], canvas_px: int, look: Look | None, out: np.ndarray, /
) -> None: ...
def finish(image: np.ndarray, look: Look, out: np.ndarray, /) -> None: ...
