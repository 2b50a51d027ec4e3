"""Hints to install packages: what they name, and that there is one function for them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import yolofleet
from yolofleet.config.loggers import PACKAGES
from yolofleet.support.errors import EXTRAS, install_hint

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is in Python 3.11 and newer")
def test_the_hints_install_what_the_extras_do():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: tuple(needed) for name, needed in project["optional-dependencies"].items()}
    assert extras == {**EXTRAS, **{name: extras[name] for name in ("docs", "notebook", "dev")}}
    assert set(PACKAGES) <= set(EXTRAS)


def test_a_hint_names_packages_and_not_yolofleet():
    assert install_hint("board") == 'pip install "starlette>=0.40" "uvicorn>=0.30"'
    assert not any("yolofleet" in install_hint(extra) for extra in EXTRAS)


OTHERS = {"__pycache__", "node_modules"}


def test_no_text_tells_users_to_install_yolofleet_by_its_name():
    """The name on PyPI does not belong to this project."""
    source = Path(yolofleet.__file__).parent
    texts = [path for ending in ("*.py", "*.yaml") for path in source.rglob(ending)]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")]
    by_name = re.compile(r"""pip install[^\n`;#&|]*[ \t'"]yolofleet\b""")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in [*texts, *(page for page in pages if page.is_file() and not OTHERS & {*page.parts})]
        for match in by_name.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)
