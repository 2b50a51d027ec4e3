"""Build and run TensorRT engines. An engine fits one model of NVIDIA GPU and one version of TensorRT.

TensorRT builds it from our ONNX graph. An engine is machine code: use only engines that you built.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from yolofleet.inference.export import onnx as onnx_format
from yolofleet.inference.export.export_metadata import (
    DECODED,
    IMAGES,
    metadata_file_of,
    read_metadata_file,
    write_metadata_file,
)
from yolofleet.inference.export.graph import ExportJob
from yolofleet.inference.export.opened import Opened
from yolofleet.support.errors import CheckpointError, ConfigError
from yolofleet.support.files.atomic import write_bytes
from yolofleet.support.files.foreign import read_foreign

MAX_BYTES = 4 << 30


def write(job: ExportJob, path: Path) -> None:
    """Write an engine with the number formats of the graph ("strongly typed", the only mode from TensorRT 11 on).

    Raises:
        ConfigError: there is no NVIDIA GPU.
        CheckpointError: TensorRT cannot build the engine.
    """
    import tensorrt

    _need_cuda()
    logger = tensorrt.Logger(tensorrt.Logger.WARNING)
    builder = tensorrt.Builder(logger)
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse(onnx_format.model_of(job, path.parent).SerializeToString()):
        raise CheckpointError(f"TensorRT cannot read this network: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    config.clear_flag(tensorrt.BuilderFlag.TF32)  # its 10-bit mantissa would move boxes
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise CheckpointError(
            "TensorRT cannot build an engine for this network", hint="see the messages of TensorRT above"
        )
    write_bytes(path, bytes(engine))
    write_metadata_file(path, job.metadata)


def _need_cuda() -> None:
    if not torch.cuda.is_available():
        raise ConfigError("TensorRT needs an NVIDIA GPU, but torch finds none", hint="--format onnx")


def parts(path: Path) -> list[Path]:
    """Return the engine and its metadata."""
    return [path, metadata_file_of(path)]


def open_file(path: Path, device: str | None, threads: int) -> Opened:
    """Load the engine for an NVIDIA GPU. Raises as ``opened.open_format``."""
    import tensorrt

    _need_cuda()
    place = torch.device(device or "cuda:0")
    if place.type != "cuda":
        raise ConfigError(f"TensorRT runs on NVIDIA GPUs, not on {device}", hint="--device 0")
    metadata = read_metadata_file(path)
    with torch.cuda.device(place):
        runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR))
        engine = runtime.deserialize_cuda_engine(read_foreign(path, limit_bytes=MAX_BYTES))
        if engine is None:
            raise CheckpointError(
                f"TensorRT {tensorrt.__version__} cannot load {path}",
                hint="an engine fits one model of GPU and one version of TensorRT: export again on this machine",
            )
        context = engine.create_execution_context()

    def run(images: np.ndarray) -> np.ndarray:
        with torch.cuda.device(place):  # TensorRT works on the current GPU
            given = torch.from_numpy(images).to(place)  # torch owns the GPU memory of input and output
            result = torch.empty(tuple(engine.get_tensor_shape(DECODED)), device=place)
            context.set_tensor_address(IMAGES, given.data_ptr())
            context.set_tensor_address(DECODED, result.data_ptr())
            stream = torch.cuda.current_stream()
            if not context.execute_async_v3(stream.cuda_stream):
                raise CheckpointError(f"TensorRT cannot run {path}", hint="export it again on this machine")
            stream.synchronize()
            return result.cpu().numpy()

    return Opened(metadata, f"TensorRT {tensorrt.__version__}, {place}", run)
