"""Check that quick tests notice the faults of ``mutations.py``.

``python tests/mutation/run.py [--check] [--jobs N] [NAME ...]`` works in copies of the checkout, never in the checkout:

1. It runs each test file that may reach the engine once, with a probe before each line that a mutation changes. So it knows
   which files execute which of these lines, also in child processes of any kind, at no cost in time.
2. For each mutation it changes the line, and runs these files up to the first failure: first the one that noticed it in
   ``before.json``, then the shortest. "unclear": no test failed, but one took too long; try again on a quiet machine.
   ``added`` there names a test that came with the list, because no other was known to notice the fault.

``build/mutations`` has the results for the committed ``src``; a second call goes on where the first one stopped. It runs test
files that have changed with probes again, but judges a mutation again only if it is named. The exit code is 1 if a mutation
survives that was caught in ``before.json``. Only tests of ``make test`` take part: a file that fails without a mutation, and
the folders of ``LEFT_OUT``, do not.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "mutations"
BEFORE = Path(__file__).with_name("before.json")
# other suites, and tests that run no part of the engine or only repeat trainings that others judge
LEFT_OUT = re.compile(
    "tests/(cluster|e2e|export|fuzz|gpu|store)/|tests/unit/(cli|config|datasets|doctor|evaluate|export|geometry|images|losses"
    "|models|plan|predict|report|system|tune)/|tests/unit/test_"
    "|test_(render|selftest|loggers|miniature_accelerator|device_checks|tune|guides)"
)
HANGS = "hangs"
MARKS = "not slow and not gpu and not cluster"
PROBE = """import os


def at(name):
    path = {folder!r} + "/" + name
    if not os.path.exists(path):
        with open(path, "w"):
            pass
"""


def find(mutation: Mutation, root: Path) -> Path | str:
    """Return the file that has the text of a mutation exactly once, or what is wrong."""
    files = sorted((root / "src" / "yolofleet").rglob("*.py"))
    for candidates in ([path for path in files if path.name == mutation.file], files):
        counts = {path: path.read_text().count(mutation.old) for path in candidates}
        found = [path for path, count in counts.items() if count]
        if len(found) == 1 and counts[found[0]] == 1:
            return found[0]
        if found:
            return f"{mutation.name}: the text stands several times in {', '.join(p.name for p in found)}"
    return (
        f"{mutation.name}: no file has the text {mutation.old!r}; write it again, so that {mutation.meaning}"
    )


def add_probe(path: Path, mutation: Mutation) -> None:
    """Insert a call of the probe before the statement that contains the text of the mutation."""
    source = path.read_text()
    line = source[: source.index(mutation.old)].count("\n") + 1
    lines = source.splitlines(keepends=True)
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= line <= (node.end_lineno or 0)]
    # nothing can stand before `elif`, so its probe stands before the `if`
    place = max(n.lineno for n in around if not lines[n.lineno - 1].lstrip().startswith("elif"))
    indent = re.match(" *", lines[place - 1])
    assert indent is not None
    lines.insert(place - 1, f"{indent[0]}from yolofleet._probe import at; at({mutation.name!r})\n")
    path.write_text("".join(lines))


def digest(file: str) -> str:
    """Return a digest of a file of the checkout."""
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]


class Copy:
    """A copy of the checkout with an environment that imports it; the packages are those of this Python."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.reached = (
            folder,
            folder.with_name(f"{folder.name}-reached"),
        )  # a test may add no file to its checkout
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        compiled = [str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.so")]
        for name in [*listed.stdout.strip("\0").split("\0"), *compiled]:
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)
        self.reached.mkdir()
        (folder / "src/yolofleet/_probe.py").write_text(PROBE.format(folder=str(self.reached)))
        venv.create(folder / ".venv", symlinks=True)
        (packages,) = (folder / ".venv").glob("lib/python*/site-packages")
        (packages / "copy.pth").write_text(f"{folder / 'src'}\n{sysconfig.get_path('purelib')}\n")

    def test(self, file: str, limit_s: float) -> tuple[str, float]:
        """Run a test file up to its first failure.

        Returns:
            The name of the test that failed, "" if none failed, or ``HANGS``; and the seconds.
        """
        argv = [
            str(self.folder / ".venv/bin/python"),
            *("-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider"),
        ]
        variables = {"OMP_NUM_THREADS": "1", "YOLOFLEET_REFERENCE": str(ROOT.parent / "shared")}
        # a PYTHONPATH that names the checkout would hide the copy
        variables |= {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        began_s = time.monotonic()
        process = subprocess.Popen(
            [*argv, "-m", MARKS, file],
            cwd=self.folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return HANGS, time.monotonic() - began_s
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
        passed = process.returncode in (0, 5)  # 5: no test of the file is quick
        name = "" if passed else failed[1] if failed else f"{file} (exit code {process.returncode})"
        return name, time.monotonic() - began_s

    def reaches(self, file: str) -> dict[str, Any]:
        """Run a test file with probes; return its time, its failure, and the mutations whose line it executes."""
        for path in self.reached.iterdir():
            path.unlink()
        failed, seconds = self.test(file, 1800)
        names = sorted(path.name for path in self.reached.iterdir())
        return {"seconds": round(seconds, 1), "failed": failed, "reaches": names, "digest": digest(file)}

    def judge(self, mutation: Mutation, files: dict[str, float], first: str) -> dict[str, Any]:
        """Return which of the test files, with their seconds, notices a mutation; begin with one called ``first``.

        A file that takes too long may hang or be on a busy machine, so it does not count as a test that notices the fault.
        """
        path = find(mutation, self.folder)
        assert isinstance(path, Path)
        source, caught, hung, took_s = path.read_text(), "", "", 0.0
        try:
            self._write(path, source.replace(mutation.old, mutation.new))
            for file in sorted(files, key=lambda file: (Path(file).name != first, files[file])):
                failed, more_s = self.test(file, 120 + 5 * files[file])
                took_s += more_s
                if failed == HANGS:
                    hung = f"{file} takes too long"
                elif failed:
                    caught = failed
                    break
        finally:
            self._write(path, source)
        result = "caught" if caught else "unclear" if hung else "survived" if files else "not reached"
        return {"result": result, "by": caught or hung, "seconds": round(took_s), "files": len(files)}

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):  # it knows whole seconds only
            stale.unlink()


class Results:
    """A JSON file of finished work, written after each part."""

    def __init__(self, path: Path, source: str) -> None:
        self.path = path
        self.done: dict[str, Any] = {"source": source}
        if path.exists() and (known := json.loads(path.read_text()))["source"] == source:
            self.done = known

    def add(self, name: str, result: dict[str, Any]) -> None:
        self.done[name] = result
        print(f"{name}: {json.dumps(result)[:200]}", flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.done, indent=1, sort_keys=True) + "\n")


