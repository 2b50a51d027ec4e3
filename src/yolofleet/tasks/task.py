"""The interface of a task: everything that depends on what a network finds.

N images, n found objects of one image. A task for a family of one's own: tests/toy_task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.geometry.letterbox import Letterbox
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.geometry.table import Table
from yolofleet.runs.report.results import Judgement
from yolofleet.support.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

Arrays = dict[str, np.ndarray]
MOST_IMAGES = 500  # in a page and in comparisons: an error analysis of 100 boxes each takes 0.6 s


def sampled(images: int) -> np.ndarray:
    """Return the positions of at most ``MOST_IMAGES`` of ``images`` images, evenly spaced."""
    return np.unique(np.linspace(0, max(images - 1, 0), min(images, MOST_IMAGES)).astype(np.int64))


@dataclass(frozen=True)
class Found(Table):
    """What was found in an image, highest score first, or in several; a task adds the shapes.

    Attributes:
        image: int64 [n] position of the image in the index; 0 for one image.
        classes: int64 [n].
        scores: float32 [n], 0..1.
    """

    image: np.ndarray
    classes: np.ndarray
    scores: np.ndarray

    def native(self, back: Letterbox) -> Self:
        """Return the objects in pixels of the image as it was read, from those of the letterboxed one."""
        raise NotImplementedError


@dataclass(frozen=True)
class Limits:
    """Which predictions are found objects.

    Attributes:
        conf: lowest score, exclusive.
        iou: overlap above which the object of lower score is removed; None: the network needs no suppression.
        max_det: most objects of an image.
        multi_label: a prediction may give several classes (validation); else only its best one.
        agnostic: suppress over all classes together.
        classes: keep only these; None: all.
    """

    conf: float
    iou: float | None
    max_det: int
    multi_label: bool = False
    agnostic: bool = False
    classes: Sequence[int] | None = None


@dataclass(frozen=True)
class Metrics:
    """The figures of a validation.

    Attributes:
        figures: by name; -1 means that there are no objects.
        per_class: figures by name of each class, among them ``images`` and ``labels``, their numbers.
    """

    figures: Mapping[str, float]
    per_class: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Difference:
    """How far predictions of an exported file are from those of the network.

    Attributes:
        place: largest difference of a position or size, pixels.
        score: largest difference of a score.
        compared: number of predictions.
        mask: largest difference of a mask's logits, as a part of the largest logit; None: the task has no masks.
    """

    place: float
    score: float
    compared: int
    mask: float | None = None


class Task(ABC):
    """What a network finds. Each method is for arrays and values; none of them communicates.

    Attributes:
        name: in networks, weights, exported files and messages.
        decoded: the named tuple of decoded predictions, tensors whose first dimension is N. With a method ``of_classes(numbers)``
            a validation may bring the classes into the order of the data set.
        nothing: the empty table of what was found in several images, which has ``image`` and ``scores``; of the class that
            ``found`` returns, unless ``collected`` makes another one.
        columns: the figure of each column of results.csv.
        of_class: figures on the screen, and the names of the same figures of one class. The last one is in 0..1, -1 without
            labels; ``--sampler weights`` follows it.
        fitness_of: the weight of figures in the number that chooses the best weights: the highest, and at least 0.
        reads_masks: the index must have the masks of labels.
    """

    name: str
    decoded: Any
    nothing: Any
    columns: Mapping[str, str]
    of_class: Mapping[str, str]
    fitness_of: Mapping[str, float]
    reads_masks = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs of an exported file, in the order of the fields of ``decoded``."""
        fields: tuple[str, ...] = self.decoded._fields
        return fields

    @property
    def judgement(self) -> Judgement:
        """Its figures, as the files of a run have them."""
        return Judgement(self.columns, self.of_class, self.fitness_of)

    # -- labels

    def labels(self, index: DataIndex, image: int) -> Shapes:
        """Return the labels of an image to train on. Raise ConfigError if the data set has none for this task."""
        return index.labels(image)

    def made_up(self, objects: int) -> Shapes:
        """Return labels, of the class of ``labels``, for a trial of memory: objects of half an image match many cells."""
        return Shapes.of_image(np.zeros(objects), np.full((objects, 4), 0.5))

    # -- predictions

    @abstractmethod
    def found(self, decoded: Any, limits: Limits) -> tuple[list[Any], int]:
        """Return the ``Found`` of each image, and how many candidates were left out because an image had too many.

        Args:
            decoded: of one network, or a list for the predictions of several.
        """

    def busiest(self, decoded: Any) -> Any:
        """Return these predictions with as many objects as suppression can meet, for a trial of memory."""
        return decoded

    # -- validation

    def collected(
        self, images: Sequence[int], found: Sequence[Any], backs: Sequence[Letterbox], one_class: bool
    ) -> Any:
        """Return what was found in some images as one table, in pixels of the images as they were read.

        Args:
            images: positions in the index.
            one_class: every class counts as class 0.
        """
        parts = [
            replace(one.native(back), image=np.full(len(one), image), classes=one.classes * (not one_class))
            for image, one, back in zip(images, found, backs, strict=True)
        ]
        return self.nothing.joined([self.nothing, *parts])

    @abstractmethod
    def judged(
        self, index: DataIndex, images: np.ndarray, results: Any, classes: Sequence[int] | None
    ) -> Arrays:
        """Compare what was found in ``images`` (ascending) with their labels, of some classes or all; one rank's part."""

    @abstractmethod
    def metrics(self, parts: Sequence[Mapping[str, np.ndarray]], names: Sequence[str]) -> Any:
        """Return the ``Metrics`` of the parts of all ranks. They must not depend on which rank had which image."""

    # -- exported files

    @abstractmethod
    def difference(self, ours: Any, theirs: Any, size_hw: tuple[int, int], *, in_order: bool) -> Difference:
        """Compare decoded predictions of the same images; infinite differences if they cannot be compared.

        Args:
            in_order: row k of one stands for row k of the other; else both are sets.
        """

    # -- screens, pictures and files

    @abstractmethod
    def draw(self, image: np.ndarray, found: Any, names: Sequence[str], **style: Any) -> np.ndarray:
        """Return a copy of an image uint8 [H, W, 3] BGR with what was found."""

    @abstractmethod
    def to_json(self, found: Any, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the objects of an image as values for JSON, with ``class``, ``name`` and ``score`` of each."""

    def bitmaps(self, found: Any, size_hw: tuple[int, int]) -> np.ndarray | None:
        """Return the pixels of each object of an image, bool [n, H, W]; None if the task has no pixels."""
        return None

    def yolo_values(self, found: Any, size_wh: tuple[int, int]) -> list[np.ndarray]:
        """Return the numbers of each object of an image in a YOLO label file, after the class."""
        raise NotImplementedError

    def yolo_texts(self, results: Any, index: DataIndex, *, scores: bool) -> dict[int, str]:
        """Return the text of a YOLO label file by position of the image; images without a line are absent."""
        raise NotImplementedError

    def coco_results(
        self, results: Any, index: DataIndex, category_ids: Sequence[Any] | None
    ) -> list[dict[str, Any]]:
        """Return the rows of a COCO results file. ``category_ids`` are by class number; None: the number itself."""
        raise NotImplementedError

    def analysed(
        self,
        config: Any,
        folder: Path,
        results: Any,
        index: DataIndex,
        classes: Sequence[int] | None,
        console: Any,
    ) -> dict[str, Any]:
        """Show what the settings of ``yolofleet val`` ask for beside the figures; return it as values for JSON."""
        return {}

    def tables(self, metrics: Any) -> list[tuple[str, list[str], list[list[str]]]]:
        """Return more tables of a validation for the screen, each (title, columns, rows)."""
        return []

    def plots(  # noqa: B027  a task may draw nothing
        self, metrics: Any, results: Any, index: DataIndex, folder: Path, note: Callable[[str], None]
    ) -> None:
        """Draw a validation into files. ``results`` are of some images."""

    def page(self, metrics: Any, results: Any, index: DataIndex) -> dict[str, Any]:
        """Return what the report page shows of a validation beside its figures, for JSON.

        Args:
            results: of the :func:`sampled` images, the best ones of each.
        """
        return {}

    def check(self, asked: Mapping[str, bool]) -> None:
        """Raise ConfigError if an option was given that this task has no meaning for.

        Args:
            asked: options that are for boxes alone, and whether they were given.
        """
        for flag in (flag for flag, given in asked.items() if given):
            raise ConfigError(
                f"{flag}: it is for boxes, and the network finds {self.name}", hint=f"leave out {flag}"
            )
