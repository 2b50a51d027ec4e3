"""Symbolic links in a folder that a verb writes into again: nothing outside of that folder changes.

The names are those of the code: the paths of :class:`RunFolder` and :class:`TuneFolder`, and all files of real runs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import SMALL, called, small_shapes, working_in
from small_files import TINY_YAML
from walks import chosen

from yolofleet.cli.app import APP
from yolofleet.cli.commands import Verbs
from yolofleet.measure.tune.study import TuneFolder
from yolofleet.runs.report.folder import REQUESTS, Inside, RunFolder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="symbolic links")

Words = list[str | Path]

# verbs that write into a folder that exists -> their words for a copy of a run; the study has its own test
INTO_RUNS: dict[str, Callable[[Path, Path], Words]] = {
    "train": lambda home, run: [*again(home), "--exist-ok", *named(run)],
    "train --resume": lambda home, run: ["train", "--resume", run, "--epochs", "3"],
    "train --resume FILE": lambda home, run: ["train", "--resume", run / "weights" / "last.safetensors"],
    "val": lambda home, run: ["val", *weights(home), "--data", data(home), "--exist-ok", *named(run)],
    "predict": lambda home, run: ["predict", *weights(home), "--source", pictures(home), "--exist-ok", *named(run)],
    "report run": lambda home, run: ["report", run],
    "export": lambda home, run: ["export", "--weights", run / "weights" / "best.safetensors", "--format", "torchscript"],
}  # fmt: skip
REFUSES = {"train", "train --resume", "train --resume FILE", "val", "predict"}
# verbs that only make new folders, write a file that the user names, or write nothing
OTHERS = {
    "bench inference", "bench train", "bench start", "bench scaling", "plan fleets", "plan probe",
    "report compare", "data list", "data make", "data preview", "data download", "data check", "data stats", "data convert",
    "data shard", "data unshard", "data index", "data split", "data merge",
    "weights list", "weights push", "weights download", "weights inspect", "weights verify", "weights convert", "checkpoints list",
    "checkpoints verify", "render slurm", "render kubernetes", "fleet check", "fleet run", "fleet ps", "fleet status",
    "fleet attach", "fleet add", "fleet logs", "fleet stop", "doctor",
    "completion",
    "selftest",  # writes into a temporary folder
    "serve",
    "board",  # writes requests: tests/unit/report/test_board_runs.py
}  # fmt: skip


def data(home: Path) -> Path:
    return home / "small shapes" / "data.yaml"


def pictures(home: Path) -> Path:
    return home / "small shapes" / "images" / "val"


def weights(home: Path) -> Words:
    return ["--weights", home / "run" / "weights" / "best.safetensors", "--device", "cpu"]


def named(run: Path) -> Words:
    return ["--project", run.parent, "--name", run.name]


def again(home: Path) -> Words:
    own: Words = [
        "--cfg",
        home / "tiny.yaml",
        *SMALL[2:],
        *("--epochs", "2", "--threads", "1", "--device", "cpu"),
    ]
    return ["train", "--data", data(home), *own]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Holds a data set, and the folders ``run`` and ``study`` of a training and of a study."""
    folder = tmp_path_factory.mktemp("links")
    small_shapes(folder, images=8, val_images=4)
    (folder / "tiny.yaml").write_text(TINY_YAML)
    (folder / "space.yaml").write_text("lr0: [0.001, 0.1, log]\n")
    with working_in(folder):
        assert called(*again(folder), *named(folder / "run")).code == 0
        pytest.importorskip("optuna", reason="the extra yolofleet[tune] is not installed")
        search: Words = ["--space", "space.yaml", "--trials", "1", "--epochs", "1"]
        assert called("tune", *again(folder)[1:], *search, *named(folder / "study")).code == 0
        yield folder


def names_of(made: Path, kind: type[RunFolder] | type[TuneFolder]) -> list[str]:
    """All names in ``made``, and all that the code may give to files in such a folder."""
    folder = kind(made)
    paths = [
        getattr(folder, name) for name, part in vars(kind).items() if isinstance(part, (property, Inside))
    ]
    if isinstance(folder, RunFolder):
        paths += [folder.log(0), folder.events(0), folder.events(1), folder.failure(0)]
        paths += [folder.request(request) for request in REQUESTS]
    inside = {
        path.relative_to(made).as_posix() for path in (*paths, *made.rglob("*")) if isinstance(path, Path)
    }
    return sorted(inside)


