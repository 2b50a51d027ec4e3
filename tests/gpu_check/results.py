"""The results of ``make test-gpu STAGES=all``: kept as JSON between calls, and shown as a page of Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from gpu_check import stages as selftest_stages
from gpu_check.speed import FLOORS
from yolofleet.storage.atomic import write_json, write_text
from yolofleet.storage.foreign import read_foreign_text
from yolofleet.support.errors import ConfigError
from yolofleet.support.terminal import duration

MOST_BYTES = 16 << 20  # of results
Result = Literal["passed", "FAILED", "CUT"]


@dataclass(frozen=True)
class Record:
    """The result of a stage.

    Attributes:
        text: what was found, or why it failed. missed: goals that were missed; they are no failure.
        log: file with all output, relative to the folder of the results.
    """

    name: str
    group: str
    what: str
    result: Result
    seconds: float
    text: str
    log: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    missed: Sequence[str] = ()


@dataclass
class Results:
    """All results in a folder.

    Attributes:
        facts: of the machine; results of other machines or versions must not be mixed.
        left_out: reasons by the name of a stage.
    """

    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.file, self.page = self.folder / "results.json", self.folder / "results.md"

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read what an earlier call has written; nothing if there is no file.

        Raises:
            ConfigError: the file is not one of these results.
        """
        results = cls(folder)
        try:
            text = read_foreign_text(results.file, limit_bytes=MOST_BYTES)
        except FileNotFoundError:
            return results
        try:
            stored = json.loads(text)
            results.facts = dict(stored["machine"])
            names = {item.name for item in fields(Record)}
            for row in stored["stages"]:
                record = Record(**{name: value for name, value in row.items() if name in names})
                results.records[record.name] = record
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigError(
                f"{results.file} has no results of `make test-gpu STAGES=all`",
                hint="another --out FOLDER",
            ) from None
        return results

    def write(self) -> None:
        """Write results.json and results.md, each atomically.

        Raises:
            StorageError: the disk refused.
        """
        order = [stage.name for stage in selftest_stages.STAGES]
        self.records = dict(
            sorted(self.records.items(), key=lambda item: order.index(item[0]) if item[0] in order else -1)
        )
        stages = [asdict(record) for record in self.records.values()]
        write_json(self.file, {"machine": self.facts, "stages": stages, "left_out": self.left_out})
        write_text(self.page, markdown(self))


def markdown(results: Results) -> str:
    """Return the results as a page of Markdown tables."""
    records = list(results.records.values())
    lines = ["# Selftest", ""]
    lines += [f"- {name}: {value}" for name, value in results.facts.items()]
    lines += ["", *table(("stage", "what", "result", "seconds", "found"), [
        (r.name, r.what, r.result, f"{r.seconds:.0f}", r.text if r.result == "passed" else f"{r.text} ({r.log})")
        for r in records
    ])]  # fmt: skip
    speeds = [r for r in records if r.result == "passed" and r.figures.get("step_img_s")]
    if speeds:
        sizes = ("network", "devices", "batch", "format", "step img/s", "run img/s")
        columns = (*sizes, *FLOORS, "GiB", "goals missed")
        lines += ["", "## Speed", "", *table(columns, [speed_row(r) for r in speeds])]
        lines += ["", "The goals are estimates. A missed one is no failure."]
    for prefix, title in (("epoch-", "16 images a device"), ("batch512-", "steps of 512 images")):
        fleets = [r for r in speeds if r.name.startswith(prefix)]
        if fleets:
            first = fleets[0].figures
            lines += ["", f"## {first['model']}, {first['img']} px, {title}", ""]
            lines += table(("GPUs", "batch", "memory (GiB)", "COCO train", "COCO val", "speed-up"), [
                scaling_row(r.figures, first) for r in fleets
            ])  # fmt: skip
            lines += ["", "The times of COCO are those of 118,287 and 5,000 images at the measured rates."]
    if results.left_out:
        lines += ["", "## Left out", "", *table(("stage", "why"), list(results.left_out.items()))]
    return "\n".join(lines) + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table of Markdown."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells)]


def speed_row(record: Record) -> tuple[str, ...]:
    f = record.figures
    number_format = f["precision"] + (" exact" if f["reduce"] == "exact" else "")
    shares = [f"{f['ratios'][name]:.2f}" for name in FLOORS]
    rates = (f"{f['step_img_s']:,.0f}", f"{f['run_img_s']:,.0f}")
    size = (f["model"], str(f["devices"]), str(f["batch"]), number_format)
    return *size, *rates, *shares, f"{f['memory_gib']:.1f}", "; ".join(record.missed)


def scaling_row(f: Mapping[str, Any], first: Mapping[str, Any]) -> tuple[str, ...]:
    times = (duration(f["coco_train_s"]), duration(f["coco_val_s"]))
    speed_up = f"{f['run_img_s'] / first['run_img_s'] * first['devices']:.2f}"
    return f"{f['devices']}x", str(f["batch"]), f"{f['memory_gib']:.1f}", *times, speed_up
