"""Pages that name codes of the doctor or versions agree with the code; manual pages are well formed."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import click
import pytest
import yaml

import yolofleet
from yolofleet.cli.app import APP
from yolofleet.fleet.doctor.findings import kinds
from yolofleet.fleet.doctor.log_rules import RULES
from yolofleet.runs.report.results import columns
from yolofleet.tasks.masks.task import MASKS

ROOT = Path(__file__).resolve().parents[2]


def test_troubleshooting_names_codes_that_exist() -> None:
    codes = {*kinds(), *(rule.code for rule in RULES)}
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [
        line.split(" | ") for line in text.splitlines() if line.startswith("| ") and line.count(" | ") == 2
    ]
    named = {code for row in rows for code in re.findall(r"`([\w-]+)`", row[1])}
    assert len(named) > 30 and not named - codes


def test_every_page_has_a_place_in_the_navigation_of_the_site() -> None:
    named = re.findall(
        r"^ +- (?:[^:\n]+: )?([\w-]+\.md)$", (ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8"), re.M
    )
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= set(named)


def test_every_file_names_the_same_version() -> None:
    version = yolofleet.__version__
    assert f"version: {version}\n" in (ROOT / ".github/CITATION.cff").read_text(encoding="utf-8")
    assert f'version: "{version}"\n' in (ROOT / "packaging/conda" / "recipe.yaml").read_text(encoding="utf-8")
    assert re.search(
        rf"^## {re.escape(version)} \(", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M
    )


def test_the_conda_recipe_has_the_dependencies_of_the_package() -> None:
    renamed = {
        "torch": "pytorch", "opencv-python-headless": "py-opencv", "PyYAML": "pyyaml", "matplotlib": "matplotlib-base",
    }  # fmt: skip
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'"([\w-]+)(>=[^"]+)"', text.split("\ndependencies = [")[1].split("]")[0])
    recipe = yaml.safe_load((ROOT / "packaging/conda" / "recipe.yaml").read_text(encoding="utf-8"))
    python = re.findall(r'^requires-python = "(.*)"', text, re.M)[0]
    expected = [f"python {python}", *(f"{renamed.get(name, name)} {bound}" for name, bound in named)]
    assert recipe["requirements"]["run"] == expected


def test_the_policy_names_the_versions_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest, above = re.findall(r'"torch>=([\d.]+),<2\.(\d+)"', text)[0]
    pythons = re.findall(r"Python :: (3\.\d+)", text)
    policy = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    assert f"| PyTorch | {oldest} to 2.{int(above) - 1} |" in policy
    assert f"| Python | {pythons[0]} to {pythons[-1]} |" in policy


def test_the_references_have_every_verb_and_option() -> None:
    reference = runpy.run_path(str(ROOT / "docs" / "command_reference.py"))
    page = reference["markdown"]()
    assert all(f"\n## yolofleet {verb}\n" in page for verb in APP.members)
    for path, command in reference["commands"]():
        manual = reference["manual"](path, command)
        for parameter in command.params:
            if not getattr(parameter, "hidden", False) and parameter.opts[0].startswith("--"):
                name = parameter.opts[0].removeprefix("--")
                assert name in page and name.replace("-", "\\-") in manual, (path, name)


def test_help_texts_have_room_at_80_columns() -> None:
    for path, command in runpy.run_path(str(ROOT / "docs" / "command_reference.py"))["commands"]():
        text = command.get_help(click.Context(command, info_name=path, terminal_width=80))
        margins = [len(line) - len(line.lstrip()) for line in text.splitlines() if line.strip()]
        assert max(margins) <= 44, path


def test_the_python_reference_has_every_public_name() -> None:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    page = runpy.run_path(str(ROOT / "docs" / "site_pages.py"))["PYTHON"]
    for name in set(yolofleet.__all__) - {"__version__"}:
        assert f"`{name}`" in page, name
    for name in re.findall(r"^::: (\S+)$", page, re.M):
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name


def cells(page: str, heading: str, column: int = 0) -> set[str]:
    """Return the names in a column of the first table after a heading."""
    rows = [
        line
        for line in page.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
        if line.startswith("| `")
    ]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[column])}


def test_the_page_of_the_run_folder_names_every_file_column_key_and_event() -> None:
    page = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")
    recorded = (ROOT / "tests" / "golden" / "folders.txt").read_text(encoding="utf-8")
    recorded = recorded.split("[runs/train/exp]\n")[1].split("\n[")[0]
    files = re.findall(r"^(\S.*)$", recorded, re.M)
    named = cells("\n## Files\n" + page, "Files")
    assert {re.sub(r"(?<=step|ank-)(-?)(\d+|<number>)", r"\1N", name) for name in files} <= named
    here = {
        name.replace("KIND", kind)
        for name in cells(page, "Columns of the table of epochs")
        for kind in ("box", "obj")
    }
    assert here == {*columns(["box", "obj"]), *MASKS.columns}
    results = recorded.split("\nresults.json\n")[1].split("\nweights/")[0]
    assert cells(page, "Keys of the final figures") == {
        key.strip().split(".")[0] for key in results.splitlines()
    }
    written = {
        kind
        for path in (ROOT / "src").rglob("*.py")
        for kind in re.findall(
            r'\b(?:events\.write\(|record_event\(\s*[\w.]+,)\s*"(\w+)"', path.read_text(encoding="utf-8")
        )
    }
    assert cells(page, "Events") == written


@pytest.mark.skipif(not shutil.which("groff"), reason="needs groff")
def test_groff_draws_the_manual_pages_without_a_warning(tmp_path: Path) -> None:
    reference = runpy.run_path(str(ROOT / "docs" / "command_reference.py"))
    pages = [tmp_path / f"{number}.1" for number, _ in enumerate(reference["commands"]())]
    for page, (path, command) in zip(pages, reference["commands"](), strict=True):
        page.write_text(reference["manual"](path, command), encoding="utf-8")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", *pages], capture_output=True, text=True, check=True
    )
    assert not done.stderr and "--epochs" in done.stdout.replace("‐", "-").replace("−", "-")