def snapshot(folder: Path) -> dict[str, bytes | str | None]:
    """Names, contents and links in a folder."""
    return {
        path.relative_to(folder).as_posix(): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


def linked_copy(made: Path, work: Path, names: list[str]) -> tuple[Path, Path]:
    """Return a copy of ``made`` whose ``names`` are links into another copy of it, and that copy."""
    copy, outside = work / "copy", work / "outside"
    for folder in (copy, outside):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
    for name in names:
        target, link = outside / name, copy / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("precious")
        if link.is_dir():
            shutil.rmtree(link)
        else:
            link.unlink(missing_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    return copy, outside


def test_every_verb_is_one_that_this_test_knows() -> None:
    def leaves(verbs: Verbs, before: str = "") -> Iterator[str]:
        for name, (member, _) in verbs.members.items():
            if isinstance(member, Verbs):
                yield from leaves(member, f"{before}{name} ")
            else:
                yield f"{before}{name}"

    assert set(leaves(APP)) == OTHERS | {verb.partition(" --")[0] for verb in INTO_RUNS} | {"tune"}


@pytest.mark.parametrize("verb", chosen(INTO_RUNS, "train --resume", "export"))
def test_no_verb_writes_through_a_link_in_the_folder_of_a_run(home: Path, tmp_path: Path, verb: str) -> None:
    made, words = home / "run", INTO_RUNS[verb]
    names = names_of(made, RunFolder)
    assert {
        "weights",
        "checkpoints",
        "plots",
        "logs",
        "results.csv",
        "config.yaml",
        "logs/stop.request",
    } <= set(names)
    cases = [[name] for name in names]
    if verb not in REFUSES:  # it does its work, which takes seconds, so one case has many links
        read = ("config.yaml", "weights/best.safetensors")
        folders = [name for name in names if (made / name).is_dir()]
        files = [name for name in names if name not in (*folders, *read)]
        cases = [["weights"], [name for name in folders if name != "weights"], files]
    for case in cases:
        copy, outside = linked_copy(made, tmp_path, case)
        before, own = snapshot(outside), snapshot(copy)
        done = called(*words(home, copy))
        assert snapshot(outside) == before, f"{verb} changed {case}"
        assert "Traceback" not in done.err
        if verb in REFUSES:
            assert done.code == 2 and "is a symbolic link to" in done.err, (case, done)
            assert snapshot(copy) == own, "it wrote before it refused"


@pytest.mark.parametrize("verb", chosen(INTO_RUNS, "train --resume", "val"))
def test_a_link_that_stays_in_the_folder_of_a_run_is_no_obstacle(
    home: Path, tmp_path: Path, verb: str
) -> None:
    """W&B makes such links. The folder itself may be a link, too: the user has named it."""
    shutil.copytree(home / "run", tmp_path / "real")
    (tmp_path / "real" / "wandb" / "run-1").mkdir(parents=True)
    (tmp_path / "real" / "wandb" / "latest-run").symlink_to("run-1")
    (tmp_path / "exp").symlink_to("real")
    done = called(*INTO_RUNS[verb](home, tmp_path / "exp"))
    assert done.code == 0, done.out + done.err


def test_no_study_writes_through_a_link(home: Path, tmp_path: Path) -> None:
    made = home / "study"
    names = names_of(made, TuneFolder)
    assert {"trials", "trials/0000", "trials/0000/weights", "logs", "study.journal"} <= set(names)
    for name in names:
        copy, outside = linked_copy(made, tmp_path, [name])
        before, own = snapshot(outside), snapshot(copy)
        done = called("tune", "--resume", copy)
        assert snapshot(outside) == before, f"tune changed {name}"
        assert done.code == 2 and "is a symbolic link to" in done.err, (name, done)
        assert snapshot(copy) == own, "it wrote before it refused"
    shutil.copytree(made, tmp_path / "whole")
    assert called("tune", "--resume", tmp_path / "whole").code == 0


def test_resume_auto_passes_linked_folders_over(home: Path, tmp_path: Path) -> None:
    for verb, made in (("train", "run"), ("tune", "study")):
        project = tmp_path / verb
        project.mkdir()
        shutil.copytree(home / made, tmp_path / made)
        (project / "linked").symlink_to(tmp_path / made)
        before = snapshot(tmp_path / made)
        done = called(verb, "--resume", "auto", "--project", project)
        assert done.code == 2 and f"in {project}" in done.err
        assert snapshot(tmp_path / made) == before
