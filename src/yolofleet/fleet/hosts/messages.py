"""Messages and answers of a host agent, as models that refuse everything else. ``wire_protocol.py`` names the messages."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from yolofleet.fleet.hosts.wire_protocol import MOST_MESSAGE_BYTES
from yolofleet.fleet.strict import MOST_ITEMS, Few, FromList, Model, Number, PathText, Text, Whole, text

MOST_RANKS = 100_000
MOST_FILES = 1_000_000  # of a run's folder: a validation writes one for each image
LongText = Annotated[str, text(longest=MOST_MESSAGE_BYTES)]
Ending = Annotated[int, Field(ge=-64, le=255)]  # what a process can end with: signals below 0
Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
Some = Field(min_length=1, max_length=MOST_ITEMS)


class Hello(Model):
    type: Literal["hello"] = "hello"
    protocol: Whole
    platform: Text
    pid: Whole = 0
    software: Annotated[dict[Text, Any], Few]
    time_s: Number


class Heartbeat(Model):
    type: Literal["beat"] = "beat"


class Reply(Model):
    type: Literal["reply"] = "reply"
    id: Whole
    value: Any = None
    error: Text | None = None

    @model_validator(mode="after")
    def _answers(self) -> Reply:
        if "value" not in self.model_fields_set and self.error is None:
            raise ValueError("expected a value or an error")
        return self


class Output(Model):
    type: Literal["output"] = "output"
    text: LongText


class Log(Model):
    type: Literal["log"] = "log"
    rank: Whole
    text: LongText


class LastWords(Model):
    """Why a worker failed, as it wrote it (``training/rank/worker.py``)."""

    rank: Whole
    host: Text
    message: LongText
    exit_code: Annotated[int, Field(ge=0, le=255)]
    time: Number
    secondary: bool = False  # it failed because another rank did
    of_all: bool = False  # all ranks report the same failure
    # the run must go on without its host: the machine will be taken away, or one of its GPUs failed
    leaves: bool = False


class Killed(Model):
    """Processes that the kernel killed for lack of memory; None: unknown."""

    group: Whole | None = None
    machine: Whole | None = None


class Exit(Model):
    """The end of a job on a host."""

    type: Literal["exit"] = "exit"
    code: Ending  # exit code of torchrun's agent, or of the command
    words: Annotated[list[LastWords], Field(max_length=MOST_RANKS)] = []
    log: LongText = ""  # the end of the agent's log
    why: LongText = ""  # why the host agent ended the job; "" if it ended by itself
    # ranks that could not react when they were asked to end
    stopped: Annotated[list[Text], Field(max_length=MOST_RANKS)] = []
    step: Annotated[int, Field(ge=-1, lt=2**53)] = -1  # number of steps done; -1 if none was done
    killed: Killed = Killed()


@dataclass(frozen=True)
class Gone:
    """The last message of a connection, from this end."""


Message = Hello | Heartbeat | Reply | Output | Log | Exit | Gone
_Incoming = Annotated[Hello | Heartbeat | Reply | Output | Log | Exit, Field(discriminator="type")]
_INCOMING: TypeAdapter[Message] = TypeAdapter(_Incoming)


def values_of(line: bytes) -> dict[str, Any]:
    """Return the values of a line of JSON; {} if it is no message, such as output of a login shell."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) and isinstance(values.get("type"), str) else {}


def message_of(values: dict[str, Any]) -> Message | None:
    """Return the message of a host agent; None if it is not valid."""
    try:
        return _INCOMING.validate_python(values)
    except (ValidationError, OverflowError, RecursionError):
        return None


# -- answers to requests (requests.py) -----------------------------------------------------------------------


class Claimed(Model):
    """See ``requests.claim``."""

    folder: PathText
    owner: Text
    made: bool
    linked: Text


class Piece(Model):
    """A piece of a file, as base64."""

    offset: Whole
    data: Annotated[str, text(partial(base64.b64decode, validate=True), longest=MOST_MESSAGE_BYTES)]
    size: Whole

    @property
    def content(self) -> bytes:
        return base64.b64decode(self.data)


class Job(Model):
    """A job on a host; see ``jobs.Record``."""

    job: Text
    title: Text
    folder: PathText
    node: Whole
    ranks: Annotated[tuple[Rank, Rank], FromList]
    runs: bool
    began_s: Number
    ended_s: Number
    code: Whole | None


class JobEnd(Model):
    """See ``requests.end_job``."""

    found: bool
    left: bool


class Vote(Model):
    """See ``lease.vote``."""

    granted: bool
    term: Whole
    voters: Annotated[list[Annotated[list[Text], Some]], Some]
    version: Whole
    code: Ending | None


class LeaseThere(Model):
    """The lease of a run on a host; see ``lease.Lease`` and ``lease.list_leases``."""

    job: Text
    title: Text
    term: Whole
    holder: Text
    version: Whole
    folder: PathText
    code: Ending | None
    console: PathText
    is_over: bool


_ANSWERS: dict[str, Any] = {
    "enter": PathText,
    "claim": Claimed,
    "unclaim": None,
    "warm_up": None,
    "save_state": None,
    "take_code": Text,
    "hash_files": Annotated[dict[Text, Text], Few],
    "reserve_port": Whole,
    "list_files": Annotated[list[Annotated[tuple[PathText, Whole], FromList]], Field(max_length=MOST_FILES)],
    "read_piece": Piece,
    "request_run": None,
    "list_jobs": Annotated[list[Job], Few],
    "end_job": JobEnd,
    "add_host": bool,
    "has_added": bool,
    "take_added": Annotated[list[Text], Few],
    "refused_logins": Annotated[dict[Text, Text], Few],
    "renew_lease": bool,
    "vote": Vote | None,
    "end_lease": None,
    "list_leases": Annotated[list[LeaseThere], Few],
}
_STRICT = ConfigDict(strict=True)
ANSWERS: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(kind)
    if isinstance(kind, type) and issubclass(kind, Model)
    else TypeAdapter(kind, config=_STRICT)
    for name, kind in _ANSWERS.items()
}


def answer_of(request: str, value: Any) -> Any:
    """Return the checked answer to a request. Answers to probes are checked by the doctor (``host_facts.py``).

    Raises:
        ValueError: it is no answer to this request.
    """
    if request in ANSWERS:
        try:
            return ANSWERS[request].validate_python(value)
        except (OverflowError, RecursionError) as problem:
            raise ValueError(str(problem)) from None
    if not isinstance(value, (dict, list)):
        raise ValueError("expected a mapping or a list")
    return value
