"""The kinds of expected failures. Each has what failed, where it came from, what to try, and an exit code.

Faults of the user or the environment are one of these and are printed without a traceback. Bugs of this package are
failed assertions or other exceptions, with a traceback. A missing package is a fault, too: :func:`install_hint` has its hint.
"""

from __future__ import annotations

import errno
import re

from yolofleet.support.text import screen_text, shown

# What CUDA, ROCm and oneAPI say when a device is gone, or when an error has made it useless for this process. A failed
# assertion in a kernel, and what a build of torch lacks, are not among them: they are faults of a program.
DEVICE_FAILED = re.compile(
    "(CUDA|cuDNN|cuBLAS|HIP|UR|Level-Zero) error: .*"
    "(uncorrectable|illegal memory access|illegal instruction|misaligned address|invalid program counter|hardware|"
    "launch failure|unknown error|busy or unavailable|device is lost|gpu is lost|device_lost|"
    "status_execution_failed|status_mapping_error).*",
    re.IGNORECASE,
)


class YolofleetError(Exception):
    """Base of all expected failures.

    Args:
        what: one sentence with the wrong values.
        source: where the value came from (file:line, command line, environment).
        hint: what to do about it; None: ``usual_hint``.
    """

    exit_code = 1
    usual_hint = "run it again with YOLOFLEET_TRACEBACK=1 to see where it comes from"
    printed = ""  # the message of the process that failed, if that is another one

    def __init__(self, what: str, *, source: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.source = source
        self.hint = hint or self.usual_hint

    def render(self) -> str:
        """Return the message for a terminal: what failed, an optional ``from`` line, and a ``try`` line.

        Further lines of a value are indented, so that no value can imitate a line of the message.
        """
        if self.printed:
            return self.printed
        lines = [f"{type(self).__name__}: {self.what}"]
        if self.source:
            lines.append(f"  from : {self.source}")
        lines.append(f"  try  : {self.hint}")
        return "\n".join(screen_text(line).replace("\n", "\n         ") for line in lines)

    def __str__(self) -> str:
        """Return the message without its kind, which a traceback prints before it."""
        return self.render().removeprefix(f"{type(self).__name__}: ")


class ConfigError(YolofleetError):
    """A setting, flag, recipe key or combination of them cannot be used."""

    exit_code = 2
    usual_hint = "yolofleet VERB --help shows what is allowed"


class DataError(YolofleetError):
    """A data set, label or image is missing or broken."""

    exit_code = 3
    usual_hint = "yolofleet data check DATA shows everything that is wrong with a data set"


class CheckpointError(YolofleetError):
    """A weights or checkpoint file is missing, broken, unsafe or does not fit."""

    exit_code = 3
    usual_hint = "use another copy of the file, or other weights"


class StorageError(YolofleetError):
    """The disk is full, read-only or failing."""

    exit_code = 3
    usual_hint = "check the disk, or choose another folder"


class NotAsListed(StorageError):
    """An object of a store is gone, or its content is not what the list of the store says."""


class ClusterError(YolofleetError):
    """Processes or machines could not start, connect or communicate."""

    exit_code = 4
    usual_hint = "read the logs of the run: logs/rank-*.log and logs/agent.log in its folder"


class NumericsError(YolofleetError):
    """Training produced NaN or infinity.

    Attributes:
        first_image: where the images of that step begin, in the stream of all samples; None: not in a step.
    """

    exit_code = 5
    first_image: int | None = None
    usual_hint = "a lower learning rate (--set lr0=...), or --precision fp32"


class NonFiniteError(CheckpointError):
    """A weights or checkpoint file has NaN or infinity."""

    exit_code = NumericsError.exit_code
    usual_hint = "the training diverged, or the file is damaged; use other weights"


class DeviceError(YolofleetError):
    """A GPU failed, or it refuses this process after an error. Another start on the same GPU would most likely fail too."""

    exit_code = 6
    usual_hint = (
        "`nvidia-smi` and `sudo dmesg -T | grep -i -e xid -e nvrm` name the cause; restart the machine, or go on with the "
        "other GPUs: --device"
    )

    @classmethod
    def told_by(cls, text: str, device: str = "a GPU") -> DeviceError | None:
        """Return the error if ``text``, of torch, says that a device failed.

        torch raises it as RuntimeError, since 2.8 as torch.AcceleratorError, often at a later call than that of the operation.
        """
        *_, found = (None, *DEVICE_FAILED.finditer(text))  # the newest one of a log
        return None if found is None else cls(f"{device} failed: {found[0].strip()[:300]}")


class Stopped(YolofleetError):
    """The run got a stop request; its state is saved and ``--resume`` continues it.

    Attributes:
        machine_goes: the request was a notice that this machine will be taken away.
    """

    exit_code = 75
    machine_goes = False
    usual_hint = "run the same command again"


def refused_path(problem: BaseException) -> YolofleetError | None:
    """Return the error for a path that the system refuses, if no caller expected that; None for another problem.

    Before Python 3.14, ``Path.exists()`` and its like answer False for a missing file, but raise in these cases.
    """
    if not isinstance(problem, OSError) or problem.errno not in _REFUSED or problem.filename is None:
        return None
    kind, hint = _REFUSED[problem.errno]
    found = kind(f"cannot use the path {shown(str(problem.filename))}: {problem.strerror}", hint=hint)
    found.__cause__ = problem
    return found


_REFUSED: dict[int, tuple[type[YolofleetError], str]] = {
    errno.ENAMETOOLONG: (
        ConfigError,
        "check the path: most disks allow 255 bytes for a name, and 4095 in all",
    ),
    errno.EACCES: (StorageError, "check the path, and the permissions of its folders"),
    errno.EIO: (StorageError, StorageError.usual_hint),
    errno.ESTALE: (
        StorageError,
        "the folder on the network disk is gone: mount it again, or choose another one",
    ),
    errno.ENOTCONN: (
        StorageError,
        "the network disk is not connected: mount it again, or choose another folder",
    ),
}


class ExitCode(int):
    """The exit code of a job, with the message that the launcher printed about its end.

    Attributes:
        text: the message, or "".
    """

    text = ""

    @classmethod
    def with_text(cls, code: int, text: str) -> ExitCode:
        made = cls(code)
        made.text = text
        return made


EXTRAS = {  # [project.optional-dependencies] of pyproject.toml, which a checkout that is not installed cannot ask for
    "tensorboard": ("tensorboard>=2.15",),
    "wandb": ("wandb>=0.19",),
    "mlflow": ("mlflow>=3.1",),
    "albumentations": ("albumentations>=2.0,<2.1",),
    "ray": ("ray[train]>=2.60",),
    "tune": ("optuna>=4.2",),
    "board": ("starlette>=0.40", "uvicorn>=0.30"),
    "serve": ("starlette>=0.40", "uvicorn>=0.30"),
    "s3": ("s3fs>=2024.12",),
    "gcs": ("gcsfs>=2024.12",),
    "azure": ("adlfs>=2024.7",),
    "http": ("aiohttp>=3.9",),
    "parquet": ("pyarrow>=15",),
    "hub": ("huggingface-hub>=1.0",),
    "screen": ("mss>=9",),
    "onnx": ("onnx>=1.16", "onnxruntime>=1.18", "onnxslim>=0.1.50"),
    "openvino": ("onnx>=1.16", "openvino>=2024.4"),
    "ncnn": ("ncnn>=1.0.20241226", "pnnx>=20241223"),
    "tflite": ("litert-torch>=0.10,<0.11", "ai-edge-litert>=2.1", "ai-edge-quantizer>=0.10", "pydantic<2.12"),
}


def install_hint(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    It names the packages and not ``yolofleet[extra]``: the name yolofleet on PyPI does not belong to this project, and a
    checkout that is not installed would make pip ask PyPI for it.
    """
    return "pip install " + " ".join(f'"{requirement}"' for requirement in EXTRAS[extra])
