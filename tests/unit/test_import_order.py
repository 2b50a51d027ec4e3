"""The architecture, checked: who may import whom, and who stays without torch."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest
from commands import DEADLINE_S, environment, free_port
from small_files import TINY

import yolofleet
from yolofleet.config.job import dump_config
from yolofleet.config.load import resolve_train
from yolofleet.families.table import FAMILIES

SOURCE = Path(yolofleet.__file__).resolve().parent
ORDER = (  # a module imports its own group and earlier ones; the longest matching name counts
    *("text", "closing", "terminal", "redaction", "errors", "extras"),
    *("families.family", "families.table", "system", "files", "extend.user_code", "config"),
    # what a rank computes with
    *("devices", "geometry", "random_numbers", "images", "datasets", "input", "models", "losses", "families"),
    *(
        "extend.recipe_class",
        "parallel",
        "checkpoint",
        *("families.yolov5.pt_file", "families.darknet.weights_file", "families.ppyoloe.pdparams_file"),
        "checkpoint.reader",
        "checkpoint.contents",
        "evaluate",
        "report",
        "report.loggers",
        "report.board",
    ),
    *("extend.callbacks", "train", "export", "predict", "rank"),
    # what looks at machines, and what starts and watches processes on them
    *("doctor", "hosts", "launch.next_action", "launch.schedulers", "launch", "launch.detached"),
    *("plan", "measure", "measure.selftest", "tune"),
)
RANK = {part: rank for rank, part in enumerate(ORDER)}
ROOTS = ("cli", "api", "hub", "__init__", "__main__", "extend.__init__")  # they put the parts together
RANKS = (
    "devices",
    "geometry",
    "input",
    "models",
    "losses",
    "families",
    "parallel",
    "checkpoint",
    "evaluate",
    "train",
    "rank",
)
EXCEPTIONS = {  # (importing module, imported module)
    ("extend.callbacks", "train.state"),
}
WITHOUT_TORCH = (
    *("text", "closing", "terminal", "redaction", "errors", "extras"),
    *("system", "files", "extend.user_code", "config"),
    *("doctor", "hosts", "launch", "plan", "report.board", "cli", "__init__", "__main__"),
)
WITH_TORCH = ("launch.data_digest",)  # a program of its own


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def group_of(module: str, groups: Collection[str]) -> str | None:
    """The longest of ``groups`` that is ``module`` or a package around it."""
    parts = module.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((name for name in names if name in groups), None)


@cache  # to parse all files takes a second
def imports_of(path: Path) -> list[tuple[str, int]]:
    """Modules of ours that a file imports anywhere, without the package's name, with their lines."""
    found: dict[str, int] = {}
    for name, line in imported(ast.parse(path.read_text(encoding="utf-8"))):
        file = file_of(name) if name.startswith("yolofleet.") else None
        if file and file != path:
            found.setdefault(module_of(file), line)
    return list(found.items())


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


