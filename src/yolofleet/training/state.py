"""All state that training changes, and its form in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from yolofleet.config.schema import Recipe
from yolofleet.families.networks.precision import LossScaler
from yolofleet.families.weights.format import check_finite
from yolofleet.runs.checkpoint.store import Snapshot
from yolofleet.support.devices import HostCopy
from yolofleet.support.errors import CheckpointError
from yolofleet.training.ema import MovingAverage
from yolofleet.training.optimiser import OWN_SETTINGS, build_optimizer, counts_of, is_storable, slot_device
from yolofleet.training.parallel.batchnorm import RunningStatistics
from yolofleet.training.parallel.buckets import GradientBuckets
from yolofleet.training.parallel.replicas import Replicas
from yolofleet.training.parallel.world import World
from yolofleet.training.schedule import StepPlan
from yolofleet.training.stored_data import Amount, Count, Stored

ClassFigures = Annotated[list[Amount], Field(max_length=1 << 16)]


class Progress(Stored):
    """Progress of the run: values that are equal on every rank. Earlier versions did not store the last five."""

    epochs_done: Count = 0
    best_fitness: Amount = -1.0
    best_epoch: Annotated[int, Field(ge=-1, lt=2**53)] = -1
    # loss terms x images of the current epoch, summed over ranks
    epoch_terms: Annotated[list[Amount], Field(max_length=64)] = []
    epoch_images: Count = 0
    # first images of steps that a rollback has left out
    left_out: Annotated[list[Count], Field(max_length=1 << 20)] = []
    minutes: Amount = 0.0  # of the budget that decided ``last_step``
    last_step: Count = 0  # steps of the run, as soon as ``--minutes`` has decided it
    closed_step: Count = 0  # steps after which the run ended in mid-epoch and wrote the row of that epoch
    # --sampler weights: AP of each class in the last two validations, by the number of epochs done; see open_validation
    class_ap: Annotated[dict[str, ClassFigures], Field(max_length=2)] = {}

    @property
    def open_validation(self) -> int | None:
        """The number of epochs after which a validation began that has no figures yet, [] in ``class_ap``; else None."""
        return next((int(epochs) for epochs, figures in self.class_ap.items() if not figures), None)


class Tally:
    """This rank's part of the losses of the current epoch.

    Args:
        progress: of the state to go on from, which has the sums over all ranks: rank 0 adds them to its part.

    Attributes:
        images: of the epoch so far, of all ranks.
        own_images: that the sums of this rank are over.
    """

    def __init__(self, terms: int, progress: Progress, world: World) -> None:
        self._world = world
        self._terms = torch.zeros(terms, device=world.device)  # loss terms x images
        self.images, self.own_images = progress.epoch_images, progress.epoch_images * world.is_main
        if progress.epoch_terms and world.is_main:
            self._terms += torch.tensor(progress.epoch_terms, device=world.device)

    def add(self, plan: StepPlan, terms: Tensor, own_images: int) -> None:
        """Add a step; ``terms``: [T] this rank's part of its loss."""
        self._terms += terms * plan.images
        self.images += plan.images
        self.own_images += own_images

    def leave_out(self, plan: StepPlan, own_images: int) -> None:
        """Take a step out of the means that has changed nothing, and whose terms are 0."""
        self.images -= plan.images
        self.own_images -= own_images

    def own_means(self) -> list[float]:
        """Return the mean of each term over this rank's images; [] without any. Reading it waits for the device.

        It is an estimate of the mean over all: all ranks get random samples of one shuffled stream.
        """
        return [value / self.own_images for value in self._terms.tolist()] if self.own_images else []

    def sums(self) -> list[float]:
        """Return the sum of each term x images over all ranks. Collective: every rank."""
        return self._world.sum_rows(self._terms.tolist())

    def means(self) -> list[float]:
        """Return the mean of each term; NaN if all steps were left out. Collective: every rank."""
        return [total / (self.images or math.nan) for total in self.sums()]

    def clear(self) -> None:
        """Begin another epoch."""
        self._terms.zero_()
        self.images = self.own_images = 0


class UnreadNorm(NamedTuple):
    """The gradient norm of a step, which the host has not read yet. ``has_labels``: some images of the step have labels."""

    plan: StepPlan
    norm: HostCopy
    has_labels: bool = True


