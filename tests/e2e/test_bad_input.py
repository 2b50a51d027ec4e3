"""Bad input and a hostile world: one message that names the file, flag or value and what to do, the exit code
of ``support/errors.py``, no traceback, nothing half-written, no process left.

``tests/golden/golden_errors.py`` lists single mistakes in commands and files. Here are those that need a finished run,
a disk, a signal or a second process.

The command line runs in this process where the exit code and the message are the point, and as processes of
its own where signals and processes are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import commands
import pytest
import safetensors.torch
import torch
from commands import Outcome, environment, family, started, wait_until
from small_files import TINY_YAML as TINY

from yolofleet.cli import main
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.families.weights.format import read_tensors
from yolofleet.runs.checkpoint.names import step_of
from yolofleet.support.system.proc import rank_of

DEADLINE_S = 900
SMALL = [*commands.SMALL[2:], "--threads", "1", "--epochs", "1"]  # without --model: TINY is smaller still
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="watches processes in /proc")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A good data set, a small model and one finished run: ``set``, ``tiny.yaml``, ``run``. Only to be copied."""
    folder = tmp_path_factory.mktemp("größe 'bad'")
    make_shapes(folder / "set", images=8, val_images=4, img=64, seed=3)
    (folder / "tiny.yaml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLOFLEET_CACHE", str(folder / "cache"))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        argv = train(folder / "set", "--cfg", folder / "tiny.yaml", "--project", folder, "--name", "run")
        assert main(list(map(str, argv))) == 0
    yield folder


