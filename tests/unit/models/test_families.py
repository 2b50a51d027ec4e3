"""The families: shared code reaches them only through the table, and each one's parts exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

import yolofleet
from yolofleet.families.family import Family, WeightsFile, load
from yolofleet.families.table import BUILT_IN, FAMILIES
from yolofleet.families.weights.reader import read_weights
from yolofleet.support.errors import CheckpointError

SOURCE = Path(yolofleet.__file__).resolve().parent
FOLDERS = [SOURCE / "families" / name for name in BUILT_IN if (SOURCE / "families" / name).is_dir()]


def shared_code() -> Iterator[tuple[str, ast.AST]]:
    """Yield each node of the files outside of the families' own folders, with its file."""
    for path in SOURCE.rglob("*.py"):
        if not {*FOLDERS} & {*path.parents} and path.stem not in ("table", "custom", "recipe_class"):
            file = str(path.relative_to(SOURCE))
            yield from ((file, node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def test_shared_code_does_not_ask_for_the_family():
    """Decision 4. A class that cannot be imported cannot be asked for with isinstance, either."""
    inner = [f"yolofleet.families.{folder.name}" for folder in FOLDERS]
    part = re.compile(rf"({'|'.join(FAMILIES)})\.\w+:")
    wrong = []
    for file, node in shared_code():
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            base = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            modules = {*base, *(f"{module}.{name}" for module in base for name in names)}
            wrong += [f"{where} imports {m}" for m in modules if m.startswith(tuple(inner))]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asks = any(getattr(side, "attr", getattr(side, "id", "")) == "family" for side in sides)
            is_lookup = isinstance(node.ops[0], ast.In | ast.NotIn) and "FAMILIES" in ast.dump(sides[-1])
            constants = {side.value for side in sides if isinstance(side, ast.Constant)}
            if (asks and not is_lookup) or constants & FAMILIES.keys():
                wrong.append(f"{where} compares families")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and part.match(node.value):
            wrong.append(f"{where} names a part of a family")
    assert FOLDERS and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_family_names_the_hyperparameters_that_its_loss_reads(folder):
    """Else another family would accept one of them and ignore it."""
    nodes = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    read = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] == "recipe"
    }
    known = {name for family in FAMILIES.values() for name in family.hyperparameters.model_fields}
    assert read & known <= {*FAMILIES[folder.name].own_fields}
    assert read or not any(path.name == "loss.py" for path in folder.iterdir())


def test_every_part_that_a_family_names_exists():
    for family in FAMILIES.values():
        owners: list[Family | WeightsFile] = [family, *family.weights_files]
        for owner in owners:
            values = {field.name: getattr(owner, field.name) for field in fields(owner)}
            texts = {
                "name",
                "kind",
                "pattern",
                "safetensors_use",
                *(k for k in values if k.endswith("recipe")),
            }
            parts = [
                v for k, v in values.items() if v and k not in texts and (isinstance(v, str) or callable(v))
            ]
            assert len(parts) >= (1 if isinstance(owner, WeightsFile) else 3)
            for part in (*parts, *values.get("description_files", {}).values()):
                assert callable(load(part)), (family.name, part)
        assert f"{family.recipe}.yaml" in {file.name for file in SOURCE.glob("families/*/recipes/*.yaml")}
        assert all(suffix.startswith((".", "/")) for file in family.weights_files for suffix in file.suffixes)


def test_of_files_of_one_kind_the_family_that_recognises_its_own_reads_it(monkeypatch, tmp_path):
    file = tmp_path / "other.pth"
    file.write_bytes(b"PK\3\4 ...")
    mine = WeightsFile(
        "torch checkpoint", lambda path, description: "read", recognises=lambda path: path == file
    )
    other = replace(FAMILIES["custom"], name="other", weights_files=(mine,))
    monkeypatch.setitem(FAMILIES, "other", other)
    assert read_weights(file) == "read"
    (tmp_path / "yolov5n.pt").write_bytes(b"PK\3\4 ...")
    with pytest.raises(CheckpointError):  # of YOLOv5's reader, the first
        read_weights(tmp_path / "yolov5n.pt")
