"""When passes become CUDA graphs, with a stand-in for the capture; ``tests/gpu`` compares the bits on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small_training import SmallRun, small_run

from yolofleet.config.schema import TrainConfig
from yolofleet.families.networks.description import ModelDescription
from yolofleet.families.networks.detector import Detector
from yolofleet.support import devices
from yolofleet.support.errors import ConfigError
from yolofleet.training.parallel.cuda_graph import TrainingPass
from yolofleet.training.rank.cuda_graphs import capture
from yolofleet.training.rank.memory_probe import LargestPass

FREE = 3 << 30  # bytes


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the passes of a graph, on a device that is always bound by launches."""
    replayed: list[torch.Size] = []

    def capture_nothing(run: Callable[..., Any], samples: tuple[torch.Tensor, ...], **_: Any) -> Any:
        static = samples[0]

        def replay(images: torch.Tensor, *trainable: torch.Tensor) -> Any:
            replayed.append(images.shape)
            static.copy_(images)  # as torch does, so another shape fails
            assert all(a.data_ptr() == b.data_ptr() for a, b in zip(trainable, samples[1:], strict=True))
            return run(static, *trainable)

        return replay

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture_nothing)
    monkeypatch.setattr(devices, "has_graphs", lambda device: True)
    monkeypatch.setattr(devices, "memory_info", lambda device: (FREE, FREE))
    monkeypatch.setattr(TrainingPass, "launch_share", lambda self, images: 0.9)
    return replayed


def captured(
    run: SmallRun, images: int = 4, family: str = "", size_high: float = 1, ranks: int = 1, **more: Any
) -> SmallRun:
    if family:
        cast(Detector, run.state.model).description = cast(ModelDescription, SimpleNamespace(family=family))
    largest = LargestPass(run.state, run.loss, run.precision, run.img, 5)
    capture(TrainConfig(**more), (1, size_high), largest, images, replace(run.world, size=ranks))
    return run


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("yolov5-narrow", "bf16"),
        ("yolov3-narrow", "fp32"),
        pytest.param("ppyoloe-narrow", "bf16", marks=pytest.mark.slow),
    ],
)
def test_passes_of_the_usual_shape_are_replayed_and_change_no_bit(
    model: str, precision: str, shapes: list[torch.Size]
) -> None:
    settings = {"precision": precision, "images": 6, "micro_batch": 2, "per_pass": 2}
    plain, graphed = (small_run(model, **settings) for _ in range(2))  # type: ignore[arg-type]
    captured(graphed)
    for run in (plain, graphed):
        run.do(3)
    assert shapes == 3 * [torch.Size((4, 3, 64, 64))]  # the last pass of each step has two images
    found = graphed.tensors()
    assert all(torch.equal(t, found[name]) for name, t in plain.tensors().items())


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_only_the_part_that_reads_images_is_replayed_on_request(
    precision: str, shapes: list[torch.Size]
) -> None:
    """The host waits for the matching between this part and the loss, and denoising queries have other shapes in each pass."""
    plain, graphed = (small_run("dfine-n", precision=precision, images=2, micro_batch=1) for _ in range(2))
    captured(graphed, images=1)
    assert graphed.state.replicas.lead.usual_pass is None, "not measured on a GPU"
    captured(graphed, images=1, passes="graphs")
    for run in (plain, graphed):
        run.do(1)
    assert shapes == 2 * [torch.Size((1, 3, 64, 64))]
    found = graphed.tensors()
    assert all(torch.equal(t, found[name]) for name, t in plain.tensors().items())


def test_a_network_that_reads_targets_everywhere_has_no_graph(
    shapes: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run()
    monkeypatch.setattr(type(run.state.replicas.lead.model), "reads_targets", True)
    with pytest.raises(ConfigError, match="--passes graphs: all of the network reads the targets"):
        captured(run, passes="graphs")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"rect": True}, "size of the images varies"),
        ({"size_high": 1.5}, "size of the images varies"),
        ({"sync_bn": True}, "sums over the ranks during a pass"),
        ({"family": "custom"}, "your own network"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_runs_have_no_graph(more: dict[str, Any], reason: str, shapes: list[torch.Size]) -> None:
    run = captured(small_run(), **more)
    assert run.state.replicas.lead.usual_pass is None
    with pytest.raises(ConfigError, match=f"--passes graphs: .*{reason}"):
        captured(run, passes="graphs", **more)


def test_several_processes_have_graphs_on_request(shapes: list[torch.Size]) -> None:
    run = small_run()
    assert captured(run, ranks=2).state.replicas.lead.usual_pass is None
    assert captured(run, ranks=2, passes="graphs").state.replicas.lead.usual_pass is not None
    assert captured(small_run(), passes="plain").state.replicas.lead.usual_pass is None


def test_a_graph_needs_launches_that_take_long_or_a_request(
    shapes: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert captured(small_run()).state.replicas.lead.usual_pass is not None
    monkeypatch.setattr(TrainingPass, "launch_share", lambda self, images: 0.7)
    run = captured(small_run())
    assert run.state.replicas.lead.usual_pass is None
    assert captured(run, passes="graphs").state.replicas.lead.usual_pass is not None


def test_a_graph_needs_memory(shapes: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(device: torch.device) -> int:
        return next(peaks)

    monkeypatch.setattr(devices, "peak_reserved_bytes", peak)
    peaks, run = iter([0, FREE // 2]), small_run()
    assert captured(run).state.replicas.lead.usual_pass is None
    peaks = iter([0, FREE // 2])
    with pytest.raises(ConfigError, match="--passes graphs: cpu has too little memory"):
        captured(run, passes="graphs")
    peaks = iter([0, FREE // 3])
    assert captured(run).state.replicas.lead.usual_pass is not None


def test_a_network_that_torch_cannot_capture_trains_without_a_graph(
    shapes: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **more: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fail)
    run = captured(small_run())
    assert run.state.replicas.lead.usual_pass is None
    run.do(2)
    with pytest.raises(ConfigError, match="cannot capture the network: operation not permitted"):
        captured(run, passes="graphs")


def test_memory_of_a_graph_counts_until_it_is_gone(
    shapes: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = iter([100, 350])
    monkeypatch.setattr(devices, "reserved_bytes", lambda device: next(reserved))
    run = captured(small_run())
    device = run.state.replicas.lead.device
    assert devices.peak_memory_bytes(device) == 250
    run.state.replicas.lead.usual_pass = None
    assert devices.peak_memory_bytes(device) == 0


def test_the_launch_share_is_that_of_a_host_that_computes_itself() -> None:
    run = small_run()
    share = TrainingPass(run.state.replicas.lead.model, lambda: devices.untimed_kernels()).launch_share(
        torch.zeros(2, 3, 64, 64)
    )
    assert share > 0.3  # 1 but for what other processes take between the two times
