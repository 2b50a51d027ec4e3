"""README and docs say what is so: commands run or are understood, tables and names agree with the code.

A fenced block after ``<!-- test -->`` is run, in the order of its page, in a folder of its own; where a command
would take long, ``smaller`` adds settings. All other commands are parsed, so no flag can go stale.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from commands import called, environment, working_in
from pydantic import BaseModel

import yolofleet
from yolofleet import errors
from yolofleet.cli.app import APP, INTERRUPTED
from yolofleet.cli.commands import SchemaCommand, Verbs
from yolofleet.cli.render import slurm_script
from yolofleet.config.aliases import FLEETRUN, MACHINES, SPELLINGS
from yolofleet.config.load import resolve_predict, resolve_train, resolve_val
from yolofleet.config.schema import PredictConfig, Recipe, TrainConfig, ValConfig, group_of

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]  # fmt: skip
DEADLINE_S = 900

SMALL_DATA = "--images 16 --val-images 4 --img 64"
SMALL_TRAINING = (
    "--img 64 --epochs 1 --batch 8 --nominal-batch 8 --micro-batch 4 --threads 1 --no-plots --device cpu"
)
SMALL_TRAINER = {"img": 64, "epochs": 1, "batch": 8, "nominal_batch": 8, "micro_batch": 4, "threads": 1, "plots": False}  # fmt: skip
FLAGS_OF_OTHERS = {
    *(
        "--nnodes",
        "--node_rank",
        "--nproc_per_node",
        "--master_addr",
        "--master_port",
        "--use_env",
        "--log-dir",
        "--standalone",
        "--rdzv-backend",
        "--max-restarts",
    ),  # torchrun
    *("--requeue", "--no-kill", "--kill-on-bad-exit", "--wait"),  # SLURM
    *("--ipc", "--shm-size", "--gpus", "--pid"),  # docker, py-spy
    *("--zone", "--list-all", "--add-source"),  # firewall-cmd
    *("--eval", "--syncBN"),  # of the other trainers
    "--invalid",  # an example
}


# -- pages -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    is_marked: bool
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def commands(self) -> list[list[str]]:
        """Words of each command; environment settings in front and comments are left out."""
        found = []
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                found.append(words)
        return found


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start, language = 0, None
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if language is None:
            start, language = number, line[3:].strip()
        else:
            is_marked = start > 1 and lines[start - 2].strip() == "<!-- test -->"
            found.append(Block(page, start, language, is_marked, "\n".join(lines[start : number - 1])))
            language = None
    assert language is None, f"{page.name}: a block is not closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.language in ("sh", "console", "bash")]
MARKED = [block for block in BLOCKS if block.is_marked]
needs_sh = pytest.mark.skipif(sys.platform == "win32", reason="the pages speak sh")


def test_the_pages_have_blocks_to_test() -> None:
    assert len([block for block in MARKED if block.page == README]) >= 6
    assert {block.language for block in MARKED} == {"sh", "python"}


# -- blocks that run ---------------------------------------------------------------------------------------------


def place_of(page: Path, tmp_path: Path) -> Path:
    """Make a folder as the reader of ``page`` has it: a checkout, less the sources."""
    folder = tmp_path / f"as {page.stem} says"
    folder.mkdir()
    for file in ("train.py", "val.py", "detect.py", "Makefile", "pyproject.toml", "constraints.txt"):
        (folder / file).symlink_to(ROOT / file)
    return folder


def smaller(words: list[str]) -> str:
    """The same command with settings that take seconds on one core."""
    line = shlex.join(words)
    if words[:2] == ["make", "demo"]:  # with this Python's environment, which is not to be built again
        return f"make -o {sys.prefix}/.made demo VENV={sys.prefix} EPOCHS=1 IMAGES=16 VAL_IMAGES=4"
    if words == ["make", "env"]:
        return f"make -o {sys.prefix}/.made env VENV={sys.prefix}"
    processes = "--device cpu:2" if re.search(r"--device (0,1|cpu:2)", line) else ""
    if re.match(r"yolofleet data make|yolofleet val|python val.py", line):
        return f"{line} {SMALL_DATA if 'make' in words else processes}"
    is_new_run = re.match(r"yolofleet train|python .*train\.py", line) and "--resume" not in words
    return f"{line} {SMALL_TRAINING} {processes}" if is_new_run else line


def assert_runs(block: Block, folder: Path) -> None:
    if block.language == "python":
        changed = f"from yolofleet import Model\nreal = Model.train\nModel.train = lambda self, **given: real(self, **given | {SMALL_TRAINER!r})\n"
        command = [sys.executable, "-c", changed + block.text]
    else:
        command = ["sh", "-eux", "-c", "\n".join(smaller(words) for words in block.commands())]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder) | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


@needs_sh
def test_the_demo_and_the_quick_start_run(tmp_path: Path) -> None:
    folder = place_of(README, tmp_path)
    demo, quick_start = [block for block in MARKED if block.page == README][:2]
    assert "make demo" in demo.text and "yolofleet data make" in quick_start.text
    assert_runs(demo, folder)
    with working_in(
        folder
    ):  # in this process, which has loaded torch; the longer suites run the block in a shell
        for words in quick_start.commands():
            done = called(*shlex.split(smaller(words))[1:])
            assert done.code == 0, f"{words}\n{done.out}\n{done.err}"


@needs_sh
@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({block.page for block in MARKED}), ids=lambda page: page.name)
def test_marked_blocks_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    folder = place_of(page, tmp_path)
    for block in MARKED:
        if block.page == page and block.text.strip() != "make demo":
            assert_runs(block, folder)


# -- commands that are only understood ---------------------------------------------------------------------------

COMING_FROM = ROOT / "docs" / "coming-from.md"


def commands_of_tables(page: Path) -> Iterator[Block]:
    """Of tables "there | here": what is said to be given here, or what is given there where it is the same."""
    in_table = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line == "| there | here |":
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table and line.startswith("| "):
            _, here = line.split(" | ", 1)
            for spelled in re.findall(r"`([^`]+)`", line if here.startswith("the same") else here):
                yield Block(page, number, "sh", False, spelled)


OUR_COMMANDS = [
    pytest.param(words, id=f"{block}: {' '.join(words)[:60]}")
    for block in [*SHELL, *commands_of_tables(COMING_FROM)]
    for words in block.commands()
    if len(words) > 1 and {"yolofleet", "train.py", "val.py", "detect.py"} & set(words)
]


RESOLVE: dict[str, tuple[type[BaseModel], Callable[..., object]]] = {
    "train": (TrainConfig, resolve_train),
    "val": (ValConfig, resolve_val),
    "predict": (PredictConfig, resolve_predict),
}


@pytest.mark.parametrize("words", OUR_COMMANDS)
def test_every_command_is_understood(words: list[str]) -> None:
    scripts = {"train.py": "train", "val.py": "val", "detect.py": "predict"}
    at = next(i for i, word in enumerate(words) if word in ("yolofleet", *scripts))
    argv = [scripts[words[at]]] if words[at] in scripts else []
    argv += words[at + 1 :]
    if "--resume" in argv:  # wants a run
        argv = [argv[0], "--data", "shapes", "--model", "yolov5n", *argv[argv.index("--resume") + 2 :]]
    command: click.Command = APP
    rest = argv
    while isinstance(command, Verbs):
        name, inner, rest = command.resolve_command(command.make_context("yolofleet", []), rest)
        assert inner is not None and name
        command = inner
    with suppress(click.exceptions.Exit):  # of --help
        params = command.make_context(argv[0], list(rest)).params  # raises for what it does not know
        if argv[0] in RESOLVE:
            resolve_as_the_verb(argv[0], params)


def resolve_as_the_verb(verb: str, params: dict[str, Any]) -> None:
    """Check the settings of a command as its verb does before it starts anything."""
    names = RESOLVE[verb][0].model_fields
    given = {name: value for name, value in params.items() if name in names and value not in (None, ())}
    if params.get("job"):
        slurm_script(given, params["config_file"], params["job"])
    else:
        RESOLVE[verb][1](given, config_file=params["config_file"])


def known_flags() -> set[str]:
    found = {"--version", "--help", *(flag for table in SPELLINGS.values() for flag in table)}
    waiting = [APP]
    while waiting:
        command = waiting.pop()
        if isinstance(command, Verbs):
            waiting += [command.get_command(None, name) for name in command.members]  # type: ignore[misc, arg-type]
        else:
            found |= {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    return found


def test_every_flag_that_is_named_exists() -> None:
    known = known_flags()
    for page in PAGES:
        if page.parent.name == "benchmarks":  # flags of the benchmarks' own
            continue
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for flag in re.findall(r"`[^`\n]*`", text):
            for spelled in re.findall(r"(?<![\w-])--[a-z][\w-]*", flag):
                if spelled not in FLAGS_OF_OTHERS:
                    assert spelled.replace("_", "-") in known, f"{page.name}: {spelled}"


# -- what is said agrees with the code -----------------------------------------------------------------------------


def section(page: Path, heading: str) -> str:
    text = page.read_text(encoding="utf-8")
    assert f"\n{heading}\n" in text, f"{page.name} has no {heading}"
    level = heading.split()[0]
    return re.split(rf"\n#{{1,{len(level)}}} ", text.split(f"\n{heading}\n")[1])[0]


def rows_of(text: str) -> list[list[str]]:
    """Cells of a table without its head."""
    rows = [line.strip().strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.mark.parametrize(
    ("script", "verb", "model"),
    [("train.py", "train", TrainConfig), ("val.py", "val", ValConfig), ("detect.py", "predict", PredictConfig)],
)  # fmt: skip
def test_the_table_of_yolov5s_flags_is_that_of_the_code(script: str, verb: str, model: type) -> None:
    options = [p for p in SchemaCommand(verb, model, lambda **_: 0).params]
    ours = {flag for p in options for flag in (*p.opts, *p.secondary_opts)} | {
        "--evolve"
    }  # cli/train.py calls tune
    spellings, said = SPELLINGS[verb], set()
    for first, here, remark in rows_of(section(COMING_FROM, f"### {script}")):
        for flag in (spelled.replace("_", "-") for spelled in re.findall(r"--[a-z][\w-]*", first)):
            said.add(flag)
            spelling = spellings.get(flag)
            if here == "refused":
                assert spelling and spelling.refusal and remark.startswith(spelling.refusal), flag
                continue
            assert not (spelling and spelling.refusal), f"{flag} is refused"
            values = {"none": [], "maybe": [], "one": ["1"], "some": ["1"]}
            becomes = {word.split("=")[0] for word in spelling.to(values[spelling.values])} if spelling else {flag}  # fmt: skip
            if here == "no effect":
                assert spelling and not becomes, flag
            else:
                wanted = {flag} if here == "kept" else set(re.findall(r"--[a-z][\w-]*", here))
                assert becomes == wanted and wanted <= ours, f"{flag}: {becomes}, said {wanted}"
    assert not set(spellings) - set(MACHINES) - set(FLEETRUN) - said - ours, "flags that the table leaves out"


def test_exit_codes_are_those_of_the_errors() -> None:
    said = {int(row[0]) for row in rows_of(section(README, "## Exit codes"))}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert said == {0, INTERRUPTED, *(kind.exit_code for kind in kinds)}  # type: ignore[attr-defined]


def test_groups_of_settings_are_those_of_the_schema() -> None:
    table = {row[0].lower(): row[1] for row in rows_of(section(README, "## Settings"))}
    groups: dict[str, set[str]] = {}
    for name, field in TrainConfig.model_fields.items():
        groups.setdefault(group_of(field), set()).add("--" + name.replace("_", "-"))
    assert set(table) == set(groups)
    for group, flags in table.items():
        assert set(re.findall(r"--[\w-]+", flags)) <= groups[group], group


def test_verbs_are_named_and_what_is_not_there_yet_is_not_there() -> None:
    text = README.read_text(encoding="utf-8")
    not_yet = set(re.findall(r"`yolofleet (\w+)`", text.split("\nNot yet:")[1].split("\n## ")[0]))
    assert not not_yet & set(APP.members), "it is there now"
    assert not [verb for verb in APP.members if f"yolofleet {verb}" not in text and verb != "weights"]


def test_the_tree_names_every_folder_and_nothing_that_is_gone() -> None:
    tree = section(ROOT / "docs" / "architecture.md", "## The tree").split("```")[1]
    folder, named = Path(yolofleet.__file__).parent, set()
    parents = {2: folder}  # indent of a line -> the folder that it lies in
    for line in tree.strip().splitlines()[1:]:
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        path = parents[indent] / name
        assert path.exists(), f"{path.relative_to(folder)} is gone"
        named.add(path.relative_to(folder).parts[0])
        if path.is_dir():
            parents[indent + 2] = path
    own = {p.name for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert not own - named - {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:tests|benchmarks|src|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    package = ROOT / "src" / "yolofleet"
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
        if (package / name.split("/")[0]).is_dir():
            assert (package / name).exists(), name


def test_the_page_of_hyperparameters_has_each_with_its_default() -> None:
    rows = [
        row.split(" | ", 2)
        for row in (ROOT / "docs" / "recipe.md").read_text().splitlines()
        if row.startswith("| `")
    ]
    assert [row[0] for row in rows] == [f"| `{name}`" for name in Recipe.model_fields]
    for (_, default, meaning), field in zip(rows, Recipe.model_fields.values(), strict=True):
        value = field.default
        assert default == (f"{value:.4g}" if isinstance(value, float) else str(value).lower()), meaning
        assert meaning == f"{field.description} |"
