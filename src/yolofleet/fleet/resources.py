"""What a run needs of one machine: the settings that decide it, and an estimate of processes, memory and open files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from yolofleet.config.schema import MOST_LOADERS, PREFETCH, TrainConfig, ValConfig
from yolofleet.config.schema.verbs import DoctorConfig
from yolofleet.support.device_names import ALL, gpu_ids, numbered, processes_of

PROCESS_BYTES = 300 << 20  # resident memory of a rank after all imports, measured
CUDA_BYTES = 2500 << 20  # a CUDA context and its libraries, in addition
LOADER_BYTES = 150 << 20  # private memory of a loader process; it shares the rest with its parent
PIXEL_BYTES = 1150  # training on CPUs, per pixel of the input: yolov5s, measured at 320 px
OPEN_FILES = 256  # libraries, logs, sockets


@dataclass(frozen=True)
class RunResources:
    """Settings of a run that the doctor needs to check a machine."""

    device: str  # as ``--device``; a host of a fleet may have another
    one_process: bool  # one process drives all devices (``--parallel dp``)
    workers: int  # loader processes of each rank; -1 = chosen from the number of cores
    # micro_batch, val_batch: images
    micro_batch: int
    val_batch: int
    img: int  # side of an image, pixels
    data: str  # the data set; "" for none
    single_cls: bool  # treat all its classes as one
    results: Path  # parent folder of the run folder
    is_measured: bool = False  # the run will measure its micro-batch, so ``micro_batch`` is an assumption
    # module that prints digests of a data set when it is started with ``python -m``
    data_digest: str = "yolofleet.fleet.launch.data_digest"


def resources_of(settings: TrainConfig | ValConfig | DoctorConfig) -> RunResources:
    """Return the resources of a run with these settings; settings that the doctor lacks have the defaults of training."""
    if isinstance(settings, DoctorConfig):
        shared = TrainConfig.model_fields.keys() & DoctorConfig.model_fields.keys()
        settings = TrainConfig(**{name: getattr(settings, name) for name in shared})
    if isinstance(settings, ValConfig):
        micro_batch, val_batch = 1, settings.batch
    else:
        micro_batch, val_batch = settings.likely_micro_batch, settings.val_batch
    return RunResources(
        device=settings.device,
        one_process=settings.parallel == "dp",
        workers=settings.workers,
        micro_batch=micro_batch,
        val_batch=val_batch,
        img=settings.img or 640,  # 0: that of the weights, which only the ranks read
        data="" if settings.recipe_class else settings.data,  # only the class may be able to read it
        single_cls=settings.single_cls,
        results=settings.project or Path("runs", settings.verb),
        is_measured=isinstance(settings, TrainConfig) and min(settings.batch, settings.micro_batch) < 0,
    )


@dataclass(frozen=True)
class ResourceEstimate:
    """What a run needs of one machine."""

    wanted: RunResources  # settings of the run
    ranks: int  # processes that train
    workers: int  # loader processes of each rank
    on_gpu: bool  # the run uses CUDA devices
    gpu_ids: tuple[int, ...] = ()  # numbers of the CUDA devices, if ``--device`` names them

    @property
    def waiting(self) -> int:
        """Maximum number of micro-batches in shared memory for one rank."""
        return self.workers * (PREFETCH + 1)  # each process works on one more

    @property
    def train_shm_bytes(self) -> int:
        """Maximum bytes of shared memory for the images of training micro-batches."""
        return self.ranks * self.waiting * self.wanted.micro_batch * 3 * self.wanted.img**2

    @property
    def shm_bytes(self) -> int:
        """Maximum bytes of shared memory for training and validation, whose images exist at the same time."""
        return (
            self.train_shm_bytes + self.ranks * self.waiting * self.wanted.val_batch * 3 * self.wanted.img**2
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes of main memory, including shared memory, without the image cache, which uses only free memory."""
        process = PROCESS_BYTES + (
            CUDA_BYTES if self.on_gpu else PIXEL_BYTES * self.wanted.micro_batch * self.wanted.img**2
        )
        return self.ranks * (process + self.workers * LOADER_BYTES) + self.shm_bytes

    @property
    def open_files(self) -> int:
        """Number of open files of one process; every tensor from a loader process is one."""
        return OPEN_FILES + 4 * self.waiting

    @property
    def text(self) -> str:
        """The estimate as text: ``2 processes x 16 images of 640 px, 4 loader processes each, ...``."""
        processes = "1 process" if self.ranks == 1 else f"{self.ranks} processes"
        text = f"{processes} x {self.wanted.micro_batch} images of {self.wanted.img} px"
        if self.wanted.is_measured:
            text += " (assumed: the run measures how many fit)"
        if self.workers:
            each = f"{self.workers} loader process{'es' if self.workers > 1 else ''} each"
            text += f", {each}, {PREFETCH} micro-batches ahead"
        return text


def estimate_of(wanted: RunResources, cores: int, gpus: int) -> ResourceEstimate:
    """Return the estimate for one machine with these CPU cores and GPUs. Raise ConfigError if ``--device`` is not valid."""
    device = wanted.device if wanted.device != ALL else numbered(range(max(gpus, 1)))
    ranks = 1 if wanted.one_process else processes_of(device)
    named = tuple(dict.fromkeys(gpu_ids(device))) if by_number(device) else ()
    on_gpu = bool(named) or (device == "auto" and gpus > 0)
    # as training/parallel/process.py chooses them
    default_workers = max(1, min(MOST_LOADERS, cores // ranks - 1)) if on_gpu else 0
    workers = wanted.workers if wanted.workers >= 0 else default_workers
    return ResourceEstimate(wanted, ranks, workers, on_gpu, named)


def by_number(device: str) -> bool:
    """Return whether ``--device`` names GPUs, as ``0,1`` or ``all``."""
    return device[0].isdecimal() or device == ALL
