"""Forty faults of the engine, each of which a user would meet. ``run.py`` checks that a quick test notices each one.

The name of a mutation stays for ever. If a change of the code moves or rewrites the line, write ``old`` and ``new`` again with
the same meaning. ``run.py`` looks for ``old`` in files called ``file`` first, then in all others, so most moves need no edit.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One fault.

    Attributes:
        name: area, and the fault in a few words.
        file: the name of the file, without folders.
        old: text that stands in the file exactly once.
        new: the text of the fault.
        meaning: what is wrong, and what a user would see.
    """

    name: str
    file: str
    old: str
    new: str
    meaning: str


# fmt: off
MUTATIONS = [
    # -- step -----------------------------------------------------------------------------------------------------------
    Mutation("step-divisor-of-rank", "step.py",
             "loss.gains / counts.clamp(min=1)",
             "loss.gains / local_counts.clamp(min=1)",
             "each rank divides by its own counts: the gradient depends on the number of ranks"),
    Mutation("step-finite-ignored", "step.py",
             "finite = torch.isfinite(norm)",
             "finite = torch.ones_like(norm, dtype=torch.bool)",
             "a gradient with NaN changes the weights: the run is lost"),
    Mutation("step-clip-grows", "step.py",
             "(clip_norm / (norm + 1e-6)).clamp(max=1.0)",
             "(clip_norm / (norm + 1e-6)).clamp(min=1.0)",
             "large gradients are not clipped, and small ones grow: training diverges"),
    Mutation("step-rates-swapped", "optimiser.py",
             'plan.lr_bias if group["role"] == "bias" else plan.lr',
             'plan.lr if group["role"] == "bias" else plan.lr_bias',
             "weights get the warm-up rate of biases: training diverges in its first epochs"),
    Mutation("step-average-one-late", "ema.py",
             "keep, take = self.factors(self.updates)",
             "keep, take = self.factors(max(self.updates - 1, 1))",
             "the average counts one update too few: other weights than YOLOv5's"),
    # -- buckets --------------------------------------------------------------------------------------------------------
    Mutation("buckets-last-pass-only", "buckets.py",
             "torch._foreach_add_(views, gradients)",
             "torch._foreach_copy_(views, gradients)",
             "a step has the gradient of its last micro-batch only: the batch is smaller than the user asked for"),
    Mutation("buckets-not-zeroed", "buckets.py",
             "self.flat.zero_()",
             "pass",
             "gradients add up over steps: training diverges"),
    Mutation("buckets-one-early", "buckets.py",
             "self.buckets[self._launched].pending <= 0",
             "self.buckets[self._launched].pending <= 1",
             "a bucket is reduced before its last gradient has arrived: a parameter of each bucket does not learn"),
    Mutation("buckets-statistics-unguarded", "buckets.py",
             "self._poison = 0.0 * self.statistics.sum()",
             "self._poison = 0.0 * self.statistics.new_zeros(())",
             "infinite batch-norm statistics pass for a good step: the weights file is useless"),
    Mutation("buckets-half-not-summed", "buckets.py",
             "self.flat.copy_(self._rounded)",
             "self._rounded.copy_(self.flat)",
             "with fast16 each rank keeps its own gradient: the ranks drift apart"),
    Mutation("buckets-statistics-reversed", "batchnorm.py",
             "alpha=m * (1 - m) ** (last - number)",
             "alpha=m * (1 - m) ** number",
             "the first micro-batch counts most in the running statistics, not the last: other figures than one process in torch"),
    # -- exact sums -----------------------------------------------------------------------------------------------------
    Mutation("exact-bound-of-one-micro-batch", "exact.py",
             "(62 if self.is_wide else 30) - spare",
             "(62 if self.is_wide else 30)",
             "the sum of several clamped gradients overflows the integers: the sign of a gradient flips"),
    Mutation("exact-truncates", "exact.py",
             "grid.mul_(self._scale).round_().clamp_(",
             "grid.mul_(self._scale).clamp_(",
             "gradients are cut off towards 0 instead of rounded: small ones shrink"),
    Mutation("exact-nan-not-counted", "exact.py",
             "self._total[-1] += (~finite).to(self._total.dtype)",
             "self._total[-1] += 0",
             "NaN becomes an arbitrary integer: no rank notices it"),
    Mutation("exact-scale-inverted", "exact.py",
             "(TARGET_BITS - exponent).clamp(-100, 100)",
             "(TARGET_BITS + exponent).clamp(-100, 100)",
             "the grid is coarse where gradients are small: they round to 0"),
    Mutation("exact-grid-not-resumed", "exact.py",
             "self.is_wide = not bool((scales > 0).all())",
             "self.is_wide = True",
             "the first step after a resume uses another grid: other bits than the run without a break"),
    # -- order and samples ----------------------------------------------------------------------------------------------
    Mutation("order-same-every-epoch", "order.py",
             "return permutation(self.seed, epoch, len(self.index))",
             "return permutation(self.seed, 0, len(self.index))",
             "every epoch has the same order of images"),
    Mutation("order-same-augmentation", "sample.py",
             'self._rng.restart(self.seed, "augment", epoch, position)',
             'self._rng.restart(self.seed, "augment", position)',
             "every epoch augments alike at a position: fewer different images"),
    Mutation("order-mosaic-one-late", "sample.py",
             "epoch >= closing_epoch(recipe.close_mosaic, self.epochs)",
             "epoch > closing_epoch(recipe.close_mosaic, self.epochs)",
             "mosaics end one epoch later than the recipe says"),
    Mutation("order-weights-reversed", "order.py",
             "of_class = (1 - ap) * (1 - ap)",
             "of_class = ap * ap",
             "--sampler weights shows the classes that are good already"),
    Mutation("order-rect-head", "order.py",
             "head = min(-epoch * len(drawn) % m, len(drawn))",
             "head = min(epoch * len(drawn) % m, len(drawn))",
             "--rect mixes aspect ratios in micro-batches from the second epoch on: more padding"),
    # -- partition ------------------------------------------------------------------------------------------------------
    Mutation("partition-shares-ignored", "partition.py",
             "round(micro_batches * reached / total)",
             "round(micro_batches * reached / len(self.shares))",
             "unequal --shares lose micro-batches of a step or name some that do not exist"),
    Mutation("partition-last-dropped", "partition.py",
             "[range(a, b) for a, b in pairwise(borders)]",
             "[range(a, max(a, b - 1)) for a, b in pairwise(borders)]",
             "each rank leaves out its last micro-batch: images are never trained on"),
    Mutation("partition-replica-number", "loop.py",
             "self.rank * self.replicas + replica",
             "self.rank + replica",
             "with several devices a process, two of them train on the same images"),
    Mutation("partition-ordinal-of-rank", "loop.py",
             "self._key(plan, p.start, p.start * self.micro_batch,",
             "self._key(plan, p.start - mine.start, p.start * self.micro_batch,",
             "each rank counts its micro-batches from 0: batch-norm statistics depend on the number of ranks"),
    # -- resume ---------------------------------------------------------------------------------------------------------
    Mutation("resume-batch-repeated", "loop.py",
             "step, image = self.state.step, self.state.images_seen",
             "step, image = self.state.step, max(self.state.images_seen - self.config.batch, 0)",
             "a resumed run trains on its last batch again"),
    Mutation("resume-average-count-lost", "state.py",
             'self.average.updates = int(values["ema_updates"])',
             "self.average.updates = 0",
             "the average of a resumed run begins anew: its weights jump"),
    Mutation("resume-momentum-lost", "state.py",
             "self.optimizer.state[p][slot] = empty.copy_(t)",
             "self.optimizer.state[p].setdefault(slot, empty.copy_(t))",
             "slots that exist already, such as zeroed momentum, are not restored: a resumed run differs"),
    Mutation("resume-oldest-host", "resume.py",
             "key=lambda rank: (steps[rank], -rank))",
             "key=lambda rank: (-steps[rank], -rank))",
             "the state of the host that is most behind is sent to all: steps are lost, or the run starts anew"),
    Mutation("resume-kernels-unchecked", "resume.py",
             'if config.reduce == "exact":',
             'if config.reduce != "exact":',
             "an exact run goes on where its bits cannot be the same, and a fast run is refused"),
    # -- attempts -------------------------------------------------------------------------------------------------------
    Mutation("attempts-one-repeat-more", "next_action.py",
             "repeats(failures) >= MOST_AT_ONE_STEP",
             "repeats(failures) > MOST_AT_ONE_STEP",
             "a run that cannot go on is started once more than the docs say"),
    Mutation("attempts-hour-reversed", "next_action.py",
             "now_s - at_s < HOUR_S",
             "now_s - at_s > HOUR_S",
             "--restarts limits nothing within an hour: a broken run restarts for ever"),
    Mutation("attempts-not-counted", "local.py",
             "restarts=self.job.restarts + 1",
             "restarts=0",
             "the ranks take a restart for a first start: the run begins anew instead of going on"),
    Mutation("attempts-lost-host-kept", "next_action.py",
             "left_out = dict(gone)",
             "left_out = {}",
             "the next attempt waits for a host that is gone"),
    Mutation("attempts-fewest-steps", "watch.py",
             "return max([node.ending.step for node in self.nodes if node.ending], default=-1)",
             "return min([node.ending.step for node in self.nodes if node.ending], default=-1)",
             "the host that is most behind decides: progress looks like a failure at the same step, and the run ends"),
    # -- checkpoint store -----------------------------------------------------------------------------------------------
    Mutation("store-oldest-first", "store.py",
             "return sorted(found, key=lambda e: -e.step)",
             "return sorted(found, key=lambda e: e.step)",
             "a resumed run goes on from its oldest state"),
    Mutation("store-newest-pruned", "store.py",
             "self._written.pop(0).unlink(missing_ok=True)",
             "self._written.pop().unlink(missing_ok=True)",
             "--keep-last deletes the state that has just been written"),
    Mutation("store-digest-unchecked", "format.py",
             "if tensors_sha256(tensors, metadata) != digest:",
             "if not tensors_sha256(tensors, metadata):",
             "a damaged state is loaded: the run goes on with wrong weights"),
    Mutation("store-not-read-back", "format.py",
             "write_atomically(path, write, read_tensors)",
             "write_atomically(path, write)",
             "a state that the disk wrote wrongly replaces a good file"),
    Mutation("store-not-flushed", "atomic.py",
             'with temporary.open("rb+") as file:\n                os.fsync(file.fileno())',
             'with temporary.open("rb+"):\n                pass',
             "after a power failure the newest state is empty"),
]
# fmt: on
