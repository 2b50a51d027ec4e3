"""The module that knows kinds of devices: nothing beside it does, and it works on a machine without a GPU."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from label_rows import shapes_of
from small_weights import saved, untrained
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import yolofleet
from yolofleet.config.load import resolve_val
from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.families.build import build_model
from yolofleet.families.networks.description import describe
from yolofleet.families.networks.precision import autocast, resolve_precision
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.families.yolov5.loss import Yolov5Loss
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support import devices
from yolofleet.support.errors import ConfigError, DeviceError
from yolofleet.training.parallel.world import World
from yolofleet.training.rank import val

SOURCE = Path(yolofleet.__file__).resolve().parent
KNOW_DEVICES = (
    "support/devices.py",
    "fleet/doctor/",
    "inference/export/",
)  # export writes for runtimes that have devices of their own
OF_ONE_KIND = ("cuda", "xpu", "mps", "hip", "cudnn", "mkldnn", "npu")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def knowledge_of_devices(tree: ast.AST) -> list[tuple[int, str]]:
    """Lines that name one kind of device: torch.cuda, t.is_cuda, t.cuda(), device.type == "cuda"."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            of_part = isinstance(node.value, ast.Attribute) and node.value.attr in ("backends", "version")
            if (of_torch or of_part) and node.attr in OF_ONE_KIND:
                found.append((node.lineno, ast.unparse(node)))
            if node.attr in ("is_cuda", "is_xpu", "is_mps") or (node.attr == "accelerator" and of_torch):
                found.append((node.lineno, ast.unparse(node)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            found.append((node.lineno, ast.unparse(node)))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides):
                kinds = (*OF_ONE_KIND, "cpu", "meta")
                words = {n.value for side in sides for n in ast.walk(side) if isinstance(n, ast.Constant)}
                if words & set(kinds):
                    found.append((node.lineno, ast.unparse(node)))
    return found


def test_no_other_module_knows_a_kind_of_device():
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        inside = path.relative_to(SOURCE)
        if not inside.as_posix().startswith(KNOW_DEVICES):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            wrong += [f"{inside}:{line}: {what}" for line, what in knowledge_of_devices(tree)]
    assert not wrong, "use yolofleet/support/devices.py:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.synchronize()",
        "torch.backends.cudnn.benchmark = True",
        "torch.accelerator.synchronize()",
        "x = t.is_cuda",
        "t.cuda()",
        'x = device.type == "cuda"',
        'x = "cpu" != t.device.type',
        'x = device.type in ("cuda", "xpu")',
    ],
)
def test_that_check_sees(code: str):
    assert knowledge_of_devices(ast.parse(code))


def test_the_cpu_needs_no_waiting_and_no_pinning():
    assert devices.is_host(CPU) and not devices.can_pin(CPU) and devices.peak_memory_bytes(CPU) == 0
    devices.synchronize(CPU)
    devices.reset_peak_memory(CPU)
    devices.wait_for(CPU)
    devices.select(CPU)
    with devices.selected(CPU):
        pass
    t = torch.tensor([1.0, 2.0])
    assert devices.to_device(t, CPU) is t
    copy = devices.HostCopy(t)
    t.zero_()
    assert copy.read().tolist() == [1.0, 2.0]


def test_backends_of_process_groups(monkeypatch: pytest.MonkeyPatch):
    assert devices.collective_backend(CPU) == "gloo"
    monkeypatch.setattr(devices.dist, "is_backend_available", lambda name: True)
    assert devices.collective_backend(GPU) == "cpu:gloo,cuda:nccl"
    assert devices.collective_backend(torch.device("meta")) == "gloo"
    monkeypatch.setattr(devices.dist, "is_backend_available", lambda name: False)
    assert devices.collective_backend(GPU) == "gloo"


def an_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    monkeypatch.setattr(devices, "accelerator", lambda: kind)
    monkeypatch.setattr(devices, "device_count", lambda: count)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "privateuseone"])
def test_devices_of_a_machine_with_an_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str):
    an_accelerator(monkeypatch, kind, 3)
    assert devices.device_of("auto", 2) == torch.device(kind, 2)
    assert devices.device_of("2,0", 1) == torch.device(kind, 0)
    assert devices.device_of("cpu:2", 1) == CPU
    with pytest.raises(ConfigError, match=rf"--device 1,3: no {kind.upper()} device 3; torch sees 3"):
        devices.device_of("1,3", 0)
    with pytest.raises(ConfigError, match="process 3 of this machine has no device"):
        devices.device_of("auto", 3)


def test_several_mig_instances_are_one_device_for_a_process(monkeypatch: pytest.MonkeyPatch):
    an_accelerator(monkeypatch, "cuda", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert devices.device_of("auto", 0) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="torch sees 1: CUDA shows a process one MIG instance") as caught:
        devices.device_of("0,1", 1)
    assert "one process for each MIG instance" in caught.value.hint


