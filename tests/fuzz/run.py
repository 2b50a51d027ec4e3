"""Fuzz every reader of files, answers and variables that other people make.

    python tests/fuzz/run.py --minutes 10            all readers in turn; the seed is shown
    python tests/fuzz/run.py --seed 7 --case 1234    repeats one case and shows what it said
    python tests/fuzz/run.py --reader onnx --cases 200

Prints a table of readers, then each kind of failure with the commands that repeat it; exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; forked children cannot use a parent's threads
for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
for folder in (Path(__file__).resolve().parent, Path(__file__).resolve().parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from corpus import Corpus  # noqa: E402
from harness import POLL_S, Case, Result, Running, guard  # noqa: E402
from readers import READERS  # noqa: E402

import yolofleet  # noqa: E402
from yolofleet.support.system.children import die_with_parent  # noqa: E402

SHOWN = 5  # commands that repeat one kind of failure


@dataclass
class Tally:
    """What became of the cases of one reader."""

    outcomes: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0


@dataclass
class Report:
    """Results of many cases."""

    seed: int
    tallies: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    failures: dict[str, list[Result]] = field(default_factory=lambda: defaultdict(list))

    def add(self, result: Result) -> None:
        tally = self.tallies[result.reader]
        tally.outcomes[result.outcome] += 1
        tally.longest_s = max(tally.longest_s, result.seconds)
        tally.cpu_s = max(tally.cpu_s, result.cpu_s)
        tally.peak_bytes = max(tally.peak_bytes, result.peak_bytes)
        for fault in result.faults:
            self.failures[f"{result.reader}: {fault}"].append(result)

    @property
    def cases(self) -> int:
        return sum(sum(tally.outcomes.values()) for tally in self.tallies.values())

    def text(self) -> str:
        head = ("reader", "cases", "refused", "accepted", "failed", "longest", "CPU", "peak")
        rows = [head]
        for name, tally in self.tallies.items():
            counts = tally.outcomes
            numbers = [sum(counts.values()), counts["refused"], counts["accepted"], counts["failed"]]
            sizes = (
                f"{tally.longest_s:.1f} s",
                f"{tally.cpu_s:.1f} s",
                f"{tally.peak_bytes / 2**20:.0f} MiB",
            )
            rows.append((name, *map(str, numbers), *sizes))
        lines = ["  ".join([name.ljust(30), *(cell.rjust(8) for cell in cells)]) for name, *cells in rows]
        failed = sum(tally.outcomes["failed"] for tally in self.tallies.values())
        lines.append(f"{self.cases} cases, {failed} failed; seed {self.seed}")
        for what, results in self.failures.items():
            lines += ["", f"{len(results)} x {what}"]
            lines += [
                f"    {repeat(self.seed, result.number)}    # {result.command[:150]!r}"
                for result in results[:SHOWN]
            ]
        return "\n".join(lines)


def repeat(seed: int, number: int) -> str:
    """The command that runs one case again."""
    return f"python tests/fuzz/run.py --seed {seed} --case {number}"


def reader_of(number: int, names: Sequence[str] = tuple(READERS)) -> str:
    """Case numbers go round the readers."""
    return names[number % len(names)]


def run_cases(
    numbers: Iterator[int], seed: int, corpus: Corpus, scratch: Path, *, jobs: int = 1
) -> Iterator[Result]:
    """Run cases, ``jobs`` at a time; a case that took too long is repeated once alone, as the machine may have been busy."""
    running: list[Running] = []
    again: list[int] = []
    left = True
    while running or left or again:
        while left and len(running) < jobs and not again:
            number = next(numbers, None)
            if number is None:
                left = False
                break
            running.append(start(number, seed, corpus, scratch))
        if again and not running:
            running.append(start(again[0], seed, corpus, scratch))
        for case in list(running):
            result = case.poll()
            if result is None:
                continue
            running.remove(case)
            case.remove()
            late = any("it took more than" in fault for fault in result.faults)
            if late and case.number not in again:
                again.append(case.number)
                continue
            if case.number in again:
                again.remove(case.number)
            yield result
        if running:
            time.sleep(POLL_S)


def start(number: int, seed: int, corpus: Corpus, scratch: Path) -> Running:
    name = reader_of(number)
    root = Path(tempfile.mkdtemp(prefix=f"{number}-", dir=scratch))
    return Running(name, READERS[name], number, seed, corpus, root)


def new_scratch() -> Path:
    """Return a new folder for cases. When this process ends, all processes that work there are killed."""
    scratch = Path(tempfile.mkdtemp(prefix="yolofleet-fuzz-")).resolve()
    guard(scratch)
    return scratch


def warm_up() -> None:
    """Import what the verbs import, so that each child has it."""
    ours = [
        module.name
        for module in pkgutil.walk_packages(yolofleet.__path__, "yolofleet.")
        if "__main__" not in module.name
    ]
    for name in (*ours, "onnx", "onnxruntime", "openvino", "ncnn", "tempfile"):
        with suppress(ImportError):
            importlib.import_module(name)
    import cv2
    import torch

    cv2.setNumThreads(1)
    torch.set_num_threads(1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="how long to go on, after the good files are made"
    )
    parser.add_argument("--cases", type=int, help="how many cases instead")
    parser.add_argument("--rounds", type=int, help="how many cases of each reader instead")
    parser.add_argument("--seed", type=int, help="of all draws; default: a new one")
    parser.add_argument("--case", type=int, help="repeat this one and show what it said")
    parser.add_argument("--keep", action="store_true", help="with --case: keep its folder")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--reader", action="append", choices=list(READERS), help="only this reader; repeatable"
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="cases at a time")
    parser.add_argument("--corpus", type=Path, help="folder of good files that is kept")
    given = parser.parse_args(argv)
    cases = len(READERS) * given.rounds if given.rounds else given.cases
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    scratch = new_scratch()
    try:
        warm_up()
        corpus = Corpus(given.corpus or scratch / "corpus")
        if given.case is not None:
            apart(lambda: rehearse(given.case, seed, corpus, scratch))
            return show(given.case, seed, corpus, scratch, keep=given.keep)
        print(f"seed {seed}: making good files", flush=True)
        apart(corpus.make_all)
        numbers = counting(given.first, cases, given.minutes, set(given.reader or READERS))
        report = Report(seed)
        said_s = time.monotonic()
        for result in run_cases(numbers, seed, corpus, scratch, jobs=given.jobs):
            new = [fault for fault in result.faults if f"{result.reader}: {fault}" not in report.failures]
            report.add(result)
            for fault in new:
                print(f"FAILED {result.reader}: {fault}\n    {repeat(seed, result.number)}", flush=True)
            if time.monotonic() - said_s > 60:
                said_s = time.monotonic()
                print(f"{report.cases} cases", flush=True)
        print(report.text())
        return 1 if report.failures else 0
    finally:
        if not given.keep:
            shutil.rmtree(os.fsencode(scratch), ignore_errors=True)


def apart(work: Callable[[], None]) -> None:
    """Run ``work`` in a forked child: what it starts and imports must not be there in the children of the cases."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            die_with_parent()
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit("the good files could not be made")


