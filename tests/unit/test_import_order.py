"""The architecture, checked: who may import whom, and who stays without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import yolofleet

SOURCE = Path(yolofleet.__file__).resolve().parent
ORDER = (  # a module imports its own part and earlier ones
    ("text",),
    ("terminal",),
    ("redaction",),
    ("errors",),
    ("extras",),
    ("system",),
    ("files",),
    ("user_code",),
    ("config",),
    ("devices",),
    ("geometry",),
    ("keyed",),
    ("images",),
    ("datasets",),
    ("data",),
    ("models",),
    ("losses",),
    ("families",),
    ("recipe_class",),
    ("parallel",),
    ("checkpoint",),
    ("evaluate",),
    ("report",),
    ("board",),
    ("train",),
    ("export",),
    ("predict", "tune"),
    ("fleet",),
    ("plan",),
    ("runs",),
)
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}
ROOTS = ("cli", "worker", "api", "__init__", "__main__")  # they put the parts together
TO_A_ROOT = {("runs", "worker")}  # inside a function: this process becomes a worker
WITHOUT_TORCH = (
    "text",
    "terminal",
    "redaction",
    "errors",
    "extras",
    "system",
    "files",
    "user_code",
    "config",
    "fleet",
    "plan",
    "board",
    "cli",
    "__init__",
    "__main__",
)


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported(tree: ast.AST) -> list[tuple[str, int]]:
    """Full names of imported modules, with their lines."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module
            if node.module != "yolofleet":
                found.append((node.module, node.lineno))
            if node.module.startswith("yolofleet"):  # a name may be a module
                found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def top_level(tree: ast.Module) -> list[tuple[str, int]]:
    """As :func:`imported`, without those inside functions and under TYPE_CHECKING."""
    found: list[tuple[str, int]] = []
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
            continue
        inner = [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
        waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        if not inner:
            found += imported(node)
    return found


def test_each_part_imports_only_earlier_parts():
    wrong = []
    for path in modules():
        mine = part_of(path)
        if mine in ROOTS:
            continue
        assert mine in RANK, f"{path.relative_to(SOURCE)}: give this part a place in ORDER"
        for name, line in imported(ast.parse(path.read_text(encoding="utf-8"))):
            if not name.startswith("yolofleet."):
                continue
            theirs = name.split(".")[1]
            if theirs in (mine, "__version__") or (mine, theirs) in TO_A_ROOT:
                continue
            if theirs not in RANK or RANK[theirs] >= RANK[mine]:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


FOREIGN_TO_THE_FLEET = (  # detection, in the widest sense
    *("data", "datasets", "images", "geometry", "models", "losses", "families", "checkpoint", "evaluate"),
    *("train", "export", "predict", "tune", "runs", "worker", "api", "cli"),
)
DETECTION_SETTINGS = ("TrainConfig", "ValConfig", "Recipe", "resolve_train", "check_train", "dump_config")


def test_the_fleet_knows_nothing_of_detection():
    """It gets a command, texts and files to ship, and what the run asks of each machine; imports in functions count."""
    wrong = []
    for path in (p for p in modules() if part_of(p) == "fleet"):
        for name, line in imported(ast.parse(path.read_text(encoding="utf-8"))):
            parts = name.split(".")
            if parts[0] == "yolofleet" and (
                set(parts[1:2]) & set(FOREIGN_TO_THE_FLEET) or parts[-1] in DETECTION_SETTINGS
            ):
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_only_runs_reach_the_worker_and_only_inside_a_function():
    for path in modules():
        names = [name for name, _ in top_level(ast.parse(path.read_text(encoding="utf-8")))]
        assert part_of(path) == "worker" or "yolofleet.rank.worker" not in names, path


def file_of(name: str) -> Path | None:
    """The file of a module of ours, by its dotted name."""
    path = SOURCE.joinpath(*name.split(".")[1:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@pytest.mark.long
def test_configuration_fleet_and_command_line_never_reach_torch_at_import():
    """Follows top-level imports through our own modules, so the message names the way."""
    for start in modules():
        if part_of(start) not in WITHOUT_TORCH:
            continue
        ways = [[start]]
        seen = {start}
        while ways:
            way = ways.pop()
            for name, line in top_level(ast.parse(way[-1].read_text(encoding="utf-8"))):
                shown = " -> ".join(str(p.relative_to(SOURCE)) for p in way)
                assert name.split(".")[0] not in ("torch", "cv2"), f"{shown}:{line} imports {name}"
                follow = file_of(name) if name.startswith("yolofleet") else None
                if follow and follow not in seen:
                    seen.add(follow)
                    ways.append([*way, follow])


@pytest.mark.parametrize(
    "argv", [["--help"], ["train", "--help"], ["train", "--data", "shapes", "--model", "yolov5n", "--dry-run"], ["data", "--help"]]
)  # fmt: skip
def test_help_and_dry_run_import_no_torch(argv):
    code = (
        "import sys; from yolofleet.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'cv2', 'matplotlib'} & set(sys.modules); print(heavy or '', file=sys.stderr);"
        "sys.exit(bool(code or heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_top_help_imports_no_pydantic():
    code = (
        "import sys; from yolofleet.cli import main; main(['--help']);"
        "sys.exit(bool({'pydantic', 'yaml', 'numpy', 'rich.table'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "LAMB"])
def test_an_update_imports_no_compiler(name):
    code = (
        "import sys, torch, yolofleet.rank.worker; from yolofleet.config.schema import Recipe;"
        "from yolofleet.train.optimiser import build_optimizer, update_if_finite;"
        "model = torch.nn.Conv2d(3, 4, 1); model(torch.ones(1, 3, 2, 2)).sum().backward();"
        f"optimizer = build_optimizer(model, '{name}', Recipe(), 1e-4);"
        "update_if_finite(optimizer, torch.tensor(True));"
        "sys.exit(bool({'torch._dynamo', 'sympy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
