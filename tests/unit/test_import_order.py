"""The architecture, checked: who may import whom, and who stays without torch."""

from __future__ import annotations

import ast
import json
import os
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
from yolofleet.config.load import resolve_train
from yolofleet.config.stored.job import dump_config
from yolofleet.families.table import FAMILIES

SOURCE = Path(yolofleet.__file__).resolve().parent
ROOMS = {  # in the order of imports; a module imports its own part and earlier ones, and the longest matching name counts
    "support": (
        *("text", "closing", "terminal", "redaction", "errors", "device_names"),
        *("system", "listener", "http_server", "place", "devices", "random_numbers"),
    ),
    "storage": ("",),
    "config": ("",),
    "data": ("geometry", "images", "datasets", "input"),
    "families": (
        *("networks", "losses", "", "weights"),
        *(
            "yolov5.pt_file",
            "darknet.weights_file",
            "ppyoloe.pdparams_file",
            "rtdetr.weights_files",
            "rfdetr.weights_files",
            "recipe_class",
        ),
    ),
    "runs": ("rank_status", "checkpoint", "report", "loggers", "board"),
    "tasks": ("task", "boxes", ""),
    "inference": ("evaluate", "export", "predict", "serve"),
    "training": ("parallel", "", "rank"),
    "fleet": (
        *(
            "strict",
            "resources",
            "doctor",
            "hosts",
            "launch.next_action",
            "launch.schedulers",
            "launch",
            "launch.detached",
        ),
        "plan",
    ),
    "measure": ("", "selftest", "tune"),
    "cli": ("",),
}
# What a family says of itself: the rest of config needs it, so it has no torch.
BELOW_CONFIG = (
    *("config.schema", "families.family", "families.rtdetr.hyperparameters"),
    *(f"families.{name}.hyperparameters" for name in ("dfine", "ppyoloe", "yolov5")),
    *(f"families.{name}.__init__" for name in ("yolov5", "darknet", "ppyoloe", "rtdetr", "dfine", "deim")),
    "families.rfdetr.__init__",
    "families.table",
)


def ordered() -> list[str]:
    parts = [f"{room}.{part}".strip(".") for room, inside in ROOMS.items() for part in inside]
    at = parts.index("config")
    return [*parts[:at], *BELOW_CONFIG, *parts[at:]]


RANK = {part: rank for rank, part in enumerate(ordered())}
ROOTS = ("__init__", "__main__")
WITHOUT_TORCH = (
    *(f"support.{part}" for part in ROOMS["support"] if part not in ("devices", "random_numbers")),
    *("storage", "config", *BELOW_CONFIG, "fleet", "runs.board", "cli", *ROOTS),
)
WITH_TORCH = ("fleet.launch.data_digest",)  # a program of its own
WITH_TORCH_LATER = ("cli.api", "cli.hub")  # the Python interface


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
    names_of_rooms = {
        "__init__",
        *(f"{room}.__init__" for room in ROOMS),
    }  # text alone, which imports nothing
    for path in modules():
        module = module_of(path)
        if module in ROOTS or module in names_of_rooms:
            continue
        mine = group_of(module, RANK)
        assert mine, f"{path.relative_to(SOURCE)}: give this part a place in ROOMS"
        for name, line in imports_of(path):
            theirs = group_of(name, RANK)
            if name not in names_of_rooms and (theirs is None or RANK[theirs] > RANK[mine]):
                wrong.append(f"{module}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_package_is_twelve_rooms_and_each_says_what_is_in_it():
    entries = {path.name for path in SOURCE.iterdir()} - {"__pycache__"}
    assert entries == {*ROOMS, "__init__.py", "__main__.py", "py.typed"}
    for room in ROOMS:
        text = ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text(encoding="utf-8")))
        assert text and "Start reading in ``" in text, room
        file = text.split("Start reading in ``")[1].split("``")[0]
        assert (SOURCE / room / file).is_file(), f"{room}: {file}"


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


