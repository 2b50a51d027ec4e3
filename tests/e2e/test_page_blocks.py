"""The code blocks of README and docs: each is run, or has the reason why not; pages.py describes the comments.

A block runs in the order of its page, in a folder as the reader has it. Where a command would take long, ``smaller`` adds
settings. Cheap blocks also run in the quick tests. The commands of all blocks are parsed, so no option can become stale.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from commands import called, ran, working_in
from mask_data import small_masks
from pages import BLOCKS, README, ROOT, Block
from pydantic import BaseModel
from reference import reference
from small_files import TINY

from yolofleet.cli.app import APP
from yolofleet.cli.commands import Verbs
from yolofleet.cli.render import rendered
from yolofleet.config.load import resolve_predict, resolve_train, resolve_val
from yolofleet.config.recipe import load_recipe
from yolofleet.config.schema import TrainConfig, ValConfig
from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.families.table import FAMILIES
from yolofleet.fleet.hosts.fleet import load_fleet
from yolofleet.fleet.plan.library import Library
from yolofleet.measure.tune.space import read_space

SMALL_DATA = "--images 16 --val-images 4 --img 64"
SIZES = "--img 64 --epochs 1 --batch 8 --nominal-batch 8 --micro-batch 2 --threads 1"
SMALL_TRAINING = f"{SIZES} --no-plots --device cpu"
SMALL_TRAINER = {"img": 64, "epochs": 1, "batch": 8, "nominal_batch": 8, "micro_batch": 2, "threads": 1, "plots": False}  # fmt: skip
WEIGHTS = ("yolov5n.pt", "yolov5s.pt")  # published files, which are not part of the repository

COMMANDS = [block for block in BLOCKS if block.language == "sh"]
RUN = [block for block in BLOCKS if block.is_run_here]
PAGES_RUN = sorted({block.page for block in RUN})
needs_sh = pytest.mark.skipif(sys.platform == "win32", reason="the pages use sh")


def test_every_block_is_run_or_says_why_not() -> None:
    unmarked = [str(block) for block in BLOCKS if block.language != "text" and not block.kind]
    assert not unmarked, f"put <!-- test --> or <!-- not run: REASON --> before {unmarked}"
    for block in BLOCKS:
        assert block.kind != "not run" or block.remark, f"{block}: the reason is missing"
        for name in re.findall(r"tests/[\w/.]+\w", block.remark):
            assert (ROOT / name).exists(), f"{block}: {name} does not exist"
        if block.kind == "test" and block.remark:
            text = (ROOT / block.remark).read_text(encoding="utf-8")
            assert block.page.name in text, f"{block}: {block.remark} does not read the page"
    assert len([block for block in RUN if block.page == README]) >= 6
    assert {block.language for block in RUN} == {"sh", "python", "yaml"}


# -- blocks that run ---------------------------------------------------------------------------------------------


def checkout(folder: Path) -> Path:
    """Make a folder as the reader of a page has it: a checkout, less the sources."""
    folder.mkdir()
    files = ("train.py", "val.py", "detect.py", "Makefile", "pyproject.toml", "packaging", "examples")
    for file in files:
        (folder / file).symlink_to(ROOT / file)
    return folder


def put_description(data: Path, there: Path) -> None:
    """Write the description of a data set under another name in another folder."""
    text = data.read_text(encoding="utf-8").replace("path: .", f"path: {json.dumps(str(data.parent))}")
    there.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def after_the_tutorial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set under the names of the pages, a trained detector and images."""
    folder = checkout(tmp_path_factory.mktemp("tutorial") / "a reader's folder")
    data = make_shapes(folder / "my-data", images=16, val_images=4, img=64)
    for name in ("coco.yaml", "coco128.yaml"):
        put_description(data, folder / name)
    run_in(
        folder, ["sh", "-ec", f"yolofleet train --data my-data/data.yaml --model yolov5n {SMALL_TRAINING}"]
    )
    for name in ("best", "last"):
        shutil.copy(folder / f"runs/train/exp/weights/{name}.safetensors", folder)
    image = next((data.parent / "images" / "val").iterdir())
    for name in ("street.jpg", "dog.jpg", "aerial.png"):
        shutil.copy(image, folder / name)
    return folder


