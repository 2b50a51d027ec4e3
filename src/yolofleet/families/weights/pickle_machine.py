"""Read a pickle as data: a stack machine for pickle opcodes that calls no code from the file.

A name in the file becomes a :class:`Global`, which cannot be called. An opcode that calls a name either runs one of the
machine's few own functions, which fill plain containers, or makes an inert :class:`PickledObject`. A name that weights
do not need is an error. A budget of bytes limits work and memory: every byte read and every copy reduces it.

This is our own code because ``pickle.Unpickler`` and ``torch.load(weights_only=True)``, with inert classes for all names, limit
neither memory nor time. A deep tuple as a key of a dict ends their process by a signal, and keys of tuples that share parts
take years to hash (``test_pickles.py``). Functions of torch's allow-list copy their arguments, so a pickle of 1 MB made torch 2.13 fill
4 GB in a minute. ``torch.load`` also reads no pickles of protocol 4 (``.pdparams``), and names unknown classes only in zip
archives.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from yolofleet.support.errors import CheckpointError

# The largest published network, yolov5x6, with moving average and Adam: 0.6 MB, and 19 MB in memory.
MAX_PICKLE_BYTES = 4 * 2**20  # without tensors
MAX_OBJECT_BYTES = 128 * 2**20  # memory of the pickle's objects
OPERATION_BYTES = 16  # cost of an operation: an entry of the stack
ENTRY_BYTES = 100  # cost of an entry of a dict, set or the memo
MAX_DIMENSIONS = 16
MAX_INTEGER_BYTES = 32
PYTHON2_BUILTINS = "__builtin__."  # name of `builtins` in protocol 2

# Exceptions of Python's readers for damaged bytes; all become a CheckpointError.
DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    struct.error,
    NotImplementedError,
    OverflowError,
    RuntimeError,
)


def first_line(problem: BaseException) -> str:
    text = str(problem).strip() or type(problem).__name__
    return text.splitlines()[0][:160]


@dataclass(frozen=True)
class Global:
    """A name in the file, without the object of that name."""

    path: str


@dataclass(eq=False)
class PickledObject:
    """The data of a pickled instance: class path, constructor arguments, state (usually its ``__dict__``)."""

    class_path: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def __repr__(self) -> str:
        return f"<{self.class_path}>"


# -- names with a function: it fills a plain container ----------------------------------------------------


def _as_dict(*pairs: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for pair in _sequence(pairs[0]) if pairs else ():
        key, value = _sequence(pair)
        found[_key(key)] = value
    return found


def _as_set(values: Iterable[Any] = ()) -> set[Any]:
    return {_key(v) for v in _sequence(values)}


def as_tuple(values: Iterable[Any] = ()) -> tuple[Any, ...]:
    return tuple(_sequence(values))


def _as_bytes(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes that are not text in the encoding latin1")
    return text.encode("latin1")


PLAIN: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _as_dict,
    "collections.Counter": lambda pairs=(): (
        pairs if isinstance(pairs, dict) else _as_dict(pairs)
    ),  # of schedulers
    "collections.defaultdict": lambda _factory=None, *pairs: _as_dict(*pairs),
    "builtins.set": _as_set,
    "builtins.frozenset": _as_set,
    "_codecs.encode": _as_bytes,
}


def _sequence(values: Any) -> Any:
    if not isinstance(values, (list, tuple, set)):
        raise ValueError(f"{type(values).__name__} where a sequence is expected")
    return values


def _key(value: Any) -> Any:
    """Return ``value`` if it is a flat key: hashing a deeply nested tuple would overflow Python's own stack."""
    flat = value if isinstance(value, tuple) else (value,)
    if len(flat) > MAX_DIMENSIONS or not all(
        isinstance(v, (str, int, float, bool, bytes, type(None))) for v in flat
    ):
        raise ValueError(f"a {type(value).__name__} as key")
    return value


# -- the machine ------------------------------------------------------------------------------------------


