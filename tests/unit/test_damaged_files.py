"""Every reader of files that somebody else made, with every kind of damage: one short error of its type, or what it could read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import cv2
import pytest
from corpus import Corpus
from damage import JUNK, READERS, SPECIAL, Reader, changed
from hostile import HOSTILE

from yolofleet.data.images.header import header_of_file
from yolofleet.support.errors import YolofleetError

MOST_CHARACTERS = 3000
pytestmark = pytest.mark.timeout(120)  # a reader that opens a pipe waits for ever
EVERY = pytest.mark.parametrize("name", READERS)
SECONDS = ("torch", "torch of one stream", "Paddle weights")  # for all kinds of damage


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    yield Corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path_factory.mktemp("cache")))


def refusal(reader: Reader, path: Path) -> str:
    """Read ``path``; return the refusal, or '' if it could be read. Any other error fails the test."""
    try:
        found = reader.read(path)
    except reader.error as problem:
        text = problem.render() if isinstance(problem, YolofleetError) else str(problem)
        assert text and len(text) < MOST_CHARACTERS + len(str(path)) * 6, text
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text), ascii(text)
        return text
    return str(found) if reader.drops else ""


@EVERY
def test_a_good_file_is_read(corpus: Corpus, tmp_path: Path, name: str) -> None:
    reader = READERS[name]
    reader.read(reader.copy(corpus, tmp_path))


@pytest.mark.skipif(os.name != "posix", reason="named pipes and devices")
@pytest.mark.parametrize("kind", SPECIAL)
@EVERY
def test_what_is_no_file_is_refused_at_once(corpus: Corpus, tmp_path: Path, name: str, kind: str) -> None:
    if (name, kind) == ("images of a data set", "folder"):
        pytest.skip("a folder is searched for images, whatever its name")
    reader, (make, word) = READERS[name], SPECIAL[kind]
    path = reader.copy(corpus, tmp_path)
    path.unlink()
    make(path)
    said = refusal(reader, path)
    assert said and (word in said or reader.looks)


@EVERY
def test_bytes_of_another_kind_of_file_are_refused(corpus: Corpus, tmp_path: Path, name: str) -> None:
    reader = READERS[name]
    path = reader.copy(corpus, tmp_path)
    for kind, content in JUNK.items():
        path.write_bytes(content)
        assert refusal(reader, path) or not reader.junk, kind


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *((name, 4 if name in SECONDS else 1) for name in READERS),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in SECONDS),
    ],
)
def test_a_damaged_file_is_refused_or_read(corpus: Corpus, tmp_path: Path, name: str, every: int) -> None:
    reader = READERS[name]
    path = reader.copy(corpus, tmp_path)
    for kind, content in islice(changed(path.read_bytes()), 0, None, every):
        path.write_bytes(content)
        assert refusal(reader, path) or not reader.strict, kind


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [pytest.param(name, *row, id=f"{name}-{row[1]}") for name, rows in HOSTILE.items() for row in rows],
)
def test_hostile_content_is_refused_before_it_is_decoded(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, word: str
) -> None:
    reader = READERS[name]
    path = reader.copy(corpus, tmp_path)
    path.write_bytes(content)
    monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("it was decoded"))
    assert word in refusal(reader, path)
    if "claims" in word:  # an index, which decodes nothing, finds the same
        header = header_of_file(str(path))
        assert header is not None and header.problem
