"""Words that the code once used in a private meaning; their place is taken by the field's own terms."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import yolofleet

SOURCE = Path(yolofleet.__file__).resolve().parent
FORMER = {
    "keeper": "host agent",
    "keepers": "host agents",
    "lane": "replica",
    "lanes": "replicas",
    "witness": "process state",
    "all_alike": "have_equal_kernels",
    "late_divisor": "predicted_divisor",
    "late_unit": "DIVISOR_UNIT",
    "of_one_machine": "PER_MACHINE_SETTINGS",
    "unseen_norms": "unread_norms",
    "beats": "heartbeats",
    "floatwire": "ReductionFormat",
    "integerwire": "IntegerFormat",
    "say_missing_s": "PRINT_MISSING_S",
    "statistics_wire": "statistics_format",
    "usual_times": "MEDIAN_FACTOR",
    "wires": "formats",
    "deputies": "standby launchers",
    "deputy": "standby launcher",
    "supervisor": "launcher",
    "supervisors": "launchers",
    "apart": "in_child",
    "beat": "heartbeat",
    "card": "interface",
    "crew": "logged_in",
    "farewell": "finish",
    "hasty": "ends_at_once",
    "misfit": "models of answers",
    "spot": "endpoint",
    "spots": "endpoints",
    "wish": "question",
    "wishes": "stop_requests",
    "deputy.py": "standby.py",
    "supervisor.py": "launcher.py",
    "alike.py": "host_differences.py",
    "apart.py": "subprocess_probes.py",
    "cards.py": "network_interfaces.py",
    "code.py": "package_sync.py",
    "frames.py": "wire_protocol.py",
    "need.py": "resource_estimate.py",
    "screen.py": "nonblocking_stdout.py",
}


def test_no_file_and_no_identifier_has_a_former_name() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if path.name in FORMER:
            found.append(f"{name}: call it {FORMER[path.name]}")
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            whole = token.string.lower().strip("_") if token.type == tokenize.NAME else ""
            for word in {whole, *whole.split("_")} & FORMER.keys():
                found.append(f"{name}:{token.start[0]}: {word} -> {FORMER[word]}")
    assert not found, "\n".join(found)
