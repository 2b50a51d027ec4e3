"""Put a fault back that was corrected once, and count the cases until the fuzzer finds it.

python tests/fuzz/put_back.py terminal-codes --seed 1
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import harness
import run  # first: it sets the number of threads and the paths
import yaml
from corpus import Corpus


def terminal_codes() -> None:
    """No text is cleaned before it reaches the screen."""
    import yolofleet.text

    yolofleet.text._UNSAFE = re.compile("(?!)")


def named_pipes() -> None:
    """Any file is opened and read, also one that never ends or never begins."""
    from yolofleet.files import foreign

    def careless(path: str, *_: object, **__: object) -> tuple[int, int]:
        handle = os.open(path, os.O_RDONLY)
        return handle, os.fstat(handle).st_size

    foreign.open_descriptor = careless
    harness.MOST_S = 5.0  # it would wait for ever


def yaml_tags() -> None:
    """`!!bool foo`, `!!int ''` and the like in a description are errors inside of the YAML library."""
    from yolofleet.config.yaml_lines import Located
    from yolofleet.models import description

    def careless(path: Path, **_: object) -> dict[str, Located]:
        values = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
        return {key: Located(value, 1) for key, value in values.items()} if isinstance(values, dict) else {}

    description.read_yaml = careless
    harness.MOST_S = 5.0  # its bombs go off, too


FAULTS: dict[
    str, tuple[Callable[[], None], str, str]
] = {  # what puts it back, the reader, words of the report
    "terminal-codes": (terminal_codes, "names-of-files", "control character"),
    "named-pipes": (named_pipes, "yolo-labels", "it took more than"),
    "yaml-tags": (
        yaml_tags,
        "network-yaml",
        "KeyError: 'foo'|IndexError|groupdict|invalid literal|could not convert",
    ),
}


def search(name: str, seed: int, most: int, corpus_folder: Path | None = None) -> int:
    """Return after how many cases of its reader the fault was found; 0 = it was not."""
    put_back, reader, words = FAULTS[name]
    scratch = run.new_scratch()
    try:
        run.warm_up()
        corpus = Corpus(corpus_folder or scratch / "corpus")
        run.apart(lambda: [corpus.get(name) for name in ("set", "best.safetensors", "tiny.weights")])
        put_back()
        numbers = (number for number in count() if run.reader_of(number) == reader)
        for done, result in enumerate(run.run_cases(numbers, seed, corpus, scratch), 1):
            if any(re.search(words, fault) for fault in result.faults):
                print(f"{name}: found by case {done} of {reader}: {result.faults[0]}")
                return done
            if done == most:
                break
        return 0
    finally:
        shutil.rmtree(os.fsencode(scratch), ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=list(FAULTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most", type=int, default=300, help="cases of the fault's reader")
    parser.add_argument("--corpus", type=Path, help="folder of good files that is kept")
    given = parser.parse_args()
    sys.exit(0 if search(given.fault, given.seed, given.most, given.corpus) else 1)