def put_export_with_masks(folder: Path) -> None:
    """Write the folder ``cells-export`` as CVAT does: one COCO file of polygons."""
    data, export = small_masks(folder), folder / "cells-export"
    with working_in(folder):
        done = called(
            "data", "convert", str(data), "--to", "coco", "--splits", "train", "--out", "cells-export"
        )
    assert done.code == 0, done.err
    (export / "annotations/instances_train.json").rename(export / "annotations/instances_default.json")
    (export / "images/train").rename(export / "images/default")
    (export / "data.yaml").unlink()


def place_of(page: Path, tmp_path: Path, after_the_tutorial: Path) -> Path:
    """Return a folder in which a page's blocks run; a page that makes a data set itself starts without one."""
    folder = tmp_path / f"as {page.stem} says"
    own = [block.text for block in RUN if block.page == page and page.name != "data.md"]
    if any("data make shapes" in text or "make env" in text for text in own):
        return checkout(folder)
    shutil.copytree(after_the_tutorial, folder, symlinks=True)
    if page.name == "masks.md":
        put_export_with_masks(folder)
    for description in folder.glob("coco*.yaml"):
        text = description.read_text(encoding="utf-8")
        description.write_text(text.replace(str(after_the_tutorial), str(folder)), encoding="utf-8")
    return folder


def smaller(words: list[str]) -> str:
    """Return the same command with settings that take seconds on one core."""
    line = shlex.join(words)
    if words[:2] == ["make", "demo"]:  # with this Python's environment, which is not to be built again
        return f"make -o {sys.prefix}/.installed demo VENV={sys.prefix} EPOCHS=1 IMAGES=16 VAL_IMAGES=4"
    if words == ["make", "test"]:  # it runs this file
        return ":"
    if words == ["make", "env"]:
        return f"make -o {sys.prefix}/.made env VENV={sys.prefix}"
    if "--dry-run" in words:
        return line
    if words[0] == "source":  # the environment of the tests is active
        return ":"
    processes = "--device cpu:2" if re.search(r"--device (0,1|cpu:2)", line) else ""
    if re.match(r"yolofleet data make", line):
        return f"{line} {SMALL_DATA}"
    if re.match(r"yolofleet val|python val.py", line):
        return f"{line} {processes}"
    if "--save-as" in words:  # the network has learned so little that it finds nothing else
        return f"{line} --conf 0.001"
    if re.match(r"yolofleet tune", line):
        return line if "--resume" in words else f"{line} {SIZES} --trials 2 --device cpu:2"
    if not re.match(r"yolofleet train|python .*train\.py", line):
        return line
    if "--resume" in words:
        return f"{re.sub(r'--epochs [0-9]+', '--epochs 2', line)} {processes}"
    return f"{line} {SMALL_TRAINING} {processes}"


def run_in(folder: Path, command: list[str], name: object = "") -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = ran(folder, *command, code=None, variables={"PATH": path})
    assert done.code == 0, f"{name}\n{done.out}\n{done.err}"


def assert_runs(block: Block, folder: Path) -> None:
    if block.language == "yaml":
        READERS[block.page.name](block.text, folder)
    elif block.language == "python":
        changed = f"from yolofleet import Model\nreal = Model.train\nModel.train = lambda self, **given: real(self, **given | {SMALL_TRAINER!r})\n"
        run_in(folder, [sys.executable, "-c", changed + block.text], block)
    else:
        script = "\n".join(smaller(words) for words in block.commands())
        run_in(folder, ["sh", "-eux", "-c", script], block)


def with_weights(block: Block, folder: Path) -> bool:
    """Put the published weights that a block names into the folder; False if they are not at hand."""
    for name in WEIGHTS:
        if name in block.text and not (folder / name).exists():
            try:
                (folder / name).symlink_to(reference("weights/yolov5n.pt"))
            except pytest.skip.Exception:
                return False
    return True


