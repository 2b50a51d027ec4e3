"""Run the tests as other processors would: with fewer vector instructions, and with one and two threads.

``python tests/cpus.py [PYTEST OPTIONS]``: every run takes place, a list of runs and results ends the output, and the exit
code is 1 if one of them failed. ``ATEN_CPU_CAPABILITY`` limits torch's own kernels, ``ONEDNN_MAX_CPU_ISA`` the
convolutions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ["-m", "pytest", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
NUMBERS = ["tests/parity", "tests/multiprocess/test_contract.py"]
RUNS = [
    *(([], {"ATEN_CPU_CAPABILITY": kernels, "OMP_NUM_THREADS": "1"}) for kernels in ("default", "avx2")),
    *(
        (NUMBERS, {"ONEDNN_MAX_CPU_ISA": isa, "OMP_NUM_THREADS": threads})
        for isa in ("SSE41", "AVX2")
        for threads in ("1", "2")
    ),
]


def main(options: list[str]) -> int:
    results = []
    for paths, variables in RUNS:
        name = " ".join(f"{key}={value}" for key, value in variables.items())
        print(f"\n== {name}: {' '.join(paths) or 'tests'}", flush=True)
        began_s = time.monotonic()
        argv = [
            sys.executable,
            *PYTEST,
            "-m",
            "not slow and not gpu and not cluster and not store",
            *paths,
            *options,
        ]
        code = subprocess.run(argv, cwd=ROOT, env=os.environ | variables).returncode
        minutes, seconds = divmod(round(time.monotonic() - began_s), 60)
        result = "passed" if code == 0 else f"FAILED (pytest's exit code {code})"
        results.append(f"{name:<48} {' '.join(paths) or 'tests':<54} {minutes:2} min {seconds:2} s  {result}")
    print("\n" + "\n".join(results))
    return int(any("FAILED" in line for line in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
