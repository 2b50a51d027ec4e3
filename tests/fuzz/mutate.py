"""Make broken and hostile variants of good files. All draws come from one ``random.Random``, so a case repeats.

The mutations know the structure that they change: bytes, lines and numbers of a text, trees of YAML and JSON, opcodes
of a pickle, members of an archive, headers of safetensors. ``changed_file`` picks them by the kind of a file.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickletools
import random
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from damage import SPECIAL

# A payload that is executed writes ../outside/ran; ../outside/victim.txt must stay as it is. harness.py looks at both.

EDGES = (0, 1, -1, 2, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)  # fmt: skip
NUMBERS = (
    *("0", "-0", "-1", "1", "2", "0.5", "1e-400", "1e400", "-1e400", "1e308", "nan", "-nan", "inf", "-inf", "Infinity"),
    *("999999999999", "2147483648", "-9223372036854775809", "18446744073709551616", "9" * 400, "9" * 5000, "0" * 3000),
    *("0x10", "0b1", "0o7", "1_0", "0.5_0", "1,5", "1e", ".", "-", "+1", "1:1", "1:1:1:1:1:1:1:1:1", "٣", "１", "1e9999999999"),
    *("true", "null", "~", "", "65536", "100000", "3.4028236e38", "4294967296", "-2147483649"),
)  # fmt: skip
WORDS = (
    *("", " ", "\x1b[2J\x1b[1;1H", "\x1b]0;title\x07", "\x9b31m", "\x85", "\u202e", "\u2066x\u2069", "\u2028", "\ufeff", "\x00", "\x7f", "\r", "\b\b\b"),
    *("a" * 254, "a" * 5000, "ü猫🐈", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "İ", "ß" * 100),
    *("../outside/victim.txt", "/dev/zero", "/dev/stdin", "/proc/self/mem", "/proc/self/environ", "~nobody", "~/x", ".", "..", "/", "//x", "-x", "--help"),
    *("$(touch ../outside/ran)", "`touch ../outside/ran`", "; touch ../outside/ran", "| touch ../outside/ran", "%s%s%s%n", "{0}", "{x.__class__}", "${HOME}"),
    *("__class__", "__import__('os').system('touch ../outside/ran')", "eval", "constructor", "None", "True", "nan", "[", "{", "\"", "'", "<!--", "]]>"),
    *("http://127.0.0.1:9/x", "file:///etc/passwd", "data:,x", "rtsp://127.0.0.1:9/x", "concat:a|b", "CON", "a\\b", "a\nb", "a\tb", "*", "?", "[a]", "**/*"),
)  # fmt: skip
YAML_BITS = (
    *("!!bool foo", "!!int ''", "!!float ''", "!!timestamp foo", "!!binary x", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!str 1", "!!null x", "!foo bar"),
    *("!!python/object/apply:os.system ['touch ../outside/ran']", "!!python/name:os.system", "!!python/object/new:os.system [x]", "!!python/tuple [1]"),
    *("&a [*a]", "*missing", "&a {<<: *a}", "{<<: [1, 2]}", "<<: x", "? [1, 2]\n: 3", "{[1]: 2}", "2024-13-45", "0001-01-01 00:00:00 +99:99", "1:1:1:1", "0o9", "=", "<<"),
    *("|\n  text", ">-\n  text", "--- x\n--- y", "%YAML 9.9\n---\n", "'", "\"\\x00\"", "\"\\uD800\"", "\"\\U0010FFFF\"", "@x", "`x`", "\t- x"),
)  # fmt: skip
XML_BITS = (
    '<?xml version="1.0" encoding="evil"?>', '<?xml version="1.0" encoding="hex"?>', '<?xml version="1.0" encoding="zlib_codec"?>',
    '<?xml version="1.0" encoding="utf-16"?>', '<?xml version="1.0" encoding="utf-7"?>', '<?xml version="9"?>', "<![CDATA[x]]>", "&amp;", "&x;", "&#0;", "&#xD800;", "&#27;[2J",
    '<!DOCTYPE a [<!ENTITY x "y">]>', '<!DOCTYPE a SYSTEM "file:///etc/passwd">', "<!-- -- -->", "<?php x ?>", "<object>", "</annotation>", "<bndbox/>",
)  # fmt: skip


# -- bytes ---------------------------------------------------------------------------------------------------


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return ``data`` after one to four changes of bits, lengths or pieces."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change_bytes(rng, out)
    return bytes(out)


def _change_bytes(rng: random.Random, out: bytearray) -> None:
    size = len(out)
    kind = rng.randrange(10)
    at = rng.randrange(size) if size else 0
    if rng.random() < 0.5:
        at = min(at, rng.randrange(256))  # headers lie at the start
    count = rng.choice((1, 2, 4, 8, 64, max(1, size // 4)))
    if kind == 0 and size:
        for _ in range(rng.choice((1, 1, 2, 8))):
            out[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del out[at:]
    elif kind == 2:
        del out[at : at + count]
    elif kind == 3:
        out[at:at] = out[at : at + count]
    elif kind == 4:
        out[at:at] = rng.randbytes(min(count, 4096))
    elif kind in (5, 6) and size:
        width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
        value = rng.choice(EDGES) & (2 ** (8 * width) - 1)
        out[at : at + width] = value.to_bytes(width, order)
    elif kind == 7:
        out[at : at + count] = bytes(len(out[at : at + count]))
    elif kind == 8 and size:
        other = rng.randrange(size)
        first, second = bytes(out[at : at + count]), bytes(out[other : other + count])
        out[at : at + count], out[other : other + count] = second, first
    else:
        out += rng.choice(
            (b"\0" * 4096, b"\xff" * 100, b"PK\x05\x06" + bytes(18), rng.randbytes(100), bytes(out[:1000]))
        )


# -- text ----------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"[-+]?\d[\d.eE+-]*|[^\W\d]\w*")
_NUMBER = re.compile(r"[-+]?\d[\d.eE+-]*")


def mutate_text(rng: random.Random, text: str, bits: tuple[str, ...] = (), *, copies: int = 3000) -> bytes:
    """Return ``text`` after one to three changes of numbers, words or lines, encoded.

    Args:
        bits: pieces of the text's language that may replace a word.
        copies: how often a line may be repeated; each costs a picture's time where lines name pictures.
    """
    for _ in range(rng.choice((1, 1, 2, 3))):
        text = _change_text(rng, text, bits, copies)
    kind = rng.random()
    if kind < 0.9:
        return text.encode("utf-8", "surrogateescape" if kind < 0.85 else "replace")
    if kind < 0.93:
        return text.encode("utf-16", "replace")
    if kind < 0.96:
        return text.encode("latin-1", "replace")
    return mutate_bytes(rng, text.encode("utf-8", "replace"))


def _change_text(rng: random.Random, text: str, bits: tuple[str, ...], copies: int) -> str:
    kind = rng.randrange(12)
    if kind < 4:
        return _replace_token(rng, text, _NUMBER, NUMBERS)
    if kind < 6:
        return _replace_token(rng, text, _TOKEN, WORDS)
    if kind < 8:
        return _replace_token(rng, text, _TOKEN, bits or WORDS)
    lines = text.splitlines(keepends=True) or [""]
    at = rng.randrange(len(lines))
    if kind == 8:
        del lines[at]
    elif kind == 9:
        lines[at:at] = [lines[at]] * min(
            rng.choice((1, 2, 50, copies)), 1 + 2_000_000 // (len(lines[at]) + 1)
        )
    elif kind == 10:
        other = rng.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    else:
        deep = rng.choice((40, 500, 5000))
        piece = rng.choice(("[", "{", "{a: ", "- ", "(", "<a>", '{"a":', "[[", "  ", ",", "#", "\x00"))
        lines[at] = rng.choice(
            (piece * deep + "\n", lines[at].rstrip("\n") + piece * deep + "\n", "\ufeff" + lines[at])
        )
    return "".join(lines)


def _replace_token(rng: random.Random, text: str, pattern: re.Pattern[str], by: tuple[str, ...]) -> str:
    found = list(pattern.finditer(text[:200_000]))
    if not found:
        return text + rng.choice(by)
    match = rng.choice(found)
    return text[: match.start()] + rng.choice(by) + text[match.end() :]


# -- trees of values -----------------------------------------------------------------------------------------


def strange_value(rng: random.Random) -> Any:
    """Return a value that a schema is unlikely to expect."""
    return rng.choice(
        (
            lambda: None,
            lambda: rng.choice((True, False)),
            lambda: rng.choice(EDGES),
            lambda: rng.choice((float("nan"), float("inf"), -float("inf"), 1e308, -0.0, 5e-324, 0.5)),
            lambda: 10 ** rng.choice((20, 100, 400)),
            lambda: rng.choice(WORDS),
            lambda: [],
            lambda: {},
            lambda: [strange_value(rng) for _ in range(3)],
            lambda: {rng.choice(WORDS): 1},
            lambda: "a" * rng.choice((1000, 100_000)),
            lambda: nested(rng.choice((30, 300))),
            lambda: [2**39] * 400,
        )
    )()


def nested(depth: int) -> Any:
    """Return a list of lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def mutate_tree(rng: random.Random, value: Any) -> Any:
    """Return a copy of lists, mappings and scalars with one to three changed places."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(root))
        holder, key = rng.choice(places)
        if rng.random() < 0.5 and len(places) > 1:  # the whole is one of its places
            holder, key = rng.choice(places[1:])
        _change_place(rng, holder, key)
    return root[0]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, inner in list(items)[:200]:
            yield holder, key
            if isinstance(inner, dict | list):
                waiting.append(inner)


def _change_place(rng: random.Random, holder: Any, key: Any) -> None:
    old = holder[key]
    kind = rng.randrange(8)
    if kind == 0 and isinstance(holder, dict):
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(WORDS)] = holder.pop(key)
    elif kind == 2 and isinstance(old, list) and old:
        holder[key] = old * rng.choice((2, 10, 300))
    elif kind == 3 and isinstance(old, list) and old:
        holder[key] = old[: rng.randrange(len(old))]
    elif kind == 4:
        holder[key] = [old] if rng.random() < 0.5 else {"a": old}
    elif kind == 5 and isinstance(old, int | float) and not isinstance(old, bool) and abs(old) < 1e300:
        holder[key] = rng.choice((-old, old + 1, old * 1000, float(old), str(old), rng.choice(EDGES)))
    else:
        holder[key] = strange_value(rng)


def json_text(rng: random.Random, value: Any) -> bytes:
    """Return a tree as JSON, sometimes with what JSON does not have (NaN, digits without end, deep nesting)."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=rng.random() < 0.5)
    except RecursionError:  # nested too deeply for the writer
        text = "[" * 5000
    if rng.random() < 0.3:
        return mutate_text(rng, text)
    return text.encode("utf-8", "surrogatepass")


