"""Render a run as a batch script of SLURM, and submit it.

The script starts one agent on every node (``fleet/launch/schedulers/agent.py``) with one ``srun``. The job goes on in three cases:

- Before the time limit, and before a preemption, SLURM sends a signal. The run saves and ends with exit code 75, and the
  script requeues the job, which then resumes.
- After a failure, if all nodes answer, the script calls ``srun`` again. ``--restarts`` limits this.
- If a node is lost, SLURM or the script requeues the job. It gets another node, or fewer nodes.

Project folder and data must be on a file system that all nodes share.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

from yolofleet.config.schema import setting
from yolofleet.fleet.launch.next_action import HOUR_S
from yolofleet.fleet.launch.schedulers.scheduler import PERMANENT_CODES, JobSettings, ScheduledRun, Scheduler
from yolofleet.support.errors import ClusterError, ConfigError, DeviceError, Stopped
from yolofleet.support.system.children import SAFE_PATH

SUBMIT_S = 60
# Another `srun` on the same nodes would use the GPU that failed, too.
ENDING_CODES = sorted((*PERMANENT_CODES, DeviceError.exit_code, Stopped.exit_code))
WORD = r"^[A-Za-z0-9_.][A-Za-z0-9_.,:@&|!*+/-]{0,254}$"  # characters of names in SLURM, without quotes
WARNED_EARLY_S = 60  # SLURM checks the time limits once a minute
LATE_ENDS_S = 300  # how much longer the last node may take than the first
ANSWER_S = 60  # for a step that does nothing; a lost node does not start it


class SlurmSettings(JobSettings):
    """``--slurm``."""

    nodes: str = setting("1", "number of nodes, as 4, or a range, as 2-4", pattern=r"^[1-9][0-9]{0,5}(-[1-9][0-9]{0,5})?$")  # fmt: skip
    gpus: str = setting(
        "0", "GPUs on each node: a number, or kind:number", pattern=r"^([A-Za-z0-9_.-]+:)?[0-9]{1,3}$"
    )
    cpus: int = setting(0, "cores on each node; 0 = four for each GPU, one for each process on CPUs", ge=0)
    memory: str = setting("", "memory of each node, as 64G", pattern=r"^([0-9]{1,9}[KMGT]?)?$")
    time: str = setting("", "time limit, as 12:00:00 or 2-00:00:00", pattern=r"^([0-9]{1,6}|([0-9]{1,4}-)?[0-9]{1,4}(:[0-9]{1,2}){1,2}|[0-9]{1,4}-[0-9]{1,2})?$")  # fmt: skip
    partition: str = setting("", "partition", pattern=f"{WORD}|^$")
    account: str = setting("", "account", pattern=f"{WORD}|^$")
    qos: str = setting("", "quality of service", pattern=f"{WORD}|^$")
    constraint: str = setting("", "features that the nodes must have", pattern=f"{WORD}|^$")
    warn_s: int = setting(180, "seconds before the time limit at which to save; SLURM may be a minute off", ge=1, le=65535)  # fmt: skip
    requeues: int = setting(100, "how often the job may go back into the queue; 0 = never", ge=0)
    python: str = setting("", "the Python of the nodes; default: the one of this command")

    @property
    def node_range(self) -> tuple[int, int]:
        least, _, most = self.nodes.partition("-")
        return int(least), int(most or least)

    @property
    def gpu_count(self) -> int:
        return int(self.gpus.rpartition(":")[2])

    @property
    def time_s(self) -> int:
        """The time limit in seconds; 0: none, or the default of the partition.

        SLURM reads ``MM``, ``MM:SS``, ``HH:MM:SS``, ``D-HH``, ``D-HH:MM``.
        """
        if not self.time:
            return 0
        days, _, clock = self.time.rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        if days:
            hours, minutes, seconds = [*parts, 0, 0][:3]
        else:
            hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
        return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


def render(settings: SlurmSettings, run: ScheduledRun) -> str:
    """Return the text of the batch script.

    Raises:
        ConfigError: the job would be asked to stop as soon as it starts, or its range of nodes is empty.
    """
    _check(settings)
    cpus = settings.cpus or (4 * settings.gpu_count or run.processes)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in _options(settings, run, cpus)),
            "",
            "# variables that another fleet may have left in the environment of sbatch",
            "unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID",
            f"export {SAFE_PATH}=1  # import nothing from the working folder (Python 3.11 and newer)",
            "",
            "since=0 failures=0",
            "while true; do",
            "  # one agent on each node; the last one may still save after the first has ended",
            f'  srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task={cpus} \\',
            f"    --kill-on-bad-exit=0 --wait={LATE_ENDS_S} --input=none \\",
            " \\\n".join(f"    {line}" for line in _command(settings, run)),
            "  code=$?",
            "",
            f"  # 0: done; {Stopped.exit_code}: asked to stop, saved; the others: the same error would come again",
            f'  case "$code" in 0|{"|".join(map(str, ENDING_CODES))}) break ;; esac',
            f"  ((SECONDS - since < {HOUR_S:.0f})) || {{ since=$SECONDS; failures=0; }}",
            f"  ((++failures <= {run.restarts})) || break  # --restarts",
            '  echo "exit code $code, failure $failures within an hour: going on"',
            "  # a step that does nothing: a node that does not start it is lost, and the job needs another one",
            f'  timeout --kill-after=10 {ANSWER_S} srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --input=none true ||',
            f"    {{ code={Stopped.exit_code}; break; }}",
            "done",
            "",
            f'if [ "$code" -eq {Stopped.exit_code} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {settings.requeues} ]; then',
            '  scontrol requeue "$SLURM_JOB_ID" && code=0',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def _check(settings: SlurmSettings) -> None:
    """Raise ConfigError if the settings contradict each other."""
    least, most = settings.node_range
    if least > most:
        raise ConfigError(
            f"--slurm nodes={settings.nodes} has no number of nodes in it",
            hint=f"--slurm nodes={most}-{least}",
        )
    if 0 < settings.time_s <= settings.warn_s + WARNED_EARLY_S:
        raise ConfigError(
            f"--slurm time={settings.time} leaves no time to train: SLURM asks the job to stop {settings.warn_s} s before, "
            "and up to a minute earlier",
            hint="--slurm time=12:00:00, or a smaller warn_s",
        )


def _options(settings: SlurmSettings, run: ScheduledRun, cpus: int) -> list[str]:
    """Return the options of sbatch."""
    least, most = settings.node_range
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", run.name)[:64].lstrip("-") or "yolofleet"
    return [
        f"--job-name={name}",
        f"--nodes={settings.nodes}",
        # with a range of nodes and --ntasks-per-node, SLURM 22.05 always gives the least number of nodes
        *(["--ntasks-per-node=1"] if least == most else []),
        f"--cpus-per-task={cpus}",
        *([f"--gres=gpu:{settings.gpus}"] if settings.gpu_count else []),
        *([f"--mem={settings.memory}"] if settings.memory else []),
        *(
            f"--{option}={value}"
            for option in ("time", "partition", "account", "qos", "constraint")
            if (value := getattr(settings, option))
        ),
        "--requeue",
        "--open-mode=append",  # after a requeue the same file goes on
        f"--signal=USR1@{settings.warn_s}",  # to the steps, not to this script
    ]


def _command(settings: SlurmSettings, run: ScheduledRun) -> list[str]:
    """Return the command of each node, in lines for a shell."""
    place = [shlex.quote(f"--resume={run.resume}")] if run.resume else _named_by_job(run.name)
    python = settings.python or sys.executable
    agent = [python, "-m", "yolofleet.fleet.launch.schedulers.agent", f"--nproc-per-node={run.processes}"]
    return [shlex.join([*agent, "-m", "yolofleet", "train"]), *map(shlex.quote, run.arguments), *place]


def _named_by_job(name: str) -> list[str]:
    """Return options of a new run. The job's number makes its name unique, so `--resume auto` finds this run only.

    `--exist-ok`: a job that fails before its first checkpoint keeps its folder.
    """
    return [f'--name=slurm-"$SLURM_JOB_ID"-{shlex.quote(name)}', "--exist-ok", "--resume=auto"]


def submit(script: str) -> str:
    """Submit ``script`` with sbatch. Return the number of the job, and the commands that follow it.

    Raises:
        ConfigError: this machine has no sbatch.
        ClusterError: sbatch refused the job, or did not answer.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=os.fsencode(script),
            capture_output=True,
            timeout=SUBMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(
            "--slurm: this machine has no sbatch",
            hint="submit from a login node of the cluster, or write the script with `yolofleet render slurm`",
        ) from None
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"sbatch did not answer within {SUBMIT_S} s", hint="check that sinfo answers and slurmctld runs"
        ) from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().removeprefix("sbatch: error: ")
        raise ClusterError(
            "sbatch refused the job", source=said[:500], hint="sinfo shows partitions, nodes and their limits"
        )
    number = done.stdout.decode("utf-8", "replace").strip().split(";")[0]
    return f"""job {number} is in the queue; its output: slurm-{number}.out
  squeue -j {number}   shows where it is
  scancel {number}     ends it"""


SCHEDULER = Scheduler(
    SlurmSettings,
    render,
    "Write the batch script of a training run for SLURM. `yolofleet train --slurm ...` submits it.",
    submit,
)
