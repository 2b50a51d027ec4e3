"""What hosts answer to probes (``probes.py``), as models that refuse everything else.

Names, addresses and versions go into commands that a person types, so they have nothing in them that a shell would
obey.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from yolofleet.fleet.strict import MOST, MOST_ITEMS, Few, FromList, Model, Number, Positive, Text, Whole, text
from yolofleet.support.errors import ClusterError

Pid = Annotated[int, Field(gt=0, le=MOST)]  # kill -1 would end everything
HostName = Annotated[str, text(r"[^\s'\"\\`$;&|<>]{1,255}")]
InterfaceName = Annotated[str, text(r"[\w.:@+,~%=-]+")]
Version = Annotated[str, text(r"[\w.+!-]{1,100}")] | None
Address = Annotated[str, text(lambda value: ipaddress.ip_address(value.partition("%")[0]))]
AddressWithPrefix = Annotated[str, text(ipaddress.ip_interface)]
ChainPart = Annotated[str, text(r"[\w./-]+")]


class Names(Model):
    addresses: Annotated[list[Address], Few]
    problem: Text


class Interface(Model):
    name: InterfaceName
    addresses: Annotated[list[AddressWithPrefix], Few]
    up: bool
    mtu: Whole | None
    kind: Text
    speed_mbit: Whole | None


class Firewall(Model):
    kind: Text
    readable: bool
    rules: Annotated[list[Text], Few]
    chains: Annotated[list[Annotated[list[ChainPart], Field(min_length=3, max_length=3)]], Few]


UNSEEN = Firewall(kind="", readable=False, rules=[], chains=[])


class Memory(Model):
    total: Whole | None = None
    available: Whole | None
    machine_available: Whole | None = None

    @model_validator(mode="after")
    def _has_all(self) -> Memory:
        if self.available is not None and None in (self.total, self.machine_available):
            raise ValueError("expected total and machine_available beside available")
        return self


class SharedMemory(Model):
    size: Whole
    free: Whole
    largest: Annotated[list[Annotated[tuple[Text, Whole], FromList]], Few]
    read_only: bool = False


class Cores(Model):
    visible: Whole | None
    usable: Whole | None
    quota: Number | None


class Limits(Model):
    open_files: Whole | None
    open_files_hard: Whole | None
    locked_memory: Whole | None


class Port(Model):
    port: Whole
    busy: bool
    pid: Pid | None
    command: Text | None
    user: Text | None


class Disk(Model):
    folder: Text
    below: Text
    free: Whole | None
    write_bytes_per_s: Number | None
    problem: Text | None


class Software(Model):
    python: Text
    system: Text
    yolofleet: Version
    package_sha256: Text
    torch: Version
    nccl: Version
    numpy: Version
    cv2: Version


class Gpu(Model):
    index: Whole | None
    name: Text
    memory_mib: Whole | None
    used_mib: Whole | None
    busy_percent: Whole | None
    uncorrected_errors: Whole | None


class Gpus(Model):
    state: Text
    said: Text
    cards: Whole
    driver: Text | None
    gpus: Annotated[list[Gpu], Few]


class Device(Model):
    name: Text
    capability: Annotated[str, text(r"\d{1,3}\.\d{1,3}")]
    memory: Whole
    problem: Text


class Torch(Model):
    version: Version
    cuda: Version
    hip: Version
    nccl: Version
    arch_list: Annotated[list[Annotated[str, text(r"[\w:+-]{1,100}")]], Few]
    devices: Annotated[list[Device], Few]
    problem: Text


class Child(Model):
    """The answer of a child process."""

    ANSWER: ClassVar[tuple[str, ...]] = ()  # names of the values that an answer without a problem has
    problem: Text = ""  # why there is no answer; "" if there is one
    late: bool = False  # the process took too long

    @model_validator(mode="before")
    @classmethod
    def _has_answer_or_problem(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("problem"):
            return {name: part for name, part in value.items() if name not in cls.ANSWER}
        if isinstance(value, dict) and any(value.get(name) is None for name in cls.ANSWER):
            raise ValueError(f"expected {' and '.join(cls.ANSWER)}, or a problem")
        return value


class Libraries(Child):
    ANSWER = ("problems",)
    problems: Annotated[dict[Text, Text], Few] | None = None
    torch: Torch | None = None


class Clock(Model):
    synchronised: bool | None


class InfinibandPort(Model):
    adapter: Text
    port: Text
    state: Text
    rate: Text
    layer: Text


class HostFacts(Model):
    """What one machine shows. The last part is None where nobody asked for it."""

    host: HostName
    platform: Text
    network_id: Text
    memory: Memory
    shm: SharedMemory | None
    cores: Cores
    limits: Limits
    variables: Annotated[dict[Text, Text], Few]
    interfaces: Annotated[list[Interface], Few] | None = Field(alias="cards")
    names: Names
    port: Port | None
    ephemeral_ports: Annotated[list[Whole], Field(min_length=2, max_length=2)]
    disks: Annotated[list[Disk], Few]
    software: Software
    gpu_count: Whole | None = None
    libraries: Libraries | None = None
    gpus: Gpus | None = None
    firewall: Firewall | None = None
    clock: Clock | None = None
    infiniband: Annotated[list[InfinibandPort], Few] | None = None

    @property
    def torch(self) -> Torch | None:
        """What torch itself says; None if it was not loaded."""
        return self.libraries.torch if self.libraries else None

    @property
    def has_counted_gpus(self) -> bool:
        """Whether the run's GPUs were counted, with or without a result."""
        return "gpu_count" in self.model_fields_set


