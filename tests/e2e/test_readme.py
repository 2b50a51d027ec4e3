"""Tables, names and links of README and docs agree with the code. test_page_blocks.py runs their code blocks."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pages import PAGES, README, ROOT, links_of

import yolofleet
from yolofleet.cli.app import APP, INTERRUPTED
from yolofleet.cli.commands import Verbs
from yolofleet.config.words.spellings import SPELLINGS
from yolofleet.support import errors

TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
LONGEST_README, LONGEST_LINE = 160, 160
LONGEST_SENTENCE = 40  # words, between full stops, colons and semicolons
PRIVATE_WORDS = r"\b(keepers?|witness(es)?|lanes|who asks|is said|is spoken of|is looked at|free of charge|cannot do with)\b"
FLAGS_OF_OTHERS = {
    *(
        "--allow-lossy",  # of panlabel
        "--save-media",  # of datum
        *("--repo-type", "--local-dir"),  # of hf
        *("--nnodes", "--node_rank", "--nproc_per_node", "--master_addr", "--master_port", "--use_env"),
        *("--log-dir", "--standalone", "--rdzv-backend", "--max-restarts"),
    ),  # torchrun
    *("--requeue", "--no-kill", "--kill-on-bad-exit", "--wait", "--start", "--cpus-per-task"),  # SLURM
    *("--ipc", "--shm-size", "--gpus", "--pid", "--build-arg"),  # docker, py-spy
    *("--zone", "--list-all", "--add-source"),  # firewall-cmd
    *("--eval", "--syncBN", "--amp", "--use_vdl"),  # of the other trainers
    "--directory",  # python -m http.server
    *("--only-binary", "--python-platform", "--python-version"),  # uv
    "--invalid",  # an example
}


def known_flags() -> set[str]:
    found = {"--version", "--help", *(flag for table in SPELLINGS.values() for flag in table)}
    waiting = [APP]
    while waiting:
        command = waiting.pop()
        if isinstance(command, Verbs):
            waiting += [command.get_command(None, name) for name in command.members]  # type: ignore[misc, arg-type]
        else:
            found |= {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    return found


def test_every_flag_that_is_named_exists() -> None:
    known = known_flags()
    for page in PAGES:
        if page.parent.name == "benchmarks":  # flags of the benchmarks' own
            continue
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        if page.parent.name == "coming-from":  # the first column quotes another trainer
            text = re.sub(r"^\| .*? \| ", "| ", text, flags=re.MULTILINE)
        for flag in re.findall(r"`[^`\n]*`", text):
            for spelled in re.findall(r"(?<![\w-])--[a-z][\w-]*", flag):
                if spelled not in FLAGS_OF_OTHERS:
                    assert spelled.replace("_", "-") in known, f"{page.name}: {spelled}"


# -- what is said agrees with the code -----------------------------------------------------------------------------


def section(page: Path, heading: str) -> str:
    text = page.read_text(encoding="utf-8")
    assert f"\n{heading}\n" in text, f"{page.name} has no {heading}"
    level = heading.split()[0]
    return re.split(rf"\n#{{1,{len(level)}}} ", text.split(f"\n{heading}\n")[1])[0]


def rows_of(text: str) -> list[list[str]]:
    """Cells of a table without its head."""
    rows = [line.strip().strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_pages_have_the_tables_of_the_settings() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "settings_tables.py"))
    for name, table in made["PAGES"].items():
        expected = made["page"](name, table)
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == expected, (
            "run: python docs/settings_tables.py"
        )


def test_exit_codes_are_those_of_the_errors() -> None:
    said = {int(row[0]) for row in rows_of(section(TROUBLESHOOTING, "## Exit codes"))}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert said == {0, INTERRUPTED, *(kind.exit_code for kind in kinds)}  # type: ignore[attr-defined]


def test_the_readme_is_short_and_names_every_verb() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_README
    assert not [line for line in text.splitlines() if len(line) > LONGEST_LINE]
    assert not [verb for verb in APP.members if f"yolofleet {verb}" not in text]


def test_the_tree_names_every_package_with_its_first_line() -> None:
    tree = section(ROOT / "docs" / "architecture.md", "## The tree").split("```text\n")[1].split("```")[0]
    folder = Path(yolofleet.__file__).parent
    parents, named = {2: folder}, {}  # indent of a line -> the folder that it lies in
    for line in tree.strip().splitlines()[1:]:
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        path = parents[indent] / name
        named[path] = line.split(maxsplit=1)[1]
        parents[indent + 2] = path
    modules = {
        p.parent if p.name == "__init__.py" else p
        for p in [*folder.glob("*.py"), *folder.rglob("__init__.py")]
    }
    assert named.keys() == modules - {folder, folder / "__main__.py"}
    for path, text in named.items():
        source = (path / "__init__.py" if path.is_dir() else path).read_text(encoding="utf-8")
        assert (ast.get_docstring(ast.parse(source)) or "").splitlines()[0].replace("``", "") == text, path


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_a_file_that_a_picture_names_exists(picture: Path) -> None:
    modules = [f"/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "src").rglob("*.py")]
    for name in re.findall(r"[\w/]+\.py", picture.read_text(encoding="utf-8")):
        assert sum(module.endswith(f"/{name}") for module in modules) == 1, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in links_of(page):
        target, _, anchor = link.partition("#")
        if "://" in link:
            parts = urlsplit(link)
            assert parts.scheme == "https" and re.fullmatch(r"([\w-]+\.)+[a-z]{2,}", parts.netloc), link
            continue
        there = page.parent / target if target else page
        assert there.exists(), link
        assert not anchor or anchor in anchors_of(there.resolve()), link
    for name in re.findall(r"`((?:tests|benchmarks|src|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    package = ROOT / "src" / "yolofleet"
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
        if (package / name.split("/")[0]).is_dir():
            assert (package / name).exists(), name


def sentences_of(page: Path) -> list[str]:
    """Return the sentences of paragraphs and list items, with ``code`` for each piece of code and without links' targets."""
    text = re.sub(
        r"^ *```.*?^ *```$|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M
    )
    text = re.sub(r"^(\||#).*$", "", text, flags=re.M)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    paragraphs = re.split(r"\n\s*\n|\n *(?:[-*]|\d+\.) ", text)
    return [one for paragraph in paragraphs for one in re.split(r"(?<=[.!?:;])[)*\"]*\s+", paragraph)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sentences_are_short_and_have_no_private_words(page: Path) -> None:
    for sentence in sentences_of(page):
        assert len(sentence.split()) <= LONGEST_SENTENCE, sentence
        assert not re.search(PRIVATE_WORDS, sentence, re.I), sentence