@pytest.fixture(autouse=True)
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where each test works: the model and a data set of its own."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(world / "set", tmp_path / "set")
    shutil.copy(world / "tiny.yaml", tmp_path)
    return tmp_path


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command line in this process."""

    def run(*argv: str | Path, code: int) -> Outcome:
        capsys.readouterr()
        found = main(list(map(str, argv)))
        said = capsys.readouterr()
        assert found == code, said.out + said.err
        assert_told(Outcome(found, said.out, said.err))
        return Outcome(found, said.out, said.err)

    return run


@pytest.fixture
def refused(cli: Cli, here: Path) -> Callable[..., str]:
    """Run a command line that must be refused with a message that has ``says`` and leaves no run behind."""

    def run(*argv: str | Path, code: int, says: Sequence[str]) -> str:
        before = runs_in(here)
        told = cli(*argv, code=code).err
        for words in says:
            assert words in told
        assert runs_in(here) == before
        assert_nothing_half_written(here / "runs")
        return told

    return run


def train(data: str | Path = "set", *more: str | Path, model: bool = True) -> list[str | Path]:
    """A training of one step; ``--cfg tiny.yaml`` unless ``more`` says which model."""
    own = ["--cfg", "tiny.yaml"] if model and not {"--cfg", "--model"} & set(map(str, more)) else []
    device = [] if "--device" in more else ["--device", "cpu"]
    return ["train", "--data", data, *own, *SMALL, *device, *more]


def assert_told(outcome: Outcome) -> None:
    """Exactly one message with a remedy, no traceback."""
    assert "Traceback" not in outcome.out + outcome.err, outcome.err
    messages = re.findall(r"^(?:\w+Error|Stopped): ", outcome.err, re.MULTILINE)
    remedies = re.findall(r"^  try  : .", outcome.err, re.MULTILINE)
    assert len(messages) == len(remedies) == (outcome.code != 0), outcome.err


def runs_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/*/*"))


def assert_nothing_half_written(folder: Path) -> None:
    assert not [path for path in folder.rglob("*.tmp")]
    for path in folder.rglob("*.safetensors"):
        read_tensors(path)  # whole, by its digest


# -- processes


def end(process: subprocess.Popen[str], *, code: int) -> Outcome:
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, out + err
    return Outcome(process.returncode, out, err)


@contextmanager
def training(here: Path, *more: str | Path) -> Iterator[tuple[subprocess.Popen[str], Path, list[int]]]:
    """An endless training under way: its launcher, run folder and all its processes."""
    endless = ["--epochs", "100000", "--val-period", "0", "--save-every", "0"]
    process = started(here, *train("set", *more, *endless))
    run = here / "runs" / "train" / "exp"
    processes: list[int] = []
    try:
        wait_until(lambda: rows_of(run) >= 2, process)
        processes += family(process.pid)
        yield process, run, processes
    finally:
        for pid in {*family(process.pid), *processes} if process.poll() is None else ():
            with_suppressed(os.kill, pid, signal.SIGKILL)
        process.communicate()


def with_suppressed(action: Callable[..., object], *args: object) -> None:
    try:
        action(*args)
    except OSError:
        pass


def rows_of(run: Path) -> int:
    """Epochs done."""
    table = run / "results.csv"
    return len(table.read_text().splitlines()) - 1 if table.exists() else 0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_gone(processes: Sequence[int]) -> bool:
    wait_until(lambda: not any(map(alive, processes)))
    return True


# -- file systems


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A mount, by root on Linux only."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can mount a small or read-only file system")
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this container may not mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def disk(folder: Path, size: int):
    """A disk of ``size`` bytes."""
    return mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield


# -- data sets that are missing or wrong


def labels_of(here: Path, number: int = 0) -> Path:
    return sorted((here / "set" / "labels" / "train").glob("*.txt"))[number]


def test_a_training_reports_what_it_drops_and_what_has_no_labels(cli, here):
    rows = ["0 5.5 .5 .1 .1", "0 1.5 .5 .1 .1", "0 nan .5 .1 .1", "circle .5 .5 .1 .1", "0 .95 .5 .2 .1"]
    for number, row in enumerate([*rows, bytes(range(256)).decode("latin-1")]):
        with labels_of(here, number).open("a", encoding="latin-1") as file:
            file.write(f"{row}\n")
    labels_of(here, 7).unlink()
    text = (here / "set" / "data.yaml").read_text()
    (here / "set" / "data.yaml").write_text(text + "download: rm -rf everything\n")
    with read_only(here / "set"):
        said = cli(*train("set", "--max-steps", "1"), code=0).out
    assert re.search(r"\d+ problems in the train split", said) and re.search(r"\.\.\. and \d+ more", said)
    assert re.search(r"labels/train/000000\.txt:\d+: .*pixels", said)
    assert "1 image without a label file" in said
    assert "note: download: is not executed" in said


# -- settings that only the verb can judge: tests/unit/config and tests/golden have the others


def test_settings_that_the_model_or_the_data_refuse(cli, refused, here, world):
    (here / "my_code.py").write_text("class Nothing: pass\n")
    (here / "set" / "more.yaml").write_text((here / "set" / "data.yaml").read_text() + "  4: moon\n")
    cli(*train("set/more.yaml", "--project", "other", "--max-steps", "1"), code=0)
    other = "other/exp/weights/last.safetensors"
    training = ["--data", "set", "--cfg", "tiny.yaml", *SMALL, "--device", "cpu"]
    using = ["--weights", str(world / "run" / "weights" / "last.safetensors"), "--img", "64"]
    on_cpu = [*using, "--device", "cpu"]
    predict = [*on_cpu, "--source", "set/images/val"]
    for verb, common, words, says in [
        ("train", training, "--freeze *", "--freeze * leaves nothing to train"),
        ("train", training, "--recipe-class my_code.py:Nothing", "my_code.py has no subclass Nothing of yolofleet.TrainingRecipe"),
        ("val", on_cpu, f"--data set --weights {other}", "need the same classes: one has 4, number 2 has 5"),
        ("val", on_cpu, f"--data set --augment --merge mean --weights {other}", "one has 4, number 2 has 5"),
        ("predict", predict, f"--weights {other}", "one has 4, number 2 has 5"),
        ("predict", predict, "--tile 8", "--tile 8 is below 32 pixels"),
        ("predict", predict, "--tile 64 --overlap 1", "--overlap 1 is not below 1"),
        ("export", using, "--int8 --data set --half", "--int8 and --half are mutually exclusive"),
        ("export", using, "--int8 --data set --format torchscript", "torchscript does not support --int8"),
    ]:  # fmt: skip
        refused(verb, *common, *words.split(), code=2, says=[says])


def test_a_parameter_that_albumentations_refuses(refused):
    pytest.importorskip("albumentations")
    words = ("--set", "albumentations=[Blur p=3]")
    assert "pydantic" not in refused(*train("set", *words), code=2, says=["refuses 'Blur p=3': p: "])


def test_a_hint_without_values_names_the_help_of_the_verb(refused):
    refused("data", "check", code=2, says=["yolofleet data --help shows what is allowed"])


# -- weights


def test_weights_that_are_not_finite(refused, here, world):
    tensors = safetensors.torch.load_file(world / "run" / "weights" / "last.safetensors")
    tensors["model.0.bn.running_var"][0] = float("nan")
    torch.save(tensors, here / "nan.pt")
    says = ["NonFiniteError: nan.pt: model.0.bn.running_var is not finite"]
    refused(*train("set", "--weights", "nan.pt"), code=5, says=says)
    common = ("--weights", "nan.pt", "--cfg", world / "tiny.yaml", "--device", "cpu")
    refused("val", *common, "--data", "set", code=5, says=says)
    refused("predict", *common, "--source", "set/images/val", code=5, says=says)


# -- resume


@pytest.fixture
def run(world: Path, here: Path) -> Path:
    """A copy of the finished run."""
    shutil.copytree(world / "run", here / "run")
    return here / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_left_as_it_was(run: Path, before: dict[str, bytes]) -> None:
    """But for the log, which tells of the attempt."""
    after = contents(run)
    for kept in (before, after):
        for log in [name for name in kept if name.startswith(("logs", "events"))]:
            del kept[log]
    assert after == before


def test_resume_from_a_checkpoint_of_another_run(cli, run, here, world):
    """Of another model, and of another number of classes."""
    (here / "wider.yaml").write_text(TINY.replace("0.125", "0.25"))
    cli(*train("set", "--cfg", "wider.yaml", "--name", "wider"), code=0)
    text = (here / "set" / "data.yaml").read_text()
    (here / "set" / "data.yaml").write_text(text + "  4: moon\n")
    cli(*train("set", "--cfg", world / "tiny.yaml", "--name", "moon"), code=0)
    for name, says in (("wider", "tiny.yaml"), ("moon", "for other classes")):
        other = here / "runs" / "train" / name
        shutil.rmtree(run / "checkpoints")
        shutil.copytree(other / "checkpoints", run / "checkpoints")
        before = contents(run)
        told = cli("train", "--resume", run, "--epochs", "3", code=3).err
        assert says in told and f"--resume {run}" in told and "--weights" in told
        assert_left_as_it_was(run, before)


def test_resume_of_an_ended_run_names_the_stored_setting_that_ends_it(cli, here):
    said = cli(
        *train("set", "--max-steps", "1", "--name", "short", "--batch", "4", "--nominal-batch", "4"), code=0
    ).out
    assert "trained a part of the first epoch, 1 step," in said
    run = Path("runs/train/short")
    said = cli("train", "--resume", run, "--epochs", "3", code=0).out
    assert (
        f"ended already, by --max-steps 1 of {run / 'config.yaml'}; --max-steps with a higher number" in said
    )
    # the epochs are in the config.yaml of the run now
    cli("train", "--resume", run, "--max-steps", "2", code=0)
    found = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert found["steps"] == 2


def test_resume_of_a_finished_run_leaves_its_result(cli, run):
    before = contents(run)
    assert "the run had ended already, by --epochs 1 of" in cli("train", "--resume", run, code=0).out
    after = contents(run)
    for name in ("weights/last.safetensors", "weights/best.safetensors", "results.csv"):
        assert after[name] == before[name]
    found, was = (json.loads(kept["results.json"]) for kept in (after, before))
    for name in ("metrics", "weights_sha256", "steps", "best"):
        assert found[name] == was[name]


# -- disks


@pytest.mark.parametrize("what", ["weights", "checkpoint"])
def test_a_disk_that_fills_up_while_saving(cli, here, world, what):
    told = full_disk(here, world, what, lambda argv: cli(*argv, code=3).err)
    assert "No space left on device" in told and "free some space" in told


@needs_linux
def test_a_disk_of_the_cache_that_is_full(cli, here, monkeypatch):
    """The table of 2,000 files does not fit; their names and sizes do."""
    (here / "many").mkdir()
    for number in range(2000):
        (here / "many" / f"{number}.txt").touch()
    shutil.copytree(here / "set", here / "many", dirs_exist_ok=True)
    with disk(here / "disk", 64 << 10) as small:
        monkeypatch.setenv("YOLOFLEET_CACHE", str(small / "cache"))
        told = cli("data", "check", f"file://{here / 'many'}/", code=3).err
        assert "YOLOFLEET_CACHE" in told and "YOLOFLEET_DISK_CACHE" in told and "--project" not in told
        assert not list(small.rglob("*.tmp"))
    monkeypatch.setenv("YOLOFLEET_CACHE", str(here / "cache"))
    cli("data", "check", f"file://{here / 'many'}/", code=0)


@needs_linux
@pytest.mark.slow
def test_a_disk_that_fills_up_while_two_processes_train(here, world):
    told = full_disk(
        here, world, "checkpoint", lambda argv: end(started(here, *argv, "--device", "cpu:2"), code=3).err
    )
    assert "No space left on device" in told and "free some space" in told


@needs_linux
@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_ends_nothing(here, world):
    checkpoint = next((world / "run" / "checkpoints").glob("step-*")).stat().st_size
    with disk(here / "disk", 12 * checkpoint) as small, (here / "said.txt").open("w+") as said:
        argv = train("set", "--project", small, "--epochs", "10000", "--val-period", "0")
        process = started(here, *argv, "--device", "cpu", out=said.fileno())
        wait_until(lambda: rows_of(small / "exp") >= 1, process)
        with pytest.raises(OSError), (small / "ballast").open("wb") as file:
            file.write(bytes(12 * checkpoint))
        wait_until(lambda: "the next save tries again" in (here / "said.txt").read_text(), process)
        (small / "ballast").unlink()
        wait_until(lambda: "everything is saved" in (here / "said.txt").read_text(), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=DEADLINE_S) == 75
        told = (here / "said.txt").read_text()
        assert told.count("the disk works again, and everything is saved") == 1, told
        assert told.count("the next save tries again") == 1, told
        rows = (small / "exp" / "results.csv").read_text().splitlines()[1:]
        assert [int(row.split(",")[0]) for row in rows] == list(range(1, len(rows) + 1))
        assert_nothing_half_written(small)


def full_disk(here: Path, world: Path, what: str, run: Callable[[list[str | Path]], str]) -> str:
    weights = (world / "run" / "weights" / "last.safetensors").stat().st_size
    checkpoint = next((world / "run" / "checkpoints").glob("step-*")).stat().st_size
    room = {"weights": 1.5 * weights, "checkpoint": 2 * weights + 0.5 * checkpoint}[what] + 64e3
    with disk(here / "disk", int(room)) as small:
        told = run([*train("set", "--project", small, "--epochs", "3")])
        assert "not written there at the end of the run: " in told and "the last checkpoint" in told
        assert ("weights/last" in told) == (what == "weights")
        assert_nothing_half_written(small)
        assert (small / "exp" / "weights" / "best.safetensors").exists()
    return told


def test_a_disk_without_any_space(refused, here):
    with disk(here / "disk", 65536) as small:
        with pytest.raises(OSError), (small / "ballast").open("wb") as file:
            file.write(bytes(1 << 20))
        refused(*train("set", "--project", small), code=3, says=["cannot write", "No space left"])
        assert [path.name for path in small.iterdir()] == ["ballast"]


def test_a_read_only_place_for_results(refused, here, world):
    weights = world / "run" / "weights" / "last.safetensors"
    (here / "results").mkdir()
    with read_only(here / "results"):
        says = ["cannot write results/exp", "--project"]
        common = ["--device", "cpu", "--img", "64", "--project", "results"]
        refused(*train("set", "--project", "results"), code=3, says=says)
        refused("val", "--weights", weights, "--data", "set", *common, code=3, says=says)
        refused("predict", "--weights", weights, "--source", "set/images/val", *common, code=3, says=says)


# -- a data set that changes under way


def spoil(here: Path) -> None:
    """The index is made; then every training image becomes junk of the same size and time."""
    spec = load_dataset("set")
    for split in ("train", "val"):
        build_index(spec, split)
    for image in (here / "set" / "images" / "train").iterdir():
        about = image.stat()
        image.write_bytes(b"J" * about.st_size)
        os.utime(image, ns=(about.st_atime_ns, about.st_mtime_ns))


@needs_linux
@pytest.mark.slow
def test_an_image_that_became_junk_is_said_from_rank_1s_loader_process(here):
    spoil(here)
    process = started(here, *train("set", "--device", "cpu:2", "--workers", "1", "--shares", "0,1"))
    seen: set[int] = set()

    def watch() -> None:
        while process.poll() is None:
            seen.update(family(process.pid))
            time.sleep(0.1)

    watching = threading.Thread(target=watch)
    watching.start()
    outcome = end(process, code=3)
    watching.join()
    assert_told(outcome)
    assert "set/images/train/0" in outcome.err and "not in a known image format" in outcome.err
    assert "rank 1" in outcome.err
    assert len(seen) >= 4 and all_gone(sorted(seen))  # launcher, agent, two ranks; the loader is brief
    assert not runs_in(here)


def test_images_deleted_during_training(cli, here):
    def delete() -> None:
        wait_until(lambda: rows_of(here / "runs" / "train" / "exp") >= 1)
        shutil.rmtree(here / "set" / "images" / "train")

    deleting = threading.Thread(target=delete)
    deleting.start()
    told = cli(*train("set", "--cache", "none", "--epochs", "10000", "--val-period", "0"), code=3).err
    deleting.join()
    assert "set/images/train/0" in told and "does not exist" in told
    assert_nothing_half_written(here)


# -- being stopped


def resumes(told: str, run: Path, here: Path, cli: Cli) -> None:
    """The message's own command continues the run after the step that it names."""
    step = int(re.search(r"after step (\d+); the state is saved", told)[1])  # type: ignore[index]
    assert f"yolofleet train --resume {run}" in told or f"--resume {run.relative_to(here)}" in told
    assert_nothing_half_written(run)
    said = cli("train", "--resume", run, "--epochs", str(step + 1), "--device", "cpu", code=0).out
    assert f"resumed after step {step} " in said


