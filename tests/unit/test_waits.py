"""No test fails because a machine is slow: it waits for events, and a limit of time only ends a hang."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SHORTEST_S = 300  # of a limit that a healthy test may have
POLL_S = 5  # a wait up to this length is repeated, or is meant to end by time
CLOCKS = ("time.monotonic", "time.perf_counter", "time.process_time", "time.thread_time")
WAITS = ("wait", "join", "result", "communicate", "settimeout")


def short_waits(text: str) -> Iterator[str]:
    """Yield the lines of a test file that end a wait early, or assert that something was fast."""
    tree = ast.parse(text)
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    constants = {ast.unparse(node.targets[0]): node.value for node in assigned if len(node.targets) == 1}

    def is_short(node: ast.expr) -> bool:
        value = constants.get(ast.unparse(node), node)
        is_number = isinstance(value, ast.Constant) and isinstance(value.value, (int, float))
        return is_number and POLL_S < value.value < SHORTEST_S  # type: ignore[attr-defined]

    def has_clock(node: ast.AST) -> bool:
        return any(f"{clock}()" in ast.unparse(node) for clock in CLOCKS)

    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="timeout", value=value) if is_short(value):
                yield ast.unparse(node)
            case ast.BinOp(left=left, op=ast.Add(), right=right) if has_clock(left) and is_short(right):
                yield ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr=name), args=[value, *_]) if name in WAITS and is_short(
                value
            ):
                yield ast.unparse(node)
            case ast.Assert(
                test=ast.Compare(left=ast.BinOp() as left, ops=[ast.Lt() | ast.LtE()], comparators=[most])
            ):
                limit = constants.get(ast.unparse(most), most)
                number = limit.value if isinstance(limit, ast.Constant) else None
                if has_clock(left) and not (isinstance(number, (int, float)) and number >= SHORTEST_S):
                    yield ast.unparse(node)


FOLDERS = [path.name for path in sorted(TESTS.iterdir()) if path.is_dir()]


@pytest.mark.parametrize("folder", [*FOLDERS, "."])
def test_no_test_depends_on_the_speed_of_the_machine(folder: str) -> None:
    files = (TESTS / folder).rglob("*.py") if folder != "." else TESTS.glob("*.py")
    found = {str(path.relative_to(TESTS)): list(short_waits(path.read_text("utf-8"))) for path in files}
    assert not {name: lines for name, lines in found.items() if lines}


def test_limits_that_a_slow_machine_reaches_are_found() -> None:
    slow = """
WAIT_S = 45
process.communicate(timeout=WAIT_S)
ends = time.monotonic() + 60
thread.join(240)
assert time.monotonic() - began_s < 1.5
assert (time.process_time() - began) / 500 < 1e-4
"""
    assert len(list(short_waits(slow))) == 5
    steady = "thread.join(0.05)\nprocess.wait(timeout=900)\nassert time.monotonic() - began_s > 0.4"
    assert not list(short_waits(steady))