def rehearse(number: int, seed: int, corpus: Corpus, scratch: Path) -> None:
    """Make the files of one case, so that the good files that it copies are there."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    (folder / "here").mkdir()
    os.chdir(folder / "here")
    name = reader_of(number)
    READERS[name](Case(name, number, seed, folder / "here", corpus))


def counting(first: int, cases: int | None, minutes: float, names: set[str]) -> Iterator[int]:
    """Numbers of cases, until there are so many or the time is over."""
    ends_s = time.monotonic() + 60 * minutes
    number, done = first, 0
    while (done < cases) if cases is not None else (time.monotonic() < ends_s):
        if reader_of(number) in names:
            yield number
            done += 1
        number += 1


def show(number: int, seed: int, corpus: Corpus, scratch: Path, *, keep: bool) -> int:
    case = start(number, seed, corpus, scratch)
    while (result := case.poll()) is None:
        time.sleep(POLL_S)
    if keep:
        print(f"its folder: {case.root}")
    else:
        case.remove()
    print(f"reader: {result.reader}\ncommand: {result.command}\n{result.output}")
    print(
        f"exit code {result.code}, {result.seconds:.1f} s, {result.cpu_s:.1f} s of CPU, {result.peak_bytes / 2**20:.0f} MiB"
    )
    for fault in result.faults:
        print(f"FAILED: {fault}")
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