@cache
def top_level(path: Path) -> list[tuple[str, int]]:
    """As :func:`imported`, without those inside functions and under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
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
        module = module_of(path)
        if group_of(module, ROOTS):
            continue
        mine = group_of(module, RANK)
        assert mine, f"{path.relative_to(SOURCE)}: give this part a place in ORDER"
        for name, line in imports_of(path):
            theirs = group_of(name, RANK)
            if name != "__init__" and (theirs is None or RANK[theirs] > RANK[mine]):
                wrong.append((module, name, line))
    found = {(module, name) for module, name, _ in wrong}
    assert not found - EXCEPTIONS, "\n".join(
        f"{m}:{line} imports {n}" for m, n, line in wrong if (m, n) not in EXCEPTIONS
    )
    assert not EXCEPTIONS - found, "exceptions that are no longer needed"


def test_no_two_modules_import_each_other_over_any_way():
    """Imports in functions count."""
    graph = {module_of(path): {name for name, _ in imports_of(path)} for path in modules()}
    reached = {module: set(names) for module, names in graph.items()}
    for through in graph:
        for names in reached.values():
            if through in names:
                names |= reached[through]
    circles = {module for module, names in reached.items() if module in names}
    assert not circles, circles


def test_each_file_of_a_walk_uses_another_one_or_is_used():
    """The walks of docs/architecture.md; the family names the network and the loss of a walk."""
    page = (SOURCE.parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
    walks = page.split("\n## Walks\n")[1].split("\n## ")[0].split("\n- ")[1:]
    assert len(walks) == 3
    family = FAMILIES["yolov5"]
    named = {f"families.{str(part).partition(':')[0]}" for part in (family.network, family.loss)}
    for walk in walks:
        files = re.findall(r"`([\w/]+\.py)`", walk)
        used = {
            file: {name for name, _ in imports_of(SOURCE / file)}
            for file in (*files, "config/schema/__init__.py")
        }
        used["families/yolov5/__init__.py"] = named
        modules_of_walk = {module_of(SOURCE / file) for file in files}
        for file in files:
            is_used = any(module_of(SOURCE / file) in names for names in used.values())
            assert is_used or used[file] & modules_of_walk, f"{file} has no part in: {walk}"


DETECTION_SETTINGS = ("TrainConfig", "ValConfig", "Recipe", "resolve_train", "check_train", "dump_config")


def test_machines_and_hosts_know_nothing_of_detection():
    """They get a command, texts and files to ship, and what the run asks of each machine; imports in functions count."""
    wrong = []
    foreign = {*RANKS, "datasets", "images", "export", "predict", "tune", "cli", "api"} - {
        "devices",
        "parallel",
    }
    for path in (p for p in modules() if module_of(p).split(".")[0] in ("doctor", "hosts")):
        for name, line in imported(ast.parse(path.read_text(encoding="utf-8"))):
            parts = name.split(".")
            if parts[0] == "yolofleet" and (set(parts[1:2]) & foreign or parts[-1] in DETECTION_SETTINGS):
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_module_reaches_the_worker_at_its_top_level():
    for path in modules():
        names = [name for name, _ in top_level(path)]
        assert module_of(path) == "rank.worker" or "yolofleet.rank.worker" not in names, path


def file_of(name: str) -> Path | None:
    """The file of a module of ours, by its dotted name."""
    path = SOURCE.joinpath(*name.split(".")[1:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@pytest.mark.long
def test_configuration_launcher_and_command_line_never_reach_torch_at_import():
    """Follows top-level imports through our own modules, so the message names the way."""
    for start in modules():
        if module_of(start) in WITH_TORCH or not group_of(module_of(start), WITHOUT_TORCH):
            continue
        ways = [[start]]
        seen = {start}
        while ways:
            way = ways.pop()
            for name, line in top_level(way[-1]):
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


TOY = {
    "data": "shapes:8",
    "model": str(TINY),
    "img": 32,
    "batch": 4,
    "epochs": 1,
    "device": "cpu",
    "workers": 0,
}
BARE = {**TOY, "plots": False, "val_period": 0}  # what draws and validates comes before the launcher in ORDER
MOST_LINES = (
    35_200  # of our modules, in a process that trains on one device; 1,900 of them are the preflight check
)
MOST_LINES_OF_A_RANK = 27_500  # that a launcher has started, with a validation and without plots
MOST_ENTERED = 30  # of our files, from the command to the start of torchrun's agent
OF_THE_LAUNCHER = ("launch", "hosts", "doctor", "plan", "measure", "tune", "export", "predict", "cli", "api")
REPORT_OWN = (  # a rank other than 0 has no standard error of its own, so the answer goes into a file
    "import sys, json, pathlib; code = main(sys.argv[2:]);"
    "own = [m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'yolofleet' and m.__file__];"
    "pathlib.Path(sys.argv[1]).write_text(json.dumps([code, own]))"
)


class Imports:
    """A process that runs ``main``; then the modules of ours that it has imported, without the package's name."""

    def __init__(self, main: str, folder: Path, *argv: str | Path, **variables: str) -> None:
        self.answer = folder / f"own {variables.get('RANK', '')}.json"
        command = [sys.executable, "-c", main + REPORT_OWN, str(self.answer), *map(str, argv)]
        env = environment(folder) | variables
        self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL)

    def found(self) -> list[str]:
        assert self.process.wait(DEADLINE_S) == 0
        code, own = json.loads(self.answer.read_text())
        assert code == 0
        return [module_of(Path(file)) for file in own if file.endswith(".py")]


