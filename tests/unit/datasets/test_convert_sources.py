"""Objects365, and large JSON read entry by entry."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from coco_files import image, label, write_coco
from label_rows import index_of
from small_data import write_picture

from yolofleet.data.datasets import bigjson
from yolofleet.data.datasets.bigjson import JsonError, read_lists

# Objects365


@pytest.mark.parametrize("layout", ["train/patch8", "images/v1/patch8", "images/train", "train/images"])
@pytest.mark.parametrize("at", ["annotations", "", "train"])
def test_objects365_is_found_however_its_patches_lie(tmp_path, layout, at):
    names = [f"objects365_v1_{number:08d}.jpg" for number in range(3)]
    for number, name in enumerate(names[1:]):  # some images of the real set are missing, too
        write_picture(tmp_path / layout / name, seed=number)
    images = [image(420917 + i, f"images/v1/patch8/{name}") for i, name in enumerate(names)]
    labels = [label(1, 420918, [8, 8, 8, 8], 2, isfake=0, area=64)]
    categories = [(2, "Sneakers"), (1, "Person")]
    write_coco(tmp_path / at / "zhiyuan_objv2_train.json", images, labels, categories)
    index = index_of(tmp_path)
    assert [Path(path).name for path in index.paths] == names[1:]
    assert index.names == ("Person", "Sneakers") and index.class_counts().tolist() == [0, 1]
    assert index.problem_kinds == {"image-missing": 1}


# JSON by entries


def listed(path: Path, *keys: str) -> dict[str, list]:
    found: dict[str, list] = {}
    for key, entry in read_lists(path, keys):
        if key in found:
            found[key].append(entry)
        else:
            assert entry is None
            found[key] = []
    return found


def random_value(draw: random.Random, depth: int = 0):
    kind = draw.randrange(9 if depth < 3 else 7)
    if kind == 7:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 8:
        return {
            draw.choice(['a"', "é", "\\", "ids"]) + str(i): random_value(draw, depth + 1)
            for i in range(draw.randrange(4))
        }
    text = "".join(draw.choice('a"\\é\U0001f600\n/,]}') for _ in range(draw.randrange(20)))
    return (None, True, draw.randrange(-(10**20), 10**20), draw.uniform(-1, 1), text, 1e300, False)[kind]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-le"])
def test_entries_are_those_of_json_loads(tmp_path, monkeypatch, encoding):
    path, draw = tmp_path / "x.json", random.Random(0)
    for round_ in range(60):
        monkeypatch.setattr(bigjson, "BLOCK_BYTES", draw.randrange(1, 40))
        content = {"a": [random_value(draw) for _ in range(draw.randrange(5))], "x": random_value(draw)}
        content |= {"b": [random_value(draw) for _ in range(draw.randrange(3))], "": 3}
        text = json.dumps(content, ensure_ascii=bool(round_ % 2), indent=draw.choice([None, 1]))
        path.write_bytes((draw.choice(["", "\r\n\t "]) + text + draw.choice(["", "\n "])).encode(encoding))
        found = listed(path, "a", "b", "c")
        assert found == {"a": content["a"], "b": content["b"]}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "'{' is missing"),
        ("[]", "'{' is missing"),
        ('{"a": [1', "']' is missing"),
        ('{"a": [1 2]}', "']' is missing (line 1, character 10"),
        ('{"a": [1]', "'}' is missing"),
        ('{"a": [1],}', "(line 1, character 11"),
        ('{"a": [1]} x', "there is text behind"),
        ('{"a": 1}', "'a' is not a list"),
        ('{"a": [],\n"a": []}', "'a' occurs twice (line 2"),
        ('{3: []}', "is not a string"),
        ('{"a" []}', "':' is missing"),
        ('{"a": [{"b": 1,}]}', "line 1"),
        ('{"a": [tru]}', "Expecting value (line 1, character 8"),
        ('{"a": [' + "[" * 100_000, "nested too deeply"),
        ('{"a": [' + "9" * 5000 + "]}", "digits"),
    ],
)  # fmt: skip
def test_what_is_no_json_is_said_with_its_place(tmp_path, text, fault):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(JsonError) as caught:
        listed(path, "a")
    assert fault in str(caught.value)


def test_bytes_that_are_no_text_and_entries_without_end_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    path.write_bytes(b'{"a": ["\xff\xfe"]}')
    with pytest.raises(JsonError, match="not text"):
        listed(path, "a")
    monkeypatch.setattr(bigjson, "MAX_ENTRY_CHARS", 1000)
    monkeypatch.setattr(bigjson, "BLOCK_BYTES", 100)
    path.write_text('{"a": ["' + "x" * 100_000)
    reads = []
    real = bigjson._Text._more  # nothing else shows how often the file is read

    def counted(self, n):
        reads.append(n)
        return real(self, n)

    monkeypatch.setattr(bigjson._Text, "_more", counted)
    with pytest.raises(JsonError, match="Unterminated string"):
        listed(path, "a")
    assert len(reads) < 10  # it did not read all of it, and grew by doubling


@pytest.mark.skipif(sys.platform == "win32", reason="has no getrusage")
def test_a_box_of_a_large_json_takes_little_memory(tmp_path):
    """In a process of its own, whose peak is its own; 30,000 boxes."""
    rng = np.random.default_rng(0)
    path = tmp_path / "large.json"
    boxes = rng.uniform(0, 100, (30_000, 4)).tolist()
    images = [image(i, f"{i}.jpg", 640, 480) for i in range(1000)]
    labels = [label(i, i % 1000, box, area=3.0, segmentation=[box * 5]) for i, box in enumerate(boxes)]
    write_coco(path, images, labels)
    code = (
        "import sys, resource; from yolofleet.data.datasets.cocojson import parse_json;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "table = parse_json(sys.argv[1]); assert len(table.annotation_ids) == 30_000;"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    kib = int(done.stdout) / (1024 if sys.platform == "darwin" else 1)
    assert kib * 1024 < 14e6, "more than 200 bytes a box and 8 MB of buffers"  # json.loads takes 50 MB
