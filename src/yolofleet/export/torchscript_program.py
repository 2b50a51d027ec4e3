"""Run a TorchScript file as data, without torch's own loader.

A TorchScript file is a program in text form, and some of torch's operations write files. Our export writes one function
without loops or branches that calls arithmetic only. This module parses that text and refuses anything else. It makes
the calls itself: each name stands for one operation of the table ``CALLS``. The pickle machine reads the tensors. So only
code that this module has checked runs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yolofleet.checkpoint.pickles import StoredTensor, TorchFile
from yolofleet.errors import CheckpointError
from yolofleet.text import screen_line

MAX_CODE = 2**20  # bytes of text; PP-YOLOE-x has 60,000
MAX_METADATA_BYTES = 16 * 2**20

ARITHMETIC = (
    *("_convolution", "conv2d", "max_pool2d", "upsample_nearest2d", "pad", "constant_pad_nd", "mean", "sum"),
    *("leaky_relu_", "mish", "mish_", "relu_", "silu", "silu_", "hardsigmoid", "sigmoid", "softmax"),
    *("add", "sub", "mul", "div", "square", "exp", "clamp", "arange", "to"),
    *("new_full", "new_zeros", "ones_like", "repeat", "repeat_interleave", "expand", "size"),
    *("cat", "stack", "chunk", "split", "slice", "permute", "reshape", "unflatten", "unsqueeze", "view"),
)
CALLS: dict[str, Callable[..., Any]] = {
    **{f"torch.{name}": getattr(torch.ops.aten, name) for name in ARITHMETIC},
    "torch.device": lambda _name: torch.device("cpu"),
    "int": int,
    "ops.prim.NumToTensor": torch.tensor,
}

Values = dict[str, Any]  # the program's variables: tensors, numbers, lists of them
Expression = Callable[[Values], Any]


@dataclass(frozen=True)
class Line:
    """A statement ``targets = value``.

    Attributes:
        unpacks: the value is a sequence, with one part for each target.
        last_used: names that no later line reads, so their values can be freed.
    """

    targets: tuple[str, ...]
    unpacks: bool
    value: Expression
    last_used: tuple[str, ...]


class Program:
    """The checked function of a TorchScript file.

    Args:
        metadata_name: name of the member with the metadata.
    Attributes:
        metadata_text: content of that member; "" if the file has none.
    Raises:
        CheckpointError: this is not a TorchScript file, or its program has more than arithmetic in one function.
    """

    def __init__(self, path: Path, metadata_name: str) -> None:
        self._path = path
        with TorchFile(path, kind="constants") as file:
            if not isinstance(file.root, tuple) or not all(isinstance(c, StoredTensor) for c in file.root):
                raise self._refused("its constants are not tensors")
            code = [name for name in file.members if "/code/" in name and name.endswith(".py")]
            if len(code) != 1:
                raise self._refused(f"its program has {len(code)} parts instead of one")
            text = file.read_member(code[0], MAX_CODE)
            member = next((m for m in file.members if m.endswith(f"/extra/{metadata_name}")), None)
            content = file.read_member(member, MAX_METADATA_BYTES) if member else b""
            self._constants = {f"c{i}": file.tensor(stored) for i, stored in enumerate(file.root)}
        try:
            self.metadata_text = content.decode("utf-8")
            self._input, self._lines, self._result = self._compiled(ast.parse(text.decode("utf-8")).body)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise CheckpointError(
                f"{path} is not a complete TorchScript file", hint="use another copy"
            ) from None

    def __call__(self, images: Tensor) -> Tensor:
        """Return the program's output for ``images``.

        Raises:
            CheckpointError: the output is not a tensor.
            RuntimeError, TypeError: torch cannot execute an operation.
        """
        values: Values = {self._input: images}
        for line in self._lines:
            value = line.value(values)
            parts = value if line.unpacks else (value,)
            values.update(zip(line.targets, parts, strict=True))
            for name in line.last_used:
                values.pop(name, None)
        result = self._result(values)
        if not isinstance(result, Tensor):
            raise self._refused("its function does not return a tensor")
        return result

    def _refused(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} has code that no network needs: {screen_line(why, limit=200)}",
            hint="use weights, or a file that yolofleet export wrote",
        )

    # -- from text to calls ----------------------------------------------------------------------------

    def _compiled(self, body: list[ast.stmt]) -> tuple[str, list[Line], Expression]:
        """Return the name of the input, the lines, and the value that the function returns."""
        functions = [n for part in body for n in ast.walk(part) if isinstance(n, ast.FunctionDef)]
        match body:
            case [ast.ClassDef(body=[*_, ast.FunctionDef(name="forward") as function])] if functions == [
                function
            ]:
                pass
            case _:
                raise self._refused(f"its program has the functions {', '.join(f.name for f in functions)}")
        names = [argument.arg for argument in function.args.args]
        statements, last = function.body[:-1], function.body[-1]
        if len(names) != 2 or not isinstance(last, ast.Return) or last.value is None:
            raise self._refused("its function does not take images and return boxes")
        known = {names[1]}
        found = []
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    targets, unpacks = [name], False
                case ast.Assign(targets=[ast.Tuple(elts=parts)], value=value):
                    targets, unpacks = [part.id for part in parts if isinstance(part, ast.Name)], True
                case _:
                    raise self._refused(f"its program has a {type(statement).__name__}")
            found.append((targets, unpacks, value, self._expression(value, known)))
            known.update(targets)
        result = self._expression(last.value, known)
        needed, lines = _names(last.value), []
        for targets, unpacks, value, expression in found[::-1]:
            used = _names(value)
            lines.append(Line((*targets,), unpacks, expression, tuple((used | {*targets}) - needed)))
            needed = (needed - {*targets}) | used
        return names[1], lines[::-1], result

    def _expression(self, value: ast.expr, known: set[str]) -> Expression:
        """Return the function that computes ``value``: constants, known names, and calls of the table."""
        match value:
            case ast.Constant(value=bool() | int() | float() | str() | None as constant):
                return lambda _values: constant
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return lambda _values: -number
            case ast.Name(id=name) if name in known:
                return lambda values: values[name]
            case ast.Attribute(value=ast.Name(id="CONSTANTS"), attr=name) if name in self._constants:
                tensor = self._constants[name]
                return lambda _values: tensor
            case ast.List(elts=parts):
                inner = [self._expression(part, known) for part in parts]
                return lambda values: [part(values) for part in inner]
            case ast.Call(func=function, args=args, keywords=keywords) if all(k.arg for k in keywords):
                called = ast.unparse(function)
                if called not in CALLS:
                    raise self._refused(f"its program calls {called}")
                call = CALLS[called]
                given = [self._expression(arg, known) for arg in args]
                named = {str(k.arg): self._expression(k.value, known) for k in keywords}
                return lambda values: call(
                    *[part(values) for part in given], **{key: part(values) for key, part in named.items()}
                )
        raise self._refused(f"its program has a {type(value).__name__} where a value is expected")


def _names(value: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