def lines_of(names: list[str]) -> int:
    files = (SOURCE / f"{name.replace('.', '/')}.py" for name in names)
    return sum(len(file.read_text().splitlines()) for file in files)


def test_training_on_one_device_imports_only_what_it_uses(tmp_path):
    options = [f"--{name}={value}" for name, value in TOY.items()]
    found = Imports("from yolofleet.cli import main;", tmp_path, "train", *options).found()
    assert lines_of(found) < MOST_LINES
    others = ("export", "predict", "plan", "measure", "tune", "launch.local", "launch.schedulers.kubernetes")
    assert not [name for name in found if group_of(name, others)]


def test_a_rank_of_two_imports_no_launcher_and_only_what_it_uses(tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(dump_config(*resolve_train(BARE)))
    (folder := tmp_path / "run" / "logs").mkdir(parents=True)
    places = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = [
        Imports("from yolofleet.rank.worker import main;", tmp_path, folder.parent, job, "0",
                **places, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        found = rank.found()
        assert not [name for name in found if group_of(name, OF_THE_LAUNCHER)]
        assert lines_of(found) < MOST_LINES_OF_A_RANK


def test_a_training_enters_few_files_before_its_first_worker_starts(tmp_path):
    """So a reader can follow the way in. The preflight check runs while torchrun's agent loads torch."""
    words = [
        str(Path(__file__).parents[1] / "entered_files.py"),
        "train",
        *(f"--{n}={v}" for n, v in TOY.items()),
    ]
    done = subprocess.run(
        [sys.executable, *words, "--device=cpu:2"],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True,
    )  # fmt: skip
    entered = done.stdout.splitlines()
    assert {"cli/train.py", "config/load.py", "launch/local.py", "hosts/torchrun.py"} <= {*entered}, (
        done.stderr
    )
    assert len(entered) <= MOST_ENTERED, entered


@pytest.mark.long
def test_the_launcher_of_two_processes_imports_no_torch_numpy_or_opencv(tmp_path):
    options = [f"--{name}={value}" for name, value in {**TOY, "device": "cpu:2"}.items()]
    options += ["--no-plots", "--val-period=0"]
    main = (
        "from yolofleet.cli import main as run;"
        "main = lambda argv: run(argv) or sorted({'torch', 'numpy', 'cv2', 'matplotlib'} & {*sys.modules});"
    )
    launcher = Imports(f"import sys; {main}", tmp_path, "train", *options)
    assert launcher.process.wait(DEADLINE_S) == 0
    assert json.loads(launcher.answer.read_text())[0] == []


@pytest.mark.long
def test_an_update_imports_no_compiler():
    code = """
import sys, torch, yolofleet.rank.worker
from yolofleet.config.schema import Recipe
from yolofleet.train.optimiser import build_optimizer, update_if_finite

for name in ("SGD", "Adam", "AdamW", "NAdam"):
    model = torch.nn.Conv2d(3, 4, 1)
    model(torch.ones(1, 3, 2, 2)).sum().backward()
    update_if_finite(build_optimizer(model, name, Recipe(), 1e-4), torch.tensor(True))
    if {"torch._dynamo", "sympy"} & set(sys.modules):
        sys.exit(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