SLOW = ("libraries", "gpus", "firewall", "clock", "infiniband")  # not asked for in a quick examination


class Split(Model):
    digest: Text
    images: Whole
    labels: Whole


class DataAnswer(Child):
    ANSWER = ("splits",)
    splits: Annotated[dict[Text, Split], Few] = {}


class Time(Model):
    time_s: Number


class Listening(Model):
    ports: Annotated[list[Whole], Field(min_length=1, max_length=MOST_ITEMS)]


class ConnectionTest(Model):
    """What one host found when it connected to another."""

    outcome: Literal[
        "connected", "refused", "prohibited", "dropped", "silent", "no-route", "self", "stalls", "other"
    ]
    own: Annotated[str, text(lambda value: value == "" or ipaddress.ip_address(value.partition("%")[0]))]
    interface: Text | None = Field(alias="card")
    said: Text


class Measured(Child):
    ANSWER = ("round_trip_s", "bytes_per_s")
    round_trip_s: Positive | None = None
    bytes_per_s: Positive | None = None


class FreePort(Model):
    port: Whole


class Summed(Child):
    ANSWER = ("seconds", "barrier_s")
    seconds: Positive | None = None
    barrier_s: Number | None = None


_MODELS: dict[str, Any] = {
    "facts": HostFacts,
    "data": DataAnswer,
    "time": Time,
    "look_up": Annotated[dict[Text, Names], Few],
    "firewall": Firewall,
    "listen": Listening,
    "unlisten": Model,
    "reach": Annotated[list[ConnectionTest], Few],
    "measure": Measured,
    "free_port": FreePort,
    "all_reduce": Summed,
}
ANSWERS: dict[str, TypeAdapter[Any]] = {name: TypeAdapter(model) for name, model in _MODELS.items()}


def read_answer(host: str, probe: str, asked: Mapping[str, Any], answer: Any) -> Any:
    """Return the model of a host's answer.

    Args:
        host: its name, or ``strict.HERE``.
    Raises:
        ClusterError: the answer does not have the form that the question asks for.
    """
    at: Sequence[str | int] | None = None
    try:
        model = ANSWERS[probe].validate_python(answer, context=host)
        at = _missing(probe, asked, model)
    except ValidationError as problem:
        at = problem.errors(include_input=False, include_url=False)[0]["loc"]
    except (OverflowError, RecursionError):
        at = ()
    if at is not None:
        shown = "".join(f"[{part!r}]" for part in at)[:100]
        raise ClusterError(
            f"{host} sent an answer to {probe!r} that this version cannot read: see {probe}{shown}",
            hint="install the same version of yolofleet on every host; if it is the same, that host is broken",
        )
    return model


def _missing(probe: str, asked: Mapping[str, Any], answer: Any) -> Sequence[str | int] | None:
    """Return where something is missing that this question asks for."""
    if probe == "facts":
        wanted = [] if asked.get("quick") else [name for name in SLOW if getattr(answer, name) is None]
        if asked.get("count_gpus") and not answer.has_counted_gpus:
            wanted.append("gpu_count")
        return wanted[:1] or None
    if probe == "look_up":
        return [name for name in asked["names"] if name not in answer][:1] or None
    if probe == "reach" and len(answer) != len(asked["targets"]):
        return ()
    return None