class Machine:
    """Executes the pickle opcodes of protocols 2 to 5 that build values; see Python's ``pickletools``.

    Args:
        error: makes the exception from the end of a sentence ("names os.system") and a hint.
        rebuild: our function for each name that may be called.
        inert: other permitted names, besides all that begin with one of ``inert_packages``.
        budget: number of bytes that may be read and copied.
    """

    def __init__(
        self,
        stream: BinaryIO,
        error: Callable[..., CheckpointError],
        rebuild: Mapping[str, Callable[..., Any]],
        inert: Collection[str],
        inert_packages: tuple[str, ...] = (),
        budget: int = MAX_PICKLE_BYTES,
    ) -> None:
        self._stream = stream
        self._error = error
        self._rebuild = rebuild
        self._inert = inert
        self._inert_packages = inert_packages
        self._allowed = budget
        self._budget = budget
        self._object_bytes = MAX_OBJECT_BYTES

    def run(self) -> Any:
        """Return the value of the pickle at the stream's position."""
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        try:
            while (code := self.take(1)) != b".":
                operation = OPERATIONS.get(code)
                if operation is None:
                    raise self._error(f"uses pickle opcode 0x{code.hex()}, which no weights need")
                operation(self)
                made = sys.getsizeof(self.stack[-1]) if code in MAKERS else 0
                self.spend_memory(OPERATION_BYTES + made)
            return self.stack.pop()
        except BaseException:
            self.stack, self.memo = [], {}  # else the traceback would keep them in memory
            raise

    # -- input ------------------------------------------------------------------------------------

    def take(self, n: int) -> bytes:
        """Return the next n bytes; check the length before memory is allocated."""
        self.spend(n)
        data = self._stream.read(n)
        if len(data) != n:
            raise ValueError("it ends too early")
        return data

    def spend(self, n: int) -> None:
        self._budget -= n
        if self._budget < 0:
            raise ValueError(f"its pickle needs more than {self._allowed} bytes")

    def spend_memory(self, n: int) -> None:
        self._object_bytes -= n
        if self._object_bytes < 0:
            raise ValueError(f"its pickle makes objects of more than {MAX_OBJECT_BYTES} bytes")

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def line(self) -> str:
        data = self._stream.readline(1000)
        self.spend(len(data))
        if not data.endswith(b"\n"):
            raise ValueError("a name that does not end")
        return data[:-1].decode("ascii")

    # -- stack ------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise ValueError("an empty stack")
        return self.stack.pop()

    def pop_many(self, n: int) -> tuple[Any, ...]:
        return tuple(self.pop() for _ in range(n))[::-1]

    def pop_to_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError(f"items for a {type(target).__name__}")
        self.spend_memory(OPERATION_BYTES * len(items))
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError(f"pairs for a {type(target).__name__}")
        self.spend_memory(ENTRY_BYTES * len(items))
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise ValueError(f"members for a {type(target).__name__}")
        self.spend_memory(ENTRY_BYTES * len(items))
        target.update(_key(v) for v in items)

    # -- names and objects --------------------------------------------------------------------------

    def named(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is not text")
        path = f"{module}.{name}"
        if path.startswith(PYTHON2_BUILTINS):
            path = f"builtins.{path.removeprefix(PYTHON2_BUILTINS)}"
        known = path in self._rebuild or path in self._inert or path.startswith(self._inert_packages)
        if not known:
            raise self.refusal(path)
        self.push(Global(path))

    def refusal(self, path: str) -> CheckpointError:
        return self._error(
            f"names {path[:100]}, which no weights need: it may be malicious",
            "none of its code was executed; get the weights from a source you trust, as .safetensors if possible",
        )

    def call(self) -> None:
        """Execute REDUCE or NEWOBJ; only our own functions in ``rebuild`` are called."""
        function, args = self.pop_many(2)
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise ValueError("a call of a value that is not a name")
        # copies reduce the budget, because a short loop over one long list must not fill the memory
        self.spend(sum(len(a) for a in args if isinstance(a, (str, list, tuple, set, dict))))
        rebuild = self._rebuild.get(function.path)
        self.push(rebuild(*args) if rebuild else PickledObject(function.path, args))

    def build(self) -> None:
        state = self.pop()
        self.set_state(self.stack[-1], state)

    def set_state(self, target: Any, state: Any) -> None:
        if isinstance(target, PickledObject):
            target.state = state
        elif not isinstance(target, dict):  # its attributes have no weights
            raise ValueError(f"a state for a {type(target).__name__}")

    def persistent(self) -> None:
        raise ValueError("a reference to an object outside of the pickle")

    def integer(self, length: int) -> None:
        if not 0 <= length <= MAX_INTEGER_BYTES:
            raise ValueError(f"a whole number of {length} bytes")
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def text(self, length: int) -> None:
        self.push(self.take(length).decode("utf-8"))

    def put(self, at: int) -> None:
        self.spend_memory(ENTRY_BYTES)
        self.memo[at] = self.stack[-1]


# opcodes that make a value, whose memory counts
MAKERS: dict[bytes, Callable[[Machine], object]] = {
    b"J": lambda m: m.push(m.number("<i")),
    b"K": lambda m: m.push(m.number("<B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"\x8a": lambda m: m.integer(m.number("<B")),
    b"\x8b": lambda m: m.integer(m.number("<i")),
    b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    b"\x8c": lambda m: m.text(m.number("<B")),
    b"X": lambda m: m.text(m.number("<I")),
    b"\x8d": lambda m: m.text(m.number("<Q")),
    b"C": lambda m: m.push(m.take(m.number("<B"))),
    b"B": lambda m: m.push(m.take(m.number("<I"))),
    b"\x8e": lambda m: m.push(m.take(m.number("<Q"))),
    b"]": lambda m: m.push([]),
    b"}": lambda m: m.push({}),
    b")": lambda m: m.push(()),
    b"\x8f": lambda m: m.push(set()),
    b"l": lambda m: m.push(m.pop_to_mark()),
    b"t": lambda m: m.push(tuple(m.pop_to_mark())),
    b"\x85": lambda m: m.push(m.pop_many(1)),
    b"\x86": lambda m: m.push(m.pop_many(2)),
    b"\x87": lambda m: m.push(m.pop_many(3)),
    b"\x91": lambda m: m.push(_as_set(m.pop_to_mark())),
    b"R": lambda m: m.call(),
    b"\x81": lambda m: m.call(),
}
OPERATIONS = MAKERS | {
    b"\x80": lambda m: m.take(1),  # protocol
    b"\x95": lambda m: m.take(8),  # frame length
    b"(": lambda m: m.marks.append(len(m.stack)),
    b"0": lambda m: m.pop(),
    b"1": lambda m: m.pop_to_mark(),
    b"2": lambda m: m.push(m.stack[-1]),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"a": lambda m: m.extend([m.pop()]),
    b"e": lambda m: m.extend(m.pop_to_mark()),
    b"s": lambda m: m.update(list(m.pop_many(2))),
    b"u": lambda m: m.update(m.pop_to_mark()),
    b"\x90": lambda m: m.add(m.pop_to_mark()),
    b"c": lambda m: m.named(m.line(), m.line()),
    b"\x93": lambda m: m.named(*m.pop_many(2)),
    b"b": lambda m: m.build(),
    b"Q": lambda m: m.persistent(),
    b"q": lambda m: m.put(m.number("<B")),
    b"r": lambda m: m.put(m.number("<I")),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"h": lambda m: m.push(m.memo[m.number("<B")]),
    b"j": lambda m: m.push(m.memo[m.number("<I")]),
}