def at_import_of(name: str) -> set[str]:
    """The modules of ours that are loaded with a module: those that it, its packages and theirs name at the top level."""
    found, waiting = set[str](), [name]
    while waiting:
        parts = waiting.pop().split(".")
        for end in range(1, len(parts) + 1):
            module = ".".join(parts[:end])
            if module not in found and (file := file_of(module)):
                found.add(module)
                waiting += [named for named, _ in top_level(file) if named.startswith("yolofleet.")]
    return found


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_every_module_can_be_imported_first_and_loads_only_what_it_names() -> None:
    """So no import is hidden in a text such as ``"yolov5.loss:anchor_loss"``: those parts are loaded when they are used."""
    script = SOURCE.parents[1] / "tests" / "first_imports.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 400
    for name, problem, loaded in rows:
        assert not problem or "No module named 'triton'" in problem, (name, problem)
        known = at_import_of(name)
        if "yolofleet.cli.train" in known:  # the help of --slurm lists the settings of a row of the table
            known |= at_import_of("yolofleet.fleet.launch.schedulers.slurm")
        assert {*loaded} <= known, (name, {*loaded} - known)


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
    foreign = ("data", "families", "inference", "training", "measure", "cli")
    machines = (p for p in modules() if group_of(module_of(p), ("fleet.doctor", "fleet.hosts")))
    for path in machines:
        for name, line in imported(ast.parse(path.read_text(encoding="utf-8"))):
            ours = name.removeprefix("yolofleet.") if name.startswith("yolofleet.") else ""
            is_foreign = group_of(ours, foreign) and not group_of(ours, ("training.parallel",))
            if ours and (is_foreign or ours.split(".")[-1] in DETECTION_SETTINGS):
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_module_reaches_the_worker_at_its_top_level():
    for path in modules():
        names = [name for name, _ in top_level(path)]
        assert module_of(path) == "training.rank.worker" or "yolofleet.training.rank.worker" not in names, (
            path
        )


def file_of(name: str) -> Path | None:
    """The file of a module of ours, by its dotted name."""
    path = SOURCE.joinpath(*name.split(".")[1:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@pytest.mark.long
def test_configuration_launcher_and_command_line_never_reach_torch_at_import():
    """Follows top-level imports through our own modules, so the message names the way."""
    for start in modules():
        if module_of(start) in (*WITH_TORCH, *WITH_TORCH_LATER) or not group_of(
            module_of(start), WITHOUT_TORCH
        ):
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
    "argv",
    ["--help", "train --help", "train --data shapes --model yolov5n --dry-run", "data --help",
     "plan --data d --images 9 --val-images 9 --model yolov5l --machine 8xA100"],
)  # fmt: skip
def test_help_dry_run_and_plan_import_no_torch(argv):
    code = (
        "import sys; from yolofleet.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'cv2', 'matplotlib'} & set(sys.modules); print(heavy or '', file=sys.stderr);"
        "sys.exit(bool(code or heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv.split()], capture_output=True, text=True)
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
BARE = {**TOY, "plots": False, "val_period": 0}  # what draws and validates comes before the launcher in ROOMS
# of our modules, in a process that trains on one device; 1,900 of them are the preflight check, and 550 write the card
MOST_LINES = 36_700
MOST_LINES_OF_A_RANK = 27_770  # that a launcher has started, with a validation and without plots
MOST_ENTERED = 30  # of our files, from the command to the start of torchrun's agent
OF_THE_LAUNCHER = ("fleet", "measure", "inference.export", "inference.predict", "cli")
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
    others = (
        *("inference.export", "inference.predict", "fleet.plan", "measure"),
        *("fleet.launch.local", "fleet.launch.schedulers.kubernetes"),
    )
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
        Imports("from yolofleet.training.rank.worker import main;", tmp_path, folder.parent, job, "0",
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
    assert {"cli/train.py", "config/load.py", "fleet/launch/local.py", "fleet/hosts/agent_process.py"} <= {
        *entered
    }, done.stderr
    assert len(entered) <= MOST_ENTERED, entered


@pytest.mark.slow
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
import sys, torch, yolofleet.training.rank.worker
from yolofleet.config.schema import Recipe
from yolofleet.training.optimiser import build_optimizer, update_if_finite

for name in ("SGD", "Adam", "AdamW", "NAdam"):
    model = torch.nn.Conv2d(3, 4, 1)
    model(torch.ones(1, 3, 2, 2)).sum().backward()
    update_if_finite(build_optimizer(model, name, Recipe(), 1e-4), torch.tensor(True))
    if {"torch._dynamo", "sympy"} & set(sys.modules):
        sys.exit(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
