"""Is a TorchScript file a plain network? Looked at before torch loads it.

A TorchScript file is a program in text form, and torch's operations include some that write files. What our
export writes is one function without loops or branches that calls arithmetic; anything else is refused. The text
is parsed as Python and never run by Python.
"""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path

from yolofleet.errors import CheckpointError

MAX_CODE = 4 * 2**20  # bytes of text
MAX_ENTRIES = 100_000
PARTS = ("data.pkl", "constants.pkl", "version", "byteorder", ".format_version", ".storage_alignment")
FOLDERS = ("code", "constants", "data", "extra", ".data")

ARITHMETIC = (
    *("_convolution", "conv2d", "max_pool2d", "upsample_nearest2d", "pad", "constant_pad_nd", "mean", "sum"),
    *("leaky_relu_", "mish", "mish_", "relu_", "silu", "silu_", "hardsigmoid", "sigmoid", "softmax"),
    *("add", "sub", "mul", "div", "square", "exp", "clamp", "arange", "device", "to"),
    *("new_full", "new_zeros", "ones_like", "repeat", "repeat_interleave", "expand", "size"),
    *("cat", "stack", "chunk", "split", "slice", "permute", "reshape", "unflatten", "unsqueeze", "view"),
)
CALLS = {"int", "ops.prim.NumToTensor"} | {f"torch.{name}" for name in ARITHMETIC}
SYNTAX = (
    *(
        ast.Module,
        ast.ClassDef,
        ast.FunctionDef,
        ast.arguments,
        ast.arg,
        ast.Assign,
        ast.AnnAssign,
        ast.Return,
    ),
    *(ast.Call, ast.keyword, ast.Attribute, ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Subscript),
    *(ast.UnaryOp, ast.USub, ast.Load, ast.Store),
)


def check_program(path: Path) -> None:
    """
    Raises:
        CheckpointError: not a TorchScript file, or not a plain network.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            if len(entries) > MAX_ENTRIES or len(set(names)) != len(names):
                raise _refused(path, "its archive has entries twice, or too many")
            for entry in entries:
                _check_place(path, entry.filename)
            code = [entry for entry in entries if entry.filename.endswith(".py")]
            if not any(entry.filename.endswith("/constants.pkl") for entry in entries) or not code:
                raise CheckpointError(f"{path} is not a TorchScript file", hint="use another copy")
            stored = sum(e.file_size for e in entries if e.compress_type == zipfile.ZIP_STORED)
            packed = sum(e.file_size for e in entries if e.compress_type != zipfile.ZIP_STORED)
            if stored > path.stat().st_size or packed > 16 * MAX_CODE:
                raise _refused(path, "its archive would unpack to more than it holds")
            if sum(entry.file_size for entry in code) > MAX_CODE:
                raise _refused(path, "its program is too long")
            for entry in code:
                _check_code(path, archive.read(entry).decode("utf-8"))
    except OSError as problem:
        raise CheckpointError(f"cannot read {path}: {problem.strerror or problem}") from None
    except (zipfile.BadZipFile, ValueError, SyntaxError, RecursionError, MemoryError, NotImplementedError):
        raise CheckpointError(f"{path} is not a whole TorchScript file", hint="use another copy") from None


def _check_place(path: Path, name: str) -> None:
    parts = name.split("/")
    inside = parts[1:]
    if not inside or not (inside[0] in FOLDERS or (len(inside) == 1 and inside[0] in PARTS)):
        raise _refused(path, f"its archive holds {name[:80]!r}")


def _check_code(path: Path, text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, SYNTAX):
            raise _refused(path, f"its program has a {type(node).__name__}")
        if isinstance(node, ast.FunctionDef) and node.name != "forward":
            raise _refused(path, f"its program has a function {node.name[:80]!r}")
        if isinstance(node, ast.Call) and ast.unparse(node.func) not in CALLS:
            raise _refused(path, f"its program calls {ast.unparse(node.func)[:80]}")


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is more than a network: {why}", hint="use weights, or a file that yolofleet export wrote"
    )