def is_cheap(block: Block) -> bool:
    """Whether the block takes about a second: it starts no torch."""
    cheap = r"yolofleet (render|plan|data list)\b|.* --dry-run\b"
    lines = [" ".join(words) for words in block.commands()] if block.language == "sh" else []
    return all(re.match(cheap, line) and "--simulate" not in line for line in lines) and bool(lines)


@needs_sh
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_demo_and_the_quick_start_run(tmp_path: Path, is_whole: bool) -> None:
    folder = checkout(tmp_path / "as the README says")
    demo, quick_start = [block for block in RUN if block.page == README][:2]
    assert "make demo" in demo.text and "yolofleet data make" in quick_start.text
    made = ran(folder, *shlex.split(smaller(["make", "demo"])), "-n").out.replace("\\\n", "")
    commands = re.findall(r"/bin/yolofleet (.*)", made.replace("' ", "'\n"))
    next_ones, commands = commands[4:], commands[:4]
    assert [line.split()[0] for line in commands] == ["data", "train", "val", "predict"]
    assert [line.split()[0] for line in next_ones] == ["train", "predict", "board"]
    own = [re.sub("'$", "", re.sub("  #.*", "", line)) for line in next_ones]
    first = own[0].replace("--weights yolov5n.pt", "--model yolov5n")  # a test downloads nothing
    commands += [first.replace("YOUR/data.yaml", "runs/demo/shapes/data.yaml") + " --dry-run"]
    commands += [own[1].replace("YOUR.jpg", "runs/demo/shapes/images/val")]
    if is_whole:  # else the demo alone, which has the same verbs
        commands += [smaller(words).partition(" ")[2] for words in quick_start.commands()]
    # in this process, which has loaded torch, with a smaller network; the longer suites run both in a shell
    with working_in(folder):
        for line in commands:
            done = called(*shlex.split(line.replace("--model yolov5n", f"--model {shlex.quote(str(TINY))}")))
            assert done.code == 0, f"{line}\n{done.out}\n{done.err}"
    assert (folder / "runs/demo/train/report.html").is_file()


@needs_sh
def test_the_demo_installs_no_tools_of_tests(tmp_path: Path) -> None:
    make = ["make", "-n", "-C", str(README.parent), f"VENV={tmp_path}"]
    for target, extra, other in (("demo", "[board]", "[dev]"), ("env", "[dev]", "[board]")):
        printed = ran(tmp_path, *make, target).out
        assert f'-e ".{extra}"' in printed and other not in printed
    (tmp_path / ".made").touch()  # `make env` leaves both
    (tmp_path / ".installed").touch()
    assert "pip install" not in ran(tmp_path, *make, "demo").out


@needs_sh
@pytest.mark.parametrize("block", [block for block in RUN if is_cheap(block)], ids=str)
def test_cheap_blocks_run(block: Block, tmp_path: Path) -> None:
    folder = checkout(tmp_path / "a folder")
    data = make_shapes(folder / "my-data", images=2, val_images=2, img=64)
    put_description(data, folder / "coco.yaml")
    assert_runs(block, folder)


@pytest.mark.parametrize("block", [block for block in RUN if block.language == "yaml"], ids=str)
def test_files_of_the_pages_are_accepted(block: Block, tmp_path: Path) -> None:
    assert_runs(block, tmp_path)


@needs_sh
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_RUN, ids=lambda page: page.name)
def test_blocks_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, after_the_tutorial: Path
) -> None:
    folder = place_of(page, tmp_path, after_the_tutorial)
    for block in RUN:
        if block.page == page and with_weights(block, folder):
            assert_runs(block, folder)


# -- YAML files ----------------------------------------------------------------------------------------------------


def description_file(text: str, folder: Path) -> None:
    path = folder / "description.yaml"
    path.write_text(text, encoding="utf-8")
    values = yaml.safe_load(text)
    for split in ("train", "val", "test"):
        if split in values:
            images = folder / values["path"] / values[split]
            images.mkdir(parents=True, exist_ok=True)
            (images / "a.jpg").touch()
    assert list(load_dataset(str(path)).names) == values["names"]