YAML_BOMBS = (
    "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "m0: &m0 {a: 1, b: 2}\n" + "".join(f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 10)}]}}\n" for i in range(1, 9)),
    "nc: 1" + ":59" * 100_000 + "\n",
    "nc: " + "9" * 100_000 + "\n",
    "? " * 3000 + "\n",
    "a: " + "[" * 20_000 + "\n",
    "&a a: *a\n",
    "- " * 5000,
    "a: !!binary " + "A" * 100_000 + "\n",
    "a: '" + "\n" * 200_000 + "'\n",
    "".join(f"k{i}: {i}\n" for i in range(60_000)),
)  # fmt: skip


def mutate_yaml(rng: random.Random, text: str) -> bytes:
    """Return YAML after a change of its text or tree, with a strange tag, or a small bomb."""
    kind = rng.random()
    if kind < 0.12:
        return (rng.choice(("", text)) + rng.choice(YAML_BOMBS)).encode()
    if kind < 0.22:
        return _replace_token(rng, text, _TOKEN, YAML_BITS[:10]).encode()
    if kind < 0.5:
        tree = mutate_tree(rng, yaml.safe_load(text))
        try:
            return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
        except RecursionError:  # nested too deeply for the writer
            pass
    return mutate_text(rng, text, YAML_BITS)


