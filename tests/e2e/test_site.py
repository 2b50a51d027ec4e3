"""The site of `make docs`: it builds without a warning, its links lead somewhere, and it fetches nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
from browser import DEADLINE_S, browser, missing

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
        [
            sys.executable,
            *("-m", "mkdocs", "build", "--strict", "--config-file", "docs/site/mkdocs.yml"),
            "--site-dir",
            folder,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 35
    lost = []
    for path, page in pages.items():
        for link in page.links + page.loaded:
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


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine; yield the address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_search_of_the_site_finds_pages_without_another_server(site: Path, tmp_path: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = {entry["title"] for entry in index["docs"]}
    assert {"Train on your own data", "Spot machines", "Unequal devices"} <= titles
    if reason := missing():
        pytest.skip(reason)
    with served(site) as address, browser(tmp_path) as session:
        session.ask("/url", {"url": f"{address}/?q=spot+machines"})  # the page searches for these words
        deadline = time.monotonic() + DEADLINE_S
        found: list[str] = []
        while not found and time.monotonic() < deadline:
            found = session.run(
                "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
            )
            time.sleep(0.2)
        assert any("/failures/" in link for link in found), found
        assert not [message for message in session.messages() if "favicon" not in message]


def test_the_references_are_made_from_the_code(site: Path) -> None:
    commands = (site / "reference" / "commands" / "index.html").read_text(encoding="utf-8")
    python = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert "--micro-batches-per-pass" in commands and "yolofleet fleet attach" in commands
    assert "load_model" in python and "TrainingRecipe" in python