def in_parallel(work: Any, items: list[Any], copies: list[Copy]) -> None:
    """Call ``work(copy, item)`` for all items, one at a time in each copy."""
    free: Queue[Copy] = Queue()
    for copy in copies:
        free.put(copy)

    def one(item: Any) -> None:
        copy = free.get()
        try:
            work(copy, item)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        list(pool.map(one, items))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="mutations to judge, again if they are judged already"
    )
    parser.add_argument(
        "--check", action="store_true", help="only check that the code has the text of every mutation"
    )
    parser.add_argument("--jobs", type=int, default=1, help="copies that work at the same time")
    options = parser.parse_args()
    before = json.loads(BEFORE.read_text()) if BEFORE.exists() else {}
    wrong = [found for mutation in MUTATIONS if isinstance(found := find(mutation, ROOT), str)]
    if wrong or options.check:
        print("\n".join(wrong) or f"the code has the text of all {len(MUTATIONS)} mutations")
        return int(bool(wrong))
    argv = ["git", "rev-parse", "HEAD:src"]
    tree = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    reach = Results(OUT / "reach.json", tree.stdout.strip())
    results = Results(OUT / "results.json", tree.stdout.strip())
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    files = [file for file in files if not LEFT_OUT.search(file)]
    new = [file for file in files if reach.done.get(file, {}).get("digest") != digest(file)]
    wanted = options.names or [m.name for m in MUTATIONS if m.name not in results.done]
    chosen = [m for m in MUTATIONS if m.name in wanted]
    with tempfile.TemporaryDirectory(prefix="yolofleet-mutations-") as temporary:
        if new and chosen:
            probed = [Copy(Path(temporary, f"probed-{job}")) for job in range(options.jobs)]
            for copy in probed:
                for mutation in MUTATIONS:
                    path = find(mutation, copy.folder)
                    assert isinstance(path, Path)
                    add_probe(path, mutation)
            in_parallel(lambda copy, file: reach.add(file, copy.reaches(file)), new, probed)
        copies = [Copy(Path(temporary, f"mutated-{job}")) for job in range(options.jobs)]

        def judge(copy: Copy, mutation: Mutation) -> None:
            known = {file: reach.done[file] for file in files if not reach.done[file]["failed"]}
            tied = {file: k["seconds"] for file, k in known.items() if mutation.name in k["reaches"]}
            then = before.get(mutation.name, {"by": ""})
            first = (then["by"] or then.get("added", "")).partition("::")[0]
            results.add(mutation.name, copy.judge(mutation, tied, Path(first).name))

        in_parallel(judge, chosen, copies)
    lost = []
    for mutation in MUTATIONS:
        now = results.done.get(mutation.name, {"result": "not judged", "by": "", "seconds": 0})
        then = before.get(mutation.name, {}).get("result", "new")
        lost += [mutation.name] if then == "caught" and now["result"] not in ("caught", "not judged") else []
        print(
            f"{mutation.name:<30} before: {then:<12} now: {now['result']:<12} {now['seconds']:>4} s  {now['by']}"
        )
    print(f"caught before and not now: {', '.join(lost) or 'none'}")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
