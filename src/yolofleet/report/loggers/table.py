"""The loggers that ``--log`` names, and what each needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A row of the table.

    Attributes:
        target: ``module:class`` in this folder.
        package: that must be installed; "" = none. The extra of ``pyproject.toml`` has the name of the logger.
        has_folder: it writes into its folder in the run folder, also if it sends to a server.
    """

    target: str
    package: str = ""
    has_folder: bool = True


KINDS = {
    "tensorboard": Kind("tensorboard:TensorboardLogger", "tensorboard"),
    "wandb": Kind("wandb:WandbLogger", "wandb"),
    "mlflow": Kind("mlflow:MlflowLogger", "mlflow"),
    "clearml": Kind("clearml:ClearmlLogger", "clearml"),
    "comet": Kind("comet:CometLogger", "comet_ml"),
    "prometheus": Kind("prometheus:PrometheusLogger"),
    "http": Kind("http:HttpLogger", has_folder=False),
}