def test_metal_is_taken_only_when_it_is_named(monkeypatch: pytest.MonkeyPatch):
    an_accelerator(monkeypatch, "mps", 1)
    assert devices.device_of("auto", 0) == CPU
    assert devices.device_of("mps", 0).type == "mps"
    an_accelerator(monkeypatch, "", 0)
    assert devices.device_of("auto", 0) == CPU
    with pytest.raises(ConfigError, match="no Metal device"):
        devices.device_of("mps", 0)
    with pytest.raises(ConfigError, match="no CUDA device 0; torch sees 0"):
        devices.device_of("0", 0)


def test_emulated_bfloat16_is_refused_and_the_right_device_is_asked(monkeypatch: pytest.MonkeyPatch):
    """V100 and T4 emulate it; torch asks the current device, which need not be ours."""
    current = [0]

    @contextmanager
    def device(place: torch.device) -> Iterator[None]:
        current[0] = place.index
        yield
        current[0] = 0

    asked = []

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        asked.append(current[0])
        return including_emulation

    module = SimpleNamespace(
        is_bf16_supported=is_bf16_supported, get_device_name=lambda device: "Tesla T4", device=device
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    with pytest.raises(ConfigError, match="--precision bf16: Tesla T4 cannot compute in bfloat16"):
        resolve_precision("bf16", GPU)
    assert asked == [1] and current == [0]


def test_float32_is_float32_unless_tf32_is_asked_for():
    def now() -> list[bool]:
        return [torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32]

    before = now()
    try:
        devices.allow_tf32(True, False)  # torch's own defaults
        with autocast("fp32", GPU):
            assert now() == [False, False]
        with autocast("tf32", GPU):
            assert now() == [True, True]
        assert now() == [True, False]
        with autocast("fp32", CPU):
            assert now() == [True, False], "nothing to say on a CPU"
    finally:
        devices.allow_tf32(*before)
    with pytest.raises(ConfigError, match="--precision tf32: cpu does not support TensorFloat-32"):
        resolve_precision("tf32", CPU)


SWITCHES = """
import torch
from yolofleet.support import devices
from yolofleet.families.networks.precision import autocast

backends, gpu = torch.backends, torch.device("cuda", 0)

def switches():
    found = []
    for read in (lambda: backends.cudnn.allow_tf32, torch.get_float32_matmul_precision):
        try:
            found.append(read())
        except RuntimeError:
            found.append("cannot be told")
    if hasattr(backends.cudnn, "conv"):
        places = backends, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul, backends.mkldnn.matmul
        found += [place.fp32_precision for place in places]
    return found

{given}
before = switches()
for precision, expected in (("fp32", False), ("tf32", True)):
    with autocast(precision, gpu):
        assert backends.cudnn.allow_tf32 is backends.cuda.matmul.allow_tf32 is expected, precision
        if hasattr(backends.cudnn, "conv"):
            now = [op.fp32_precision for op in (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul)]
            assert now == ["tf32" if expected else "ieee"] * 3, now
    told = [(was, now) for was, now in zip(before, switches()) if was != "cannot be told"]
    assert all(was == now for was, now in told), (precision, told)
devices.kernel_versions(torch.device("cpu"))
devices.choose_kernels(deterministic=False, benchmark=False, tf32=False)
assert not (backends.cudnn.allow_tf32 or backends.cuda.matmul.allow_tf32)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "given",
    [
        "",
        pytest.param("torch.set_float32_matmul_precision('medium')", marks=pytest.mark.slow),
        "backends.cudnn.allow_tf32 = False; backends.cuda.matmul.allow_tf32 = True",
        pytest.param("backends.cuda.matmul.fp32_precision = 'tf32'", marks=pytest.mark.slow),
        pytest.param("backends.cudnn.conv.fp32_precision = 'ieee'", marks=pytest.mark.slow),
        pytest.param("backends.fp32_precision = 'tf32'", marks=pytest.mark.slow),
        "backends.fp32_precision = 'ieee'; backends.cudnn.rnn.fp32_precision = 'tf32'",
        pytest.param(
            "backends.cudnn.allow_tf32 = False; backends.cuda.matmul.fp32_precision = 'tf32'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_both_interfaces_to_tf32_work_and_are_restored(given: str):
    """In a process of its own: torch cannot tell what a process has set through both."""
    if "fp32_precision" in given and not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("this torch has the old interface only")
    done = subprocess.run(
        [sys.executable, "-c", SWITCHES.replace("{given}", given)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="they work")
@pytest.mark.parametrize("make", [torch.amp.GradScaler, torch.amp.autocast])
def test_autocast_and_a_scaler_that_switch_themselves_off_fail_a_test(make: Any):
    """They only warn; pyproject.toml makes that warning an error."""
    with pytest.raises(UserWarning, match="Disabling"):
        make("cuda")


def test_what_a_device_lacks_is_no_error():
    meta = torch.device("meta")
    devices.reset_peak_memory(meta)
    assert devices.peak_memory_bytes(meta) == 0
    assert devices.name_of(meta) == "meta"
    assert not devices.has_fused(torch.optim.SGD, meta)
    assert devices.has_fused(torch.optim.AdamW, CPU)


class Copies(TorchDispatchMode):
    """Counts copies from the CPU to another device, by whether the host waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking = self.free = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device.type == "cpu" and out.device.type != "cpu":
                free = (kwargs or {}).get("non_blocking") or (len(args) > 2 and args[2])
                self.free, self.blocking = self.free + bool(free), self.blocking + (not free)
        return out


def test_the_loss_makes_no_copy_that_the_host_waits_for():
    recipe = Yolov5Hyperparameters(obj_pw=2.0, cls_pw=0.5, label_smoothing=0.1, fl_gamma=1.5)
    model = build_model(describe("yolov5n"), 3)
    assert model.anchors_px is not None
    loss = Yolov5Loss(anchors_px=model.anchors_px, strides=model.strides, nc=3, recipe=recipe, img=64)
    labels = shapes_of([[0, 1, 0.5, 0.5, 0.3, 0.3], [1, 2, 0.3, 0.6, 0.4, 0.2]])
    targets = loss.match(labels, 2, (64, 64))
    raws = [torch.zeros(2, 3, 64 // s, 64 // s, 8, device="meta") for s in (8, 16, 32)]
    with Copies() as copies:
        loss.sums(raws, targets)
    assert (copies.blocking, copies.free) == (0, 6), "six arrays of targets"


def test_validation_uses_the_memory_layout_of_training(tmp_path: Path):
    make_shapes(tmp_path / "set", images=2, val_images=2, img=64, seed=0)
    weights = saved(untrained(4), tmp_path / "w.safetensors")
    kernels: list[torch.Tensor] = []

    def look(module: nn.Module, _: object) -> None:
        kernels.extend(p for p in module.parameters(recurse=False) if p.ndim == 4 and min(p.shape[1:3]) > 1)

    config = resolve_val(
        {"weights": str(weights), "data": str(tmp_path / "set/data.yaml"), "img": 64, "plots": False}
    )
    with register_module_forward_pre_hook(look):
        val.validate(config, None, World.single(), None, RunFolder(tmp_path))
    assert kernels and all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)


def test_kernels_are_not_timed_inside_the_block() -> None:
    def timed() -> bool:
        return bool(torch.backends.cudnn.benchmark)

    before = timed()
    try:
        torch.backends.cudnn.benchmark = True
        with pytest.raises(RuntimeError), devices.untimed_kernels():
            assert not timed()
            raise RuntimeError
        assert timed()
    finally:
        torch.backends.cudnn.benchmark = before


FAILURES = [
    "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: an illegal memory access was encountered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "CUDA error: unspecified launch failure",
    "CUDA error: misaligned address",
    "CUDA error: unknown error",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "CUDA error: uncorrectable NVLink error detected during the execution",
    "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb)`",
    "HIP error: an illegal memory access was encountered",
    "UR error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
]
OTHERS = [
    "CUDA error: device-side assert triggered",
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: invalid argument",
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "The size of tensor a (3) must match the size of tensor b (4)",
]


@pytest.mark.parametrize("text", FAILURES)
def test_a_device_that_failed_is_named_with_what_to_do(text: str) -> None:
    failed = DeviceError.told_by(f"\n{text}\n", "GPU 1 of node-b (rank 3)")
    assert failed is not None and failed.what == f"GPU 1 of node-b (rank 3) failed: {text.splitlines()[0]}"
    assert "nvidia-smi" in failed.hint and "dmesg" in failed.hint and failed.exit_code == 6


@pytest.mark.parametrize("text", OTHERS)
def test_a_fault_of_a_program_is_no_device_that_failed(text: str) -> None:
    assert DeviceError.told_by(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    ],
)
def test_memory_that_a_library_of_cuda_does_not_get_has_run_out(text: str) -> None:
    assert devices.is_out_of_memory(RuntimeError(text)) and DeviceError.told_by(text) is None


def test_gpus_are_told_apart_by_their_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = {0: "5a", 1: "5b"}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index])
    )
    assert devices.uuid_of(GPU) == "5b"
    assert devices.uuid_of(CPU) == devices.uuid_of(torch.device("meta")) == ""
