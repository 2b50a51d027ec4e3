"""Train on a Ray cluster with a ``TorchTrainer`` whose workers are ranks (extra ``ray``).

Ray places the workers, connects them, and restarts all of them if one is lost. The run then resumes from its last
checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yolofleet.config.load import resolve_train
from yolofleet.support.errors import ConfigError, install_hint

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

RUN = "run"  # the run's folder, inside that of Ray's


def torch_trainer(
    settings: Mapping[str, Any],
    *,
    workers: int,
    storage: str | Path,
    gpus: bool = True,
    resources: Mapping[str, float] | None = None,
    failures: int = 3,
) -> TorchTrainer:
    """Return the run as a trainer.

    The result of ``fit()`` has the run's ``metrics``, with its ``"folder"``, and a copy of its weights as ``checkpoint``.

    Args:
        settings: of ``yolofleet train``, by name, as for ``Model.train``; paths are absolute, as the workers see them.
        workers: processes, each with one GPU (``gpus``) or on CPUs.
        storage: existing folder on a file system that all workers share; each fit has its own folder in it.
        resources: of each worker, as Ray counts them: ``{"CPU": 4}``.
        failures: how often Ray replaces lost workers; -1 = always.
    Raises:
        ConfigError: Ray is not installed, or a setting is not valid.
    """
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError:
        raise ConfigError("Ray is not installed", hint=install_hint("ray")) from None
    decided = {"project", "name", "exist_ok", "resume", "device", "hosts", "fleet"} & set(settings)
    if decided:
        raise ConfigError(
            f"{', '.join(sorted(decided))}: decided by Ray",
            source="torch_trainer(...)",
            hint="leave them out",
        )
    given = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    config, _ = resolve_train(given, source="torch_trainer(...)")
    storage = Path(storage).resolve()
    return TorchTrainer(
        _rank,
        train_loop_config={"settings": given, "storage": str(storage), "device": "auto" if gpus else "cpu"},
        # the collectives of one group use both
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if gpus else "gloo", timeout_s=config.value.timeout_s
        ),
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=gpus, resources_per_worker=dict(resources) if resources else None
        ),
        run_config=RunConfig(storage_path=str(storage), failure_config=FailureConfig(max_failures=failures)),
    )


def _rank(job: dict[str, Any]) -> None:
    """Run one worker. Ray has set torchrun's variables and connected the workers."""
    from ray import train as ray_train

    from yolofleet.training.rank.worker import run

    os.environ.pop("SLURM_STEP_ID", None)  # of the srun that started Ray here
    project = Path(job["storage"], ray_train.get_context().get_experiment_name())
    where = {"project": str(project), "name": RUN, "device": job["device"]}
    where |= {"exist_ok": True, "resume": "auto"}  # workers may have been lost before the first checkpoint
    config, recipe = resolve_train({**job["settings"], **where}, source="torch_trainer(...)")
    run(config, recipe)
    if ray_train.get_context().get_world_rank() != 0:
        ray_train.report({})  # all ranks must report; Ray keeps the report of rank 0
        return
    results = json.loads((project / RUN / "results.json").read_text(encoding="utf-8"))
    ray_train.report(
        {**results["metrics"], "folder": str(project / RUN)},
        checkpoint=ray_train.Checkpoint.from_directory(str(project / RUN / "weights")),
    )
