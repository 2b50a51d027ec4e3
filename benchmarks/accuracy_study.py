"""Compare the accuracy of yolofleet with YOLOv5's over many seeds, on a small data set and one thread a run.

    python benchmarks/accuracy_study.py --data bccd/data.yaml --weights yolov5n.pt --rival-python RIVAL/bin/python --work FOLDER
    python benchmarks/accuracy_study.py --list      # what is done, what is left, in core hours
    python benchmarks/accuracy_study.py --report    # the table, in markdown

One judge measures every program: ``yolofleet val`` of this checkout, on the last weights of a run. A finished run adds a line to
the results file. The same command continues an interrupted study: an unfinished run of yolofleet resumes, one of YOLOv5 begins
again. Start the study from a checkout that nobody edits: an unfinished run begins again if ``src`` has changed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import rival
from seed_intervals import FIGURES, report

from yolofleet.storage.atomic import exclusive, write_json, write_text
from yolofleet.support.system.children import die_with
from yolofleet.support.system.proc import started_ticks, stat_fields

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
EPOCHS = {"scratch": 100, "finetune": 20}
EPOCH_CPU_S = {"ours": 12.0, "yolov5": 16.0}  # until a run of the arm is finished; 205 images of 320 px
IMAGE = ("--img", "320")
# programs of others and the options with their environments; their runs begin again, and do not depend on our code
RIVALS = {"yolov5": "--rival-python", "libreyolo": "--libreyolo-python"}


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: GROUP/NAME; only arms of one group are compared.
        program: "ours", "older" (another checkout of ours) or "yolov5".
        seeds: seeds 0 to ``seeds - 1``.
        options: added to the command of yolofleet.
        model: trained from scratch, unless the group is "finetune".
    """

    name: str
    program: str
    seeds: int
    options: tuple[str, ...] = ()
    model: str = "yolov5n"

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


ARMS = (
    Arm("scratch/ours", "ours", 8),
    Arm("scratch/yolov5", "yolov5", 8),
    Arm("scratch/ours-micro16", "ours", 4, ("--micro-batch", "16")),
    Arm("finetune/ours", "ours", 8),
    Arm("finetune/yolov5", "yolov5", 8),
)


# -- results and the order of runs -----------------------------------------------------------------------------


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a results file without a last line that a crash cut off; [] if there is no file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    write_text(path, "".join(json.dumps(each) + "\n" for each in [*read_rows(path), row]))


def runs_left(
    arms: Sequence[Arm], rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]
) -> list[tuple[Arm, int]]:
    """Return the runs that no row has: seed by seed, and within a seed arm by arm.

    Args:
        seeds: of every arm; empty = each arm's own.
    """
    done = {(row["arm"], row["seed"]) for row in rows}
    order = seeds or range(max((arm.seeds for arm in arms), default=0))
    runs = [(arm, seed) for seed in order for arm in arms if seeds or seed < arm.seeds]
    return [(arm, seed) for arm, seed in runs if (arm.name, seed) not in done]


