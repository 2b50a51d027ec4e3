"""Hooks of mkdocs: pages from outside of docs/, generated references, and links that work in the site.

The pages are written for readers of the repository. In the site, a link to a source file becomes its text, or a link into
the repository if docs/site/mkdocs.yml has a `repo_url`.
"""

from __future__ import annotations

import os
import posixpath
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    ".github/SECURITY.md": "report-a-vulnerability.md",
    ".github/CODE_OF_CONDUCT.md": "conduct.md",
    "CHANGELOG.md": "changes.md",
    "benchmarks/README.md": "benchmarks.md",
}
SOURCE_OF = {page: source for source, page in OUTSIDE.items()}
PYTHON = """# Python interface

`import yolofleet` gives `Model`, `load_model`, `Callback` and `TrainingRecipe`.
[Python interface](../extend.md#python-interface) has examples.

## Models

::: yolofleet.cli.api.Model

::: yolofleet.cli.api.load_model

::: yolofleet.inference.predict.predictor.Predictor

## Results

::: yolofleet.cli.api.TrainResult

::: yolofleet.cli.api.ValResult

::: yolofleet.inference.predict.results.Prediction

::: yolofleet.inference.predict.results.Predictions

## Your own code

::: yolofleet.training.callbacks.Callback

::: yolofleet.families.recipe_class.TrainingRecipe

## Errors

::: yolofleet.support.errors
"""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
LIST_ITEM = re.compile(r"( *)([-*]|\d+\.) ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    commands = runpy.run_path(str(ROOT / "docs" / "command_reference.py"))["markdown"]()
    files.append(File.generated(config, "reference/commands.md", content=commands))
    found = runpy.run_path(str(ROOT / "docs" / "doctor_tables.py"))["markdown"]()
    files.append(File.generated(config, "reference/findings.md", content=found))
    files.append(File.generated(config, "reference/python.md", content=PYTHON))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    source = SOURCE_OF.get(here, f"docs/{here}")
    is_code, lines = False, []
    for line in markdown.splitlines():
        is_code ^= line.lstrip().startswith("```")
        if not is_code:
            line = LINK.sub(lambda found: site_link(found, source, here, files, config.repo_url), line)
            lines += blank_before_list(line, lines)
        lines.append(indented(line) if not is_code else line)
    return "\n".join(lines)


def site_link(found: re.Match[str], source: str, here: str, files: Files, repository: str | None) -> str:
    """Return a link of a page as the site needs it. A link with the name of a file gets the title of its page.

    Args:
        source: path of the page in the repository.
        here: path of the page in the site.
    """
    mark, text, link = found.groups()
    target, _, anchor = link.partition("#")
    if not target or "://" in target or target.startswith("mailto:"):
        return found[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    page = OUTSIDE.get(path, path.removeprefix("docs/"))
    page = f"{page}/README.md" if files.get_file_from_path(f"{page}/README.md") else page
    if (path.startswith("docs/") or path in OUTSIDE) and files.get_file_from_path(page):
        relative = os.path.relpath(page, posixpath.dirname(here) or ".").replace(os.sep, "/")
        if posixpath.basename(text) == posixpath.basename(path) and path.endswith(".md"):
            text = (ROOT / path).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"
    if not (ROOT / path).exists():
        return found[0]  # mkdocs reports it
    return f"[{text}]({repository}/blob/main/{path})" if repository else text


def blank_before_list(line: str, before: list[str]) -> Iterator[Any]:
    """Yield the empty line that Python's Markdown, unlike GitHub's, needs between a paragraph and a list."""
    last = before[-1] if before else ""
    if LIST_ITEM.match(line) and last.strip() and not LIST_ITEM.match(last) and not last.startswith(" "):
        yield ""


def indented(line: str) -> str:
    """Return the line with the four spaces that Python's Markdown, unlike GitHub's, needs before an inner list."""
    item = LIST_ITEM.match(line)
    return f"    {line.lstrip()}" if item and 2 <= len(item[1]) <= 3 else line