def written(text: str, folder: Path) -> Path:
    path = folder / "file.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def recipe_file(text: str, folder: Path) -> None:
    pytest.importorskip("albumentations", reason="needs the extra: albumentations")
    assert len(load_recipe(str(written(text, folder))).value.albumentations) == text.count("p=")


READERS: dict[str, Callable[[str, Path], object]] = {
    "own-data.md": description_file,
    "data.md": description_file,
    "recipe.md": recipe_file,
    "several-machines.md": lambda text, folder: load_fleet(written(text, folder)),
    "tune.md": lambda text, folder: read_space(written(text, folder), FAMILIES["yolov5"]),
    "plan.md": lambda text, folder: Library.read(written(text, folder)),
}


# -- the program of inference.md ---------------------------------------------------------------------------------

WRITE = """
found = {
    file.name: [(name, float(score), [float(v) for v in box]) for name, score, box in boxes]
    for file, boxes in zip(files, detect(files))
}
Path("found.json").write_text(json.dumps(found))
"""


@needs_sh
@pytest.mark.slow
def test_the_program_for_onnx_runtime_finds_what_predict_finds(tmp_path: Path) -> None:
    weights = reference("weights/yolov5n.pt")
    images = sorted(reference("data/coco128val").rglob("*.jpg"))[:8]
    (tmp_path / "my-data" / "images" / "val").mkdir(parents=True)
    for image in images:
        shutil.copy(image, tmp_path / "my-data" / "images" / "val")
    (program,) = [
        block.text for block in RUN if block.page.name == "inference.md" and "onnxruntime" in block.text
    ]
    export = (
        f"yolofleet export --weights {weights} --format onnx --img 640 --nms --dynamic batch --out best.onnx"
    )
    predict = "yolofleet predict --weights best.onnx --source my-data/images/val --save none --save-json"
    run_in(tmp_path, ["sh", "-ec", export])
    run_in(tmp_path, ["sh", "-ec", predict])
    run_in(tmp_path, [sys.executable, "-c", program + WRITE])
    here = json.loads((tmp_path / "found.json").read_text())
    expected = 0
    for image in json.loads((tmp_path / "runs/predict/exp/predictions.json").read_text()):
        for one in image["detections"]:
            if one["score"] > 0.3:  # the file has no boxes below 0.25
                expected += 1
                assert any(
                    name == one["name"]
                    and score == pytest.approx(one["score"], abs=0.005)
                    and box == pytest.approx(one["box_xyxy_px"], abs=1)
                    for name, score, box in here[Path(image["path"]).name]
                ), (image["path"], one)
    assert expected > 5


# -- commands that are only parsed -------------------------------------------------------------------------------

COMING_FROM = sorted((ROOT / "docs/coming-from").glob("*.md"))


def commands_of_tables(page: Path) -> Iterator[Block]:
    """Yield the commands of the tables "there | here": of the column "here", or of "there" if it says "the same"."""
    in_table = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line == "| there | here |":
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table and line.startswith("| "):
            _, here = line.split(" | ", 1)
            for spelled in re.findall(r"`([^`]+)`", line if here.startswith("the same") else here):
                yield Block(page, number, "sh", spelled)


OUR_COMMANDS = [
    pytest.param(words, id=f"{block}: {' '.join(words)[:60]}")
    for block in [*COMMANDS, *(block for page in COMING_FROM for block in commands_of_tables(page))]
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
    if "runs/tune/exp/best.yaml" in argv:  # the result of a search
        argv.remove("--recipe")
        argv.remove("runs/tune/exp/best.yaml")
    if "resume" in argv:
        argv = [argv[0], "--resume", *argv[2:]]
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
    if params.get("slurm"):
        rendered("slurm", given, params["config_file"], params["slurm"])
    else:
        RESOLVE[verb][1](given, config_file=params["config_file"])