def core_hours(arm: Arm, epochs: int, rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the expected core hours of a run, from finished runs of the arm if there are any."""
    known = [row["cpu_s"] / row["epochs"] for row in rows if row["arm"] == arm.name and row["epochs"]]
    default_s = EPOCH_CPU_S["yolov5" if arm.program == "yolov5" else "ours"]
    return (statistics.mean(known) if known else default_s) * epochs / 3600


# -- runs ------------------------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    return done.stdout.strip()


def code_of(checkout: Path) -> dict[str, Any]:
    """Return the commit of a checkout, the hash of its ``src``, and whether ``src`` is as committed."""
    dirty = git(checkout, "status", "--porcelain", "--", "src")
    commit = git(checkout, "rev-parse", "HEAD")
    return {
        "commit": commit,
        "tree": git(checkout, "rev-parse", "HEAD:src"),
        "clean": bool(commit) and not dirty,
    }


class Study:
    """The runs of a study in one work folder."""

    image = IMAGE

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.lock = threading.Lock()
        self.versions = {"ours": rival.version_of(PYTHON, "yolofleet"), "yolov5": "", "older": ""}
        if args.rival_python:
            self.versions["yolov5"] = rival.version_of(args.rival_python, "yolov5")
        if args.older:
            self.versions["older"] = (
                rival.version_of(self.python("older"), "yolofleet") or "an older checkout"
            )

    def data(self, arm: Arm) -> Path:
        """Return the data set of an arm: a YAML file or folder."""
        return Path(self.args.data).resolve()

    def facts(self, arm: Arm, folder: Path) -> dict[str, Any]:
        """Return what else the row of a finished run says."""
        return {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of a finished run to the results."""
        add_row(self.args.results, row)

    def checkout(self, program: str) -> Path:
        return Path(self.args.older).resolve() if program == "older" else ROOT

    def python(self, program: str) -> str:
        """Return the interpreter of a program: an older checkout's own, if it has a ``.venv``."""
        if program == "yolov5":
            return str(self.args.rival_python)
        own = self.checkout(program) / ".venv" / "bin" / "python"
        return str(own) if program == "older" and own.exists() else PYTHON

    def why_left_out(self, arm: Arm) -> str:
        """Return why an arm cannot run here, or ""."""
        if arm.group == "finetune" and not self.args.weights:
            return "needs --weights"
        if not self.versions[arm.program]:
            return f"no {arm.program} in the environment of {RIVALS[arm.program]}"
        return ""

    def environment(self, program: str, folder: Path) -> dict[str, str]:
        common = {**os.environ, "OMP_NUM_THREADS": "1"}
        if program == "yolov5":
            return common | rival.environment(self.args.rival_python, folder)
        return common | {"PYTHONPATH": str(self.checkout(program) / "src"), "PYTHONSAFEPATH": "1"}

    def train_command(self, arm: Arm, seed: int, epochs: int, folder: Path) -> list[str]:
        """Return the command that begins a run, or resumes one of yolofleet that has a checkpoint."""
        run = folder / "run"
        name = ("--project", str(folder), "--name", "run", "--exist-ok", "--seed", str(seed))
        weights = str(Path(self.args.weights).resolve()) if self.args.weights else ""
        device = ("--device", self.args.device)
        common = (*self.image, "--epochs", str(epochs), *device, "--workers", "0", "--cache", "ram")
        data = self.data(arm)
        start = weights if arm.group == "finetune" else ""
        if arm.program == "yolov5":
            shutil.rmtree(run, ignore_errors=True)
            head = rival.train_command(self.args.rival_python, data, folder, start, arm.model)
            return [*head, *common, *name]
        head = [self.python(arm.program), "-m", "yolofleet", "train"]
        if any((run / "checkpoints").glob("*.safetensors")):
            return [*head, "--resume", str(run)]
        shutil.rmtree(run, ignore_errors=True)
        model = ["--weights", start] if start else ["--model", arm.model]
        if "--recipe" not in arm.options:
            model += ["--recipe", "scratch-low"]  # YOLOv5's values
        quiet = ("--threads", "1", "--val-period", "0", "--no-plots")
        return [*head, "--data", str(data), *model, "--batch", "16", *quiet, *common, *name, *arm.options]

    def judge_command(self, arm: Arm, folder: Path) -> list[str]:
        last = folder / "run" / "weights" / ("last.pt" if arm.program == "yolov5" else "last.safetensors")
        data = str(self.data(arm))
        return [
            *(PYTHON, "-m", "yolofleet", "val", "--weights", str(last), "--data", data, *self.image),
            *("--device", "cpu", "--threads", "1", "--workers", "0", "--no-plots"),
            *("--project", str(folder), "--name", "val", "--exist-ok", "--json", str(folder / "val.json")),
        ]

    def figures(self, arm: Arm, folder: Path, state: dict[str, Any]) -> Mapping[str, float]:
        """Return the figures of the last weights of a run."""
        self.execute(self.judge_command(arm, folder), "ours", folder, state)
        metrics: dict[str, float] = json.loads((folder / "val.json").read_text())["metrics"]
        return metrics

    def execute(self, command: list[str], program: str, folder: Path, state: dict[str, Any]) -> None:
        """Run a command to its end, and keep its seconds in the state file as they pass.

        Raises:
            RuntimeError: it failed.
        """
        before_wall_s, before_cpu_s, began_at_s = state["wall_s"], state["cpu_s"], time.monotonic()
        with (folder / "log.txt").open("ab") as log:
            child = subprocess.Popen(
                command,
                env=self.environment(program, folder),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with, os.getpid()),
            )
        state |= {"pid": child.pid, "ticks": started_ticks(child.pid)}
        ended, noted_at_s = 0, -math.inf
        while not ended:
            ended, status, usage = os.wait4(child.pid, os.WNOHANG)
            cpu_s = usage.ru_utime + usage.ru_stime
            if not ended:
                fields = stat_fields(child.pid)
                cpu_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if fields else 0.0
            state |= {"wall_s": before_wall_s + time.monotonic() - began_at_s, "cpu_s": before_cpu_s + cpu_s}
            if ended or time.monotonic() - noted_at_s > 30:
                noted_at_s = time.monotonic()
                write_json(folder / "state.json", state)
            time.sleep(0 if ended else self.args.poll_s)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            tail = (folder / "log.txt").read_text(errors="replace").splitlines()[-5:]
            raise RuntimeError(
                f"exit status {child.returncode} of {shlex.join(command)}\n  " + "\n  ".join(tail)
            )

    def run(self, arm: Arm, seed: int) -> None:
        """Train, or go on with an interrupted run; judge its last weights; add a row to the results."""
        epochs = self.args.epochs or EPOCHS[arm.group]
        folder = Path(self.args.work).resolve() / arm.name / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        code = code_of(self.checkout(arm.program))
        wanted = {"epochs": epochs, "options": list(arm.options), "version": self.versions[arm.program]}
        wanted |= {} if arm.program in RIVALS else code
        state: dict[str, Any] = {}
        if (folder / "state.json").exists():
            state = json.loads((folder / "state.json").read_text())
            while state.get("pid") and started_ticks(state["pid"]) == state["ticks"] > 0:
                time.sleep(self.args.poll_s)  # the last study was killed, and its run is about to end
        if any(state.get(key) != value for key, value in wanted.items() if key != "commit"):
            shutil.rmtree(folder)
            folder.mkdir()
            state = {**wanted, "wall_s": 0.0, "cpu_s": 0.0, "pieces": 0, "trained": False}
        if not state["trained"]:
            state["pieces"] += 1
            if arm.program in RIVALS:
                state |= {"wall_s": 0.0, "cpu_s": 0.0}
            if arm.program in RIVALS or not (folder / "run" / "results.json").exists():
                self.execute(self.train_command(arm, seed, epochs, folder), arm.program, folder, state)
            state["trained"] = True
            write_json(folder / "state.json", state)
        table = (folder / "run" / "results.csv").read_text().strip().splitlines()
        if len(table) != epochs + 1:
            raise RuntimeError(f"{folder}/run/results.csv has {len(table) - 1} epochs instead of {epochs}")
        judge = code_of(ROOT)  # now: hours may have passed since the run began
        trained = dict(state)  # the row has the seconds of the training alone
        metrics = self.figures(arm, folder, dict(state))
        row = {"arm": arm.name, "seed": seed, **{figure: metrics[figure] for figure in FIGURES}, **wanted}
        row |= {"commit": trained.get("commit", code["commit"]), "clean": code["clean"] and judge["clean"]}
        row["judge"] = judge["commit"]
        row |= {key: round(trained[key], 1) for key in ("wall_s", "cpu_s")} | {"pieces": trained["pieces"]}
        row |= self.facts(arm, folder)
        with self.lock:
            self.add({**row, "date": time.strftime("%Y-%m-%d")})
        shutil.rmtree(folder / "data", ignore_errors=True)
        print(f"{arm.name} seed {seed}: " + ", ".join(f"{f} {row[f]:.4f}" for f in FIGURES), flush=True)

    def run_all(self, runs: Sequence[tuple[Arm, int]]) -> int:
        """Run all, ``--jobs`` at once; return the number of those that failed."""
        began_at_s, waiting, failed = time.monotonic(), iter(runs), 0

        def work(_: int) -> None:
            nonlocal failed
            while time.monotonic() - began_at_s < self.args.hours * 3600:
                with self.lock:
                    arm, seed = next(waiting, (None, 0))
                if arm is None:
                    return
                try:
                    self.run(arm, seed)
                except (RuntimeError, OSError, KeyError, ValueError) as problem:
                    failed += 1
                    print(f"{arm.name} seed {seed} FAILED: {problem}", file=sys.stderr, flush=True)

        with ThreadPoolExecutor(self.args.jobs) as pool:
            list(pool.map(work, range(self.args.jobs)))
        return failed