@dataclass
class TrainState:
    """The training state of one rank; equal on every rank between steps.

    Attributes:
        live: trained parameters and batch-norm statistics by name, which ``average`` reads.
    """

    replicas: Replicas
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    average: MovingAverage
    live: dict[str, Tensor]
    progress: Progress
    step: int = 0
    images_seen: int = 0
    overflows: int = 0
    unread_norms: list[UnreadNorm] = field(default_factory=list)  # of steps yet to be judged

    @classmethod
    def build(
        cls,
        replicas: Replicas,
        recipe: Recipe,
        *,
        optimizer: str | type[torch.optim.Optimizer],
        weight_decay: float,
        precision: str,
        lr_factors: Mapping[str, float] | None = None,
    ) -> TrainState:
        """Build the state around ``replicas``; see :func:`build_optimizer`.

        The first replica's model must be in training mode; its frozen parameters need no gradient and their
        batch-norm layers must be in eval mode.
        """
        model = replicas.lead.model
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        statistics = replicas.lead.statistics.views
        return cls(
            replicas=replicas,
            optimizer=build_optimizer(model, optimizer, recipe, weight_decay, lr_factors),
            scaler=LossScaler(precision, replicas.lead.device),
            average=MovingAverage(
                trained | statistics, decay=recipe.ema_decay, tau=recipe.ema_tau, rule=recipe.ema_rule
            ),
            live=trained | statistics,  # averages of frozen tensors would only gain rounding errors
            progress=Progress(),
        )

    @property
    def model(self) -> nn.Module:
        return self.replicas.lead.model

    @property
    def statistics(self) -> RunningStatistics:
        return self.replicas.lead.statistics

    @property
    def buckets(self) -> GradientBuckets:
        return self.replicas.lead.buckets

    def note(self, **values: Any) -> None:
        """Change these values of ``progress``."""
        self.progress = self.progress.model_copy(update=values)

    # -- checkpoint ----------------------------------------------------------------------------------

    def _live(self) -> dict[str, Tensor]:
        """Return every tensor of the state by its name in a checkpoint (live, not copied)."""
        # the state dict adds the tensors of frozen layers
        fixed = {name: t for name, t in self.model.state_dict().items() if t.is_floating_point()}
        tensors = {f"model/{name}": t.detach() for name, t in (fixed | self.live).items()}
        tensors |= {f"ema/{name}": t for name, t in self.average.average.items()}
        if len(grid := self.buckets.grid()):
            tensors["reduce/grid"] = grid
        for name, p in self.model.named_parameters():
            for slot, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{name}/{slot}"] = value
        return tensors

    def check_finite(self) -> None:
        """Raise if a tensor of the state is not finite. Every rank decides the same.

        Raises:
            NumericsError: names the tensor.
        """
        check_finite(self._live(), f"the training state after step {self.step}")

    def all_tensors(self) -> list[Tensor]:
        """Return the live tensors that must be equal on every rank, in the same order on every rank."""
        return [tensor for _, tensor in sorted(self._live().items())]

    def snapshot(self, extra: dict[str, Any]) -> Snapshot:
        """Return a copy on the CPU that later steps do not change."""
        values = {
            "images_seen": self.images_seen,
            "bn_batches": self.statistics.batches,
            "ema_updates": self.average.updates,
            "scaler": self.scaler.state_dict(),
            "overflows": self.overflows,
            "progress": self.progress.model_dump(),
            **({"optimizer_counts": counts} if any(counts := counts_of(self.optimizer)) else {}),
            **extra,
        }
        copies = {name: t.detach().to("cpu", copy=True) for name, t in self._live().items()}
        return Snapshot(self.step, copies, values)

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Load the state of ``snapshot``.

        Raises:
            CheckpointError: its tensors do not fit this model.
        """
        live = self._live()
        stored = dict(snapshot.tensors)
        slots = {name: t for name, t in stored.items() if name.startswith("optimizer/")}
        grid = stored.pop("reduce/grid", None)
        live.pop("reduce/grid", None)
        expected = {name for name in live if not name.startswith("optimizer/")}
        found = set(stored) - set(slots)
        wrong = sorted(expected ^ found) or sorted(
            name for name in expected if _form(live[name]) != _form(stored[name])
        )
        if wrong:
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} does not fit this model ({len(wrong)} tensors differ, "
                f"first {wrong[0]})",
                hint="resume with the model and data set that the run was started with",
            )
        for name in expected:
            live[name].copy_(stored[name])
        for name, p in self.model.named_parameters():
            mine = {
                key.rsplit("/", 1)[1]: t for key, t in slots.items() if key.startswith(f"optimizer/{name}/")
            }
            for slot, t in mine.items():
                if not is_storable(t, p):
                    raise CheckpointError(
                        f"checkpoint tensor optimizer/{name}/{slot} cannot be {t.dtype} {list(t.shape)}"
                    )
                like = p if t.shape == p.shape else t  # keep the parameter's strides (channels-last)
                empty = torch.empty_like(like, dtype=t.dtype, device=slot_device(self.optimizer, p, t))
                self.optimizer.state[p][slot] = empty.copy_(t)
        if grid is not None and len(self.buckets.grid()) == len(grid):
            self.buckets.restore_grid(grid)
        self.replicas.copy_to_devices()
        values = snapshot.values
        for group, counts in zip(
            self.optimizer.param_groups, values.get("optimizer_counts", ()), strict=False
        ):
            if counts.keys() & {*self.optimizer.defaults, *OWN_SETTINGS}:
                raise CheckpointError(
                    f"the checkpoint of step {snapshot.step} has settings as counts of its optimizer"
                )
            group.update(counts)
        self.step, self.images_seen = snapshot.step, int(values["images_seen"])
        self.unread_norms.clear()
        self.statistics.batches = int(values["bn_batches"])
        self.average.updates = int(values["ema_updates"])
        self.overflows = int(values["overflows"])
        self.scaler.load_state_dict(values["scaler"])
        self.progress = Progress(**values["progress"])

    def weights(self) -> dict[str, Tensor]:
        """Return the averaged state dict under the model's official names (live tensors)."""
        tensors = self.model.state_dict() | self.average.average
        for name, _ in self.statistics.layers:
            tensors[f"{name}.num_batches_tracked"] = torch.tensor(self.statistics.batches)
        return tensors


def _form(t: Tensor) -> tuple[torch.Size, bool]:
    """Return the shape, and whether the values are floating-point numbers of any width."""
    return t.shape, t.is_floating_point()
