"""The pages of the documentation and their code blocks: ``python tests/pages.py`` lists how each block is tested.

A block of commands or code needs a comment in the line before it:

- ``<!-- test -->``: tests/e2e/test_page_blocks.py runs it, in the order of its page, with smaller settings.
- ``<!-- test: FILE -->``: this test reads the block from the page and runs it.
- ``<!-- not run: REASON -->``: no test runs it. Its yolofleet commands are parsed all the same.

Blocks of the language ``text`` are outputs and need no comment.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [
    *(README, ROOT / "CONTRIBUTING.md", ROOT / ".github" / "SECURITY.md", ROOT / "CHANGELOG.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
LANGUAGES = ("sh", "python", "yaml", "text")
OF_A_PAGE = {  # a reason for all blocks of a page that have no comment
    "benchmarks/README.md": "measurements of minutes to hours, some of them on other machines",
    "CONTRIBUTING.md": "these commands run the tests",
}
FENCE = re.compile(r"( *)```(\w*)$")
COMMENT = re.compile(r" *<!-- (test|not run)(?:: (.+))? -->$")


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        line: of its first fence, from 1.
        kind: "test", "not run" or "" (no comment).
        remark: the test that runs it, or the reason why none does.
    """

    page: Path
    line: int
    language: str
    text: str
    kind: str = ""
    remark: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.line}"

    @property
    def name(self) -> str:
        return self.page.relative_to(ROOT).as_posix()

    @property
    def is_run_here(self) -> bool:
        """Whether tests/e2e/test_page_blocks.py runs it."""
        return self.kind == "test" and not self.remark

    def commands(self) -> list[list[str]]:
        """Return the words of each command; environment settings in front and comments are left out."""
        found = []
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                found.append(words)
        return found


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page.

    Raises:
        AssertionError: a block is indented instead of fenced, is not closed, or has an unknown language.
    """
    name, found = page.relative_to(ROOT).as_posix(), []
    lines = page.read_text(encoding="utf-8").splitlines()
    start, margin, language = 0, "", ""
    for number, line in enumerate(lines, 1):
        fence = FENCE.fullmatch(line)
        if not start:
            is_code = line.startswith("    ") and number > 1 and not lines[number - 2].strip()
            assert not is_code or re.match(r" +([-*]|\d+\.) ", line), f"{name}:{number}: use a fence"
        if fence and not start:
            start, margin, language = number, fence[1], fence[2]
            assert language in LANGUAGES, f"{name}:{number}: the language is {language!r}, not of {LANGUAGES}"
        elif fence:
            comment = COMMENT.fullmatch(lines[start - 2])
            kind, remark = (comment[1], comment[2] or "") if comment else ("", "")
            if not kind and language != "text" and name in OF_A_PAGE:
                kind, remark = "not run", OF_A_PAGE[name]
            text = "\n".join(one.removeprefix(margin) for one in lines[start : number - 1])
            found.append(Block(page, start, language, text, kind, remark))
            start = 0
    assert not start, f"{name}:{start}: the block is not closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def links_of(page: Path) -> list[str]:
    """Return the targets of the links and pictures of a page, outside of code."""
    text = re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def how(block: Block) -> str:
    """Return how the block is tested, in words."""
    if block.language == "text":
        return "output"
    if block.kind == "test":
        return f"run by {block.remark or 'tests/e2e/test_page_blocks.py'}"
    return f"not run: {block.remark}" if block.kind else "NOT MARKED"


if __name__ == "__main__":
    for block in BLOCKS:
        print(f"{block!s:30}  {block.language:7} {how(block)}")
    print(Counter(how(block).split(":")[0] for block in BLOCKS))
    external = sorted({link for page in PAGES for link in links_of(page) if "://" in link})
    print(f"{len(external)} links to other sites:", *external, sep="\n")