# -- pickles -------------------------------------------------------------------------------------------------

_COMMAND = b"touch ../outside/ran"
CALL = b"cposix\nsystem\nX" + struct.pack("<I", len(_COMMAND)) + _COMMAND + b"\x85R"  # os.system(_COMMAND)


def mutate_pickle(rng: random.Random, data: bytes) -> bytes:
    """Return a pickle with opcodes dropped, repeated, swapped, called or replaced by memory-hungry ones."""
    try:
        marks = [at for _, _, at in pickletools.genops(data) if at is not None]
    except Exception:
        return mutate_bytes(rng, data)
    parts = [data[a:b] for a, b in zip(marks, [*marks[1:], len(data)], strict=True)]
    at = rng.randrange(len(parts))
    kind = rng.randrange(9)
    if kind == 0:
        del parts[at]
    elif kind == 1:
        parts[at:at] = [parts[at]] * min(rng.choice((1, 10, 5000)), 1 + 20_000_000 // len(parts[at]))
    elif kind == 2:
        other = rng.randrange(len(parts))
        parts[at], parts[other] = parts[other], parts[at]
    elif kind == 3:
        parts[at:at] = [CALL + b"0"]  # called, and its result dropped
    elif kind == 4:
        parts[-1:] = [CALL, b"."]
    elif kind == 5:
        parts[at:at] = [
            rng.choice((b"\x8f", b"]", b"}", b")", b"N", b"(", b"K\x01", b"]q\xff"))
            * rng.choice((100, 100_000))
        ]
    elif kind == 6:
        number = rng.choice(EDGES) & 0xFFFFFFFF
        parts[at] = rng.choice((b"X", b"B", b"\x8b", b"T", b"\x8d", b"\x8e", b"j", b"r")) + struct.pack(
            "<I", number
        )
    elif kind == 7:
        parts[at:at] = [b"I" + rng.choice(NUMBERS).encode() + b"\n"]
    else:
        parts[at] = rng.choice(parts) if rng.random() < 0.5 else mutate_bytes(rng, parts[at])
    return b"".join(parts)


# -- archives ------------------------------------------------------------------------------------------------


def members(data: bytes) -> list[tuple[str, bytes]]:
    """Return names and contents of a zip archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def zipped(parts: list[tuple[str, bytes]], *, packed: bool = False) -> bytes:
    """Return a zip archive; a name may occur twice."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, content in parts:
            info = zipfile.ZipInfo(name.replace("\0", "0") or "x")
            info.compress_type = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
            info.external_attr = 0o600 << 16
            try:
                archive.writestr(info, content)
            except (ValueError, UnicodeError, struct.error, OverflowError):
                continue
    return out.getvalue()


def mutate_zip(rng: random.Random, data: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    """Return an archive with changed members, names or bytes.

    Args:
        change: gets name and content of the member that is picked, and returns other content.
    """
    kind = rng.randrange(8)
    if kind == 0:
        return mutate_bytes(rng, data)
    parts = members(data)
    at = rng.randrange(len(parts))
    name, content = parts[at]
    if kind == 1:
        del parts[at]
    elif kind == 2:
        parts.insert(rng.randrange(len(parts)), (name, change(name, content)))
    elif kind == 3:
        folder = name.split("/")[0]
        odd = rng.choice(
            ("../../outside/x", "/x", name.upper(), name + "/", f"{folder}/{rng.choice(WORDS)}", name * 40)
        )
        parts[at] = (odd.encode("utf-8", "replace").decode(), content)
    elif kind == 4:
        odd = rng.randbytes(20) if rng.random() < 0.5 else bytes(2 << 20)
        parts.append((f"{name.split('/')[0]}/{rng.choice(('x', 'code/x.PY', 'data/999', 'extra/x'))}", odd))
    else:
        parts[at] = (name, change(name, content))
    return zipped(parts, packed=rng.random() < 0.3)


# -- safetensors ---------------------------------------------------------------------------------------------


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Return a file with a changed JSON header, lengths or bytes; a digest in it then is wrong."""
    size = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + size], data[8 + size :]
    kind = rng.randrange(4)
    if kind == 0:
        return mutate_bytes(rng, data)
    if kind == 1:
        header = mutate_text(rng, header.decode())
    else:
        tree = json.loads(header)
        if rng.random() < 0.2:
            tree["__metadata__"] = rng.choice(
                (5, True, None, [], "x", {"a": 1}, {"sha256": 5}, {"sha256": "x"})
            )
        else:
            tree = mutate_tree(rng, tree)
        header = json.dumps(tree).encode()
    length = len(header) if rng.random() < 0.9 else rng.choice(EDGES) & (2**64 - 1)
    return length.to_bytes(8, "little") + header + rest


# -- any file ------------------------------------------------------------------------------------------------

BITS = {
    ".xml": (*XML_BITS, *WORDS),
    ".py": (
        *('torch.save([1], "../outside/ran")', 'torch.from_file("../outside/ran", True, 4)', "while True:\n    pass", "ops.aten.save"),
        *("torch.zeros([1000000, 1000000])", "torch.repeat_interleave(input, 1000000000)", "import os", "torch.mul", "raise"),
    ),
    **dict.fromkeys((".txt", ".csv", ".jsonl", ".log", ".cfg", ".param"), WORDS),
}  # fmt: skip


def changed_file(rng: random.Random, name: str, data: bytes) -> bytes:
    """Return other content for the file ``name``, mostly changed in the language of its kind, else in its bytes."""
    suffix = Path(name).suffix
    if data[:2] == b"PK":
        return mutate_zip(rng, data, partial(changed_file, rng))
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    if suffix in BITS:
        return mutate_text(rng, data.decode(), BITS[suffix])
    if suffix == ".yaml":
        return mutate_yaml(rng, data.decode())
    if suffix == ".json":
        return json_text(rng, mutate_tree(rng, json.loads(data)))
    if suffix == ".safetensors":
        return mutate_safetensors(rng, data)
    return mutate_pickle(rng, data) if data[:1] == b"\x80" else mutate_bytes(rng, data)


# -- the file system -----------------------------------------------------------------------------------------


def _link(target: str, path: Path) -> None:
    path.symlink_to(target)


def _unreadable(path: Path) -> None:
    path.touch(0)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _outside(path: Path) -> None:
    path.symlink_to((path.parent / "..").resolve() / "outside" / "victim.txt")


IN_PLACE: tuple[Callable[[Path], object], ...] = (
    *(make for name, (make, _) in SPECIAL.items() if name != "link to a link"), _unreadable, _sparse, _outside,
    *(partial(_link, name) for name in ("/proc/self/mem", "/dev/ptmx", "/dev/null")),
)  # fmt: skip


def special(rng: random.Random, path: Path) -> None:
    """Put something that is no usual file in the place of the file ``path``."""
    path.unlink(missing_ok=True)
    rng.choice(IN_PLACE)(path)


ODD_NAMES = (
    *(b"a" * 250, b"\x1b[31mred\x1b[0m", b"bell\x07", b"\xc2\x9b31m", "\u202egpj".encode(), b"new\nline", b"tab\tname", b"\xff\xfe\xfa", b"-x", b"--help"),
    *(b"with space", b"quote'\"", b"$(touch x)", b"%s", b"{0}", "ü猫".encode(), b"a.b.c", b"[x]", b"*", b"#x", b"a\\b", b"\xed\xa0\x80", b" ", b"~", b"CON"),
)  # fmt: skip


def odd_name(rng: random.Random, suffix: str) -> str:
    """Return a file name that screens, shells, lists or systems could trip over."""
    name = rng.choice(ODD_NAMES)
    return os.fsdecode(name[: 255 - len(suffix)] + suffix.encode())