@needs_linux
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "cpu:2"])
def test_ctrl_c_saves_the_state_and_says_how_to_go_on(cli, here, device):
    with training(here, "--device", device, "--workers", "1") as (process, run, processes):
        assert len(processes) == (2 if device == "cpu" else 8)
        process.send_signal(signal.SIGINT)
        outcome = end(process, code=75)
        assert_told(outcome)
        assert re.search("stopping( after this step)?, then saving", outcome.err)
        assert all_gone(processes)
    resumes(outcome.err, run, here, cli)


@needs_linux
@pytest.mark.parametrize("device", ["cpu", pytest.param("cpu:2", marks=pytest.mark.slow)])
def test_a_closed_terminal_saves_the_state(here, cli, device):
    """The kernel sends SIGHUP to every process of the terminal, and refuses what they print."""
    import pty

    run, words = here / "runs" / "train" / "exp", train("set", "--device", device, "--workers", "1")
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(here)
        command = [sys.executable, "-m", "yolofleet", *map(str, words), "--epochs", "100000"]
        os.execve(
            sys.executable, [*command, "--val-period", "0", "--save-every", "0epochs"], environment(here)
        )
    os.set_blocking(terminal, False)
    processes = [pid]

    def is_under_way() -> bool:
        with_suppressed(os.read, terminal, 1 << 16)  # a full terminal would stop it
        return rows_of(run) >= 2 or not alive(pid)

    try:
        wait_until(is_under_way)
        processes = family(pid)
        os.close(terminal)
        wait_until(lambda: not any(map(alive, processes)))
    finally:
        for one in processes:
            with_suppressed(os.kill, one, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    log = (run / "logs" / "rank-0.log").read_text()
    assert code == 75, log
    step = max(step_of(path) for path in (run / "checkpoints").glob("step-*.safetensors"))
    assert_nothing_half_written(run)
    said = cli("train", "--resume", run, "--epochs", str(step + 1), "--device", "cpu", code=0).out
    assert f"resumed after step {step} " in said


@needs_linux
def test_a_second_ctrl_c_ends_what_does_not_listen(here):
    with training(here, "--device", "cpu:2") as (process, _, processes):
        ranks = [pid for pid in processes if rank_of(pid) is not None]
        assert len(ranks) == 2
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        outcome = end(process, code=75)
        assert_told(outcome)
        assert "ending at once" in outcome.err and "Stopped: ended at once" in outcome.err
        assert all_gone(processes)


def test_sigterm_in_this_process_saves_the_state(cli, here):
    def stop() -> None:
        wait_until(lambda: rows_of(here / "runs" / "train" / "exp") >= 1)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    told = cli(*train("set", "--epochs", "10000", "--val-period", "0"), code=75).err
    stopping.join()
    resumes(told, here / "runs" / "train" / "exp", here, cli)


@needs_linux
def test_workers_end_by_themselves_when_their_launcher_is_killed(cli, here):
    with training(here, "--device", "cpu:2", "--workers", "1") as (process, run, processes):
        # launcher, agent, its fork server and tracker, two ranks, a loader process each
        assert len(processes) == 8
        process.kill()
        process.wait()
        assert all_gone(processes)
    assert_nothing_half_written(run)
    assert (
        "resumed after step" in cli("train", "--resume", run, "--epochs", "2", "--device", "cpu", code=0).out
    )


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("device", ["cpu", "cpu:2"])
def test_stopped_before_it_trained_leaves_nothing(here, device):
    process = started(here, *train("set", "--device", device))
    wait_until(lambda: bool(runs_in(here)), process)
    processes = family(process.pid)
    process.send_signal(signal.SIGTERM)
    outcome = end(process, code=75)
    assert_told(outcome)
    assert "same command" in outcome.err and not runs_in(here) and all_gone(processes)


# -- memory


@pytest.mark.slow
@needs_linux
def test_too_little_memory_says_what_to_make_smaller(here):
    import resource

    limit = 4 << 30
    argv = [*train("set"), "--img", "4096", "--micro-batch", "8", "--cache", "none", "--set", "mosaic=0"]
    done = subprocess.run(
        [sys.executable, "-m", "yolofleet", *map(str, argv)],
        cwd=here,
        env=environment(here),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert_told(Outcome(done.returncode, done.stdout, done.stderr))
    assert done.returncode == 2 and "too little memory for --micro-batch 8, --img 4096" in done.stderr
    assert "--micro-batch 4" in done.stderr
