"""The site of `make docs`: it builds without a warning, its links lead somewhere, and it fetches nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("script", "img", "link", "iframe"):
            self.loaded += [values[name] for name in ("src", "href") if name in values]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs the extra: docs")
    pytest.importorskip("mkdocstrings_handlers.python", reason="needs the extra: docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 60
    lost = []
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(unquote(link))
            if re.match(r"[a-z]+:", target) or (path.name == "404.html"):
                continue
            there = (path.parent / target).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            if not there.exists() or (
                anchor and there in pages and anchor not in pages[there].anchors | {"__top"}
            ):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert not lost, "\n".join(lost)


def test_the_site_loads_nothing_from_other_servers(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not [link for link in Page(path).loaded if re.match(r"(https?:)?//", link)], path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(.?(https?:)?//", path.read_text(encoding="utf-8")), path


def test_the_references_are_made_from_the_code(site: Path) -> None:
    commands = (site / "reference" / "commands" / "index.html").read_text(encoding="utf-8")
    python = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert "--micro-batches-per-pass" in commands and "yolofleet fleet attach" in commands
    assert "load_model" in python and "TrainingRecipe" in python
