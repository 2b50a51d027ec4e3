"""TensorRT: an engine for one kind of NVIDIA GPU and one version of TensorRT, built from our ONNX graph.

An engine is machine code: use only those that you built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from yolofleet.errors import CheckpointError, ConfigError
from yolofleet.export import onnx as onnx_format
from yolofleet.export.facts import DECODED, IMAGES, ExportFacts
from yolofleet.export.graph import ExportJob
from yolofleet.export.runtime import Runtime
from yolofleet.export.sidecar import read_sidecar, write_sidecar


def write(job: ExportJob, path: Path) -> None:
    """Number formats are those of the graph ("strongly typed", the only way from TensorRT 11 on).

    Raises:
        ConfigError: no NVIDIA GPU here. CheckpointError: TensorRT cannot build the graph.
    """
    import tensorrt

    _need_cuda()
    logger = tensorrt.Logger(tensorrt.Logger.WARNING)
    builder = tensorrt.Builder(logger)
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse(onnx_format.model_of(job).SerializeToString()):
        raise CheckpointError(f"TensorRT cannot read this network: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    config.clear_flag(tensorrt.BuilderFlag.TF32)  # 10 bits: boxes would move
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise CheckpointError(
            "TensorRT cannot build an engine for this network", hint="its own words are above"
        )
    path.write_bytes(bytes(engine))
    write_sidecar(path, job.facts)


def _need_cuda() -> None:
    if not torch.cuda.is_available():
        raise ConfigError("TensorRT needs an NVIDIA GPU, and torch sees none here", hint="--format onnx")


class TensorrtRuntime(Runtime):
    """Input and output lie in torch's memory on the GPU."""

    def __init__(self, path: Path, facts: ExportFacts, engine: Any, device: torch.device, place: str) -> None:
        super().__init__(path, facts, place)
        self._engine, self._context, self._device = engine, engine.create_execution_context(), device

    def _run(self, images: np.ndarray) -> np.ndarray:
        given = torch.from_numpy(images).to(self._device)
        result = torch.empty(tuple(self._engine.get_tensor_shape(DECODED)), device=self._device)
        self._context.set_tensor_address(IMAGES, given.data_ptr())
        self._context.set_tensor_address(DECODED, result.data_ptr())
        stream = torch.cuda.current_stream(self._device)
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise CheckpointError(f"TensorRT cannot run {self.path}", hint="export it again on this machine")
        stream.synchronize()
        return result.cpu().numpy()


def open_file(path: Path, device: torch.device | None, threads: int) -> Runtime:
    """
    Raises:
        ConfigError: no NVIDIA GPU. CheckpointError: not ours, or for another GPU or version.
    """
    import tensorrt

    _need_cuda()
    if device is not None and device.type != "cuda":
        raise ConfigError(f"TensorRT runs on NVIDIA GPUs, not on {device}", hint="--device 0")
    facts = read_sidecar(path)
    device = device or torch.device("cuda", 0)
    with torch.cuda.device(device):
        runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR))
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise CheckpointError(
            f"TensorRT {tensorrt.__version__} refuses {path}",
            hint="engines fit one kind of GPU and one version: export it again here",
        )
    return TensorrtRuntime(path, facts, engine, device, f"TensorRT {tensorrt.__version__}, {device}")