# -- command line ----------------------------------------------------------------------------------------------


def chosen_arms(args: argparse.Namespace) -> list[Arm]:
    """Return the arms of ``--arms``, with those that ``--older`` and ``--extra`` add."""
    arms = list(ARMS)
    if args.older:
        arms.append(Arm("scratch/older", "older", 8))
    for text in args.extra:
        name, equals, options = text.partition("=")
        arm = Arm(name if "/" in name else f"scratch/{name}", "ours", 8, tuple(shlex.split(options)))
        if not equals or arm.group not in EPOCHS or arm.name in {each.name for each in arms}:
            sys.exit(f'--extra {text}: expected a new NAME="OPTIONS", or finetune/NAME="OPTIONS"')
        arms.append(arm)
    unknown = set(args.arms) - {word for arm in arms for word in (arm.name, arm.group)}
    if unknown:
        sys.exit(f"--arms {' '.join(sorted(unknown))}: the arms are {', '.join(arm.name for arm in arms)}")
    return [arm for arm in arms if not args.arms or {arm.name, arm.group} & set(args.arms)]


def print_list(args: argparse.Namespace, arms: Sequence[Arm], rows: Sequence[Mapping[str, Any]]) -> None:
    left, total = runs_left(arms, rows, args.seeds), 0.0
    for arm in arms:
        seeds = [seed for each, seed in left if each == arm]
        hours = core_hours(arm, args.epochs or EPOCHS[arm.group], rows) * len(seeds)
        begun = [s for s in seeds if args.work and Path(args.work, arm.name, f"seed-{s}").exists()]
        total += hours
        done = sorted(row["seed"] for row in rows if row["arm"] == arm.name)
        print(f"{arm.name:<22} done {done}, left {seeds}, begun {begun}: {hours:.1f} core hours")
    print(f"{len(left)} runs left, {total:.1f} core hours; {total / args.jobs:.1f} h with --jobs {args.jobs}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="YAML file of the data set (BCCD)")
    parser.add_argument("--weights", help="yolov5n.pt, for the arms of finetune")
    parser.add_argument("--rival-python", help="Python of an environment with yolov5 7.0.14")
    parser.add_argument("--work", help="folder of the runs")
    parser.add_argument(
        "--device",
        default="cpu",
        help="device of the trainings; figures of each kind need --results of their own",
    )
    default = ROOT / "benchmarks" / "accuracy_study.jsonl"
    parser.add_argument("--results", type=Path, default=default, help="JSON lines of finished runs")
    parser.add_argument("--arms", nargs="*", default=[], help="arms or groups to run; default: all")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="seeds of every arm")
    parser.add_argument("--older", help="checkout of an older yolofleet: adds the arm scratch/older")
    parser.add_argument(
        "--extra", action="append", default=[], help='NAME="--set x=y ...": adds an arm of ours'
    )
    parser.add_argument("--epochs", type=int, default=0, help="epochs of every run, to try the script")
    parser.add_argument("--hours", type=float, default=math.inf, help="start no run after so many hours")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, one thread each")
    parser.add_argument("--nice", type=int, default=0, help="lower the priority by so much")
    parser.add_argument("--poll-s", type=float, default=2.0, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="show what is done and what is left")
    parser.add_argument("--report", action="store_true", help="print the tables")
    args = parser.parse_args(words)
    arms = chosen_arms(args)
    wanted = {arm.name: arm for arm in arms}
    rows = [
        row
        for row in read_rows(args.results)
        if row["epochs"] == (args.epochs or EPOCHS[row["arm"].partition("/")[0]])
    ]
    for row in rows:
        arm = wanted.get(row["arm"])
        if arm and row["options"] != list(arm.options):
            sys.exit(f"{row['arm']} of {args.results} has other options: {shlex.join(row['options'])}")
    if args.report or args.list:
        print(report(rows)) if args.report else print_list(args, arms, rows)
        return 0
    if not (args.data and args.work):
        parser.error("a study needs --data and --work")
    os.nice(args.nice)
    study = Study(args)
    for arm in arms:
        if study.why_left_out(arm):
            print(f"left out: {arm.name} ({study.why_left_out(arm)})", flush=True)
    left = runs_left([arm for arm in arms if not study.why_left_out(arm)], rows, args.seeds)
    Path(args.work).mkdir(parents=True, exist_ok=True)
    with exclusive(Path(args.work) / "lock") as is_mine:
        if not is_mine:
            sys.exit(f"another study uses {args.work}")
        return 1 if study.run_all(left) else 0


if __name__ == "__main__":
    sys.exit(main())
