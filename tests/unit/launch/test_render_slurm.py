"""The batch script says what was asked for, and nothing in it can be anything but a word."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from yolofleet.cli.app import run
from yolofleet.config.load import resolve_train
from yolofleet.fleet.launch.machines import scheduled_run
from yolofleet.fleet.launch.schedulers.kubernetes import KubernetesSettings
from yolofleet.fleet.launch.schedulers.scheduler import read_settings
from yolofleet.fleet.launch.schedulers.slurm import SlurmSettings, render, submit
from yolofleet.support.errors import ClusterError, ConfigError

TRAIN = ["--data", "shapes", "--model", "yolov5n"]
HOSTILE = [
    "it's",
    '"; touch pwned; "',
    "$(touch pwned)",
    "`touch pwned`",
    "a\nb\n#SBATCH --partition=other\ntouch pwned",
    "a\\",
    "'\"'\"'$(touch pwned)'",
    "-x --wrap=touch",
    "!touch pwned",
    "* ? [a] {a,b} ~ & | ; < > #",
    "Grüße 狗",
    os.fsdecode(b"not \xff text"),
    "\t\r\x07",
]

needs_bash = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")


def script(*argv: str | bool, settings: str = "nodes=1") -> str:
    """Of `render slurm`, with the settings given as a user gives them."""
    given = {"data": "shapes", "model": "yolov5n"} | dict(zip(map(str, argv[::2]), argv[1::2], strict=True))
    config, _ = resolve_train(given)
    return rendered(read_settings(SlurmSettings, [settings], "--slurm"), config, given)


def rendered(settings: SlurmSettings, config: Any, given: dict[str, Any]) -> str:
    return render(settings, scheduled_run(config, given, "", settings, "--slurm"))


def test_the_script_is_exactly_this(capsys: pytest.CaptureFixture[str]) -> None:
    job = "nodes=2,gpus=a100:4,partition=gpu,time=12:00:00,account=me,memory=64G,python=/env/bin/python"
    assert run(["render", "slurm", *TRAIN, "--imgsz", "320", "--set", "lr0=0.02", "--set", "box=0.1", "--no-plots",
                "--name", "cats", "--slurm", job]) == 0  # fmt: skip
    assert (
        capsys.readouterr().out
        == r"""#!/bin/bash
#SBATCH --job-name=cats
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:a100:4
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --partition=gpu
#SBATCH --account=me
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@180

# variables that another fleet may have left in the environment of sbatch
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID
export PYTHONSAFEPATH=1  # import nothing from the working folder (Python 3.11 and newer)

since=0 failures=0
while true; do
  # one agent on each node; the last one may still save after the first has ended
  srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=16 \
    --kill-on-bad-exit=0 --wait=300 --input=none \
    /env/bin/python -m yolofleet.fleet.launch.schedulers.agent --nproc-per-node=4 -m yolofleet train \
    --data=shapes \
    --model=yolov5n \
    --img=320 \
    --set=lr0=0.02 \
    --set=box=0.1 \
    --no-plots \
    --name=slurm-"$SLURM_JOB_ID"-cats \
    --exist-ok \
    --resume=auto
  code=$?

  # 0: done; 75: asked to stop, saved; the others: the same error would come again
  case "$code" in 0|2|3|5|6|75) break ;; esac
  ((SECONDS - since < 3600)) || { since=$SECONDS; failures=0; }
  ((++failures <= 10)) || break  # --restarts
  echo "exit code $code, failure $failures within an hour: going on"
  # a step that does nothing: a node that does not start it is lost, and the job needs another one
  timeout --kill-after=10 60 srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --input=none true ||
    { code=75; break; }
done

if [ "$code" -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
  scontrol requeue "$SLURM_JOB_ID" && code=0
fi
exit "$code"
"""
    )


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose srun, scontrol and sbatch write down how they were called."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "calls").touch()
    executable(
        tmp_path / "bin" / "srun",  # ends with one of SRUN_CODES after the other, then with 0
        f'#!/bin/bash\nprintf "%s\\0" "$@" >> "{tmp_path}/srun.argv"\necho >> "{tmp_path}/calls"\n'
        f'codes=($SRUN_CODES)\nexit "${{codes[$(wc -l < "{tmp_path}/calls") - 1]:-0}}"\n',
    )
    executable(
        tmp_path / "bin" / "scontrol", f'#!/bin/bash\nprintf "%s\\0" "$@" >> "{tmp_path}/scontrol.argv"\n'
    )
    executable(
        tmp_path / "bin" / "sbatch",
        f'#!/bin/bash\nprintf "%s\\0" "$@" > "{tmp_path}/sbatch.argv"\ncat > "{tmp_path}/sbatch.stdin"\necho "17;lab"\n',
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path / "work")
    for name in ("SLURM_RESTART_COUNT", "SRUN_CODES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def called(cluster: Path, name: str) -> list[str]:
    path = cluster / f"{name}.argv"
    return os.fsdecode(path.read_bytes()).split("\0")[:-1] if path.exists() else []


def run_script(text: str, **environment: str) -> int:
    variables = {**os.environ, "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", **environment}
    done = subprocess.run(["bash"], input=os.fsencode(text), env=variables, capture_output=True)
    assert done.stderr == b"", done
    return done.returncode


def calls(cluster: Path) -> list[str]:
    """What srun was called for: the agents, or a step that does nothing."""
    starts = "\0".join(called(cluster, "srun")).split("--ntasks=2\0")[1:]
    return [
        "agents" if "yolofleet.fleet.launch.schedulers.agent" in words else words.split("\0")[2]
        for words in starts
    ]


def _takes_any_path() -> bool:
    try:
        script("name", "\udcff")
    except ConfigError:
        return False
    return True


@needs_bash
@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_names_stay_words(cluster: Path, hostile: str) -> None:
    if "\udcff" in hostile and not _takes_any_path():
        pytest.skip("this pydantic refuses paths that are not UTF-8")
    text = script("name", hostile, "project", hostile, "weights", hostile)
    assert run_script(text) == 0
    words = called(cluster, "srun")
    assert words[words.index("train") + 1 :] == [
        "--data=shapes",
        "--model=yolov5n",
        f"--project={hostile}",
        f"--weights={hostile}",
        f"--name=slurm-17-{hostile}",
        "--exist-ok",
        "--resume=auto",
    ]
    assert not any((cluster / "work").iterdir())
    head = text.partition("\n\n")[0].splitlines()
    assert len(head) == 8 and all(line.startswith("#SBATCH --") for line in head[1:])


@needs_bash
def test_random_names_stay_words(cluster: Path) -> None:
    draw = random.Random(5)
    names = [
        "".join(draw.choices("'\"`$(){}[]\\;&|<>!#*?~= \n\tab", k=draw.randint(1, 12))) for _ in range(60)
    ]
    given = {
        "data": "shapes",
        "model": "yolov5n",
        "name": "n",
        "set": tuple(f"lr0=0.0{i % 9 + 1}" for i in range(1)),
    }
    config, _ = resolve_train(given)
    text = rendered(SlurmSettings(), config, given | {"set": tuple(names)})
    assert run_script(text) == 0
    assert [w.removeprefix("--set=") for w in called(cluster, "srun") if w.startswith("--set=")] == names
    assert not any((cluster / "work").iterdir())


@pytest.mark.parametrize(
    "key", ["partition", "account", "qos", "constraint", "gpus", "time", "memory", "cpus", "nodes"]
)
@pytest.mark.parametrize("value", ["a b", "a\nb", "$(x)", "a;b", "'a'", '"', "-x", "a\n#SBATCH --uid=0"])
def test_what_is_for_slurm_has_no_shell_in_it(key: str, value: str) -> None:
    with pytest.raises(ConfigError):
        read_settings(SlurmSettings, [f"{key}={value}"], "--slurm")


@pytest.mark.parametrize(
    ("time", "time_s"),
    [("", 0), ("0", 0), ("90", 5400), ("90:30", 5430), ("2:00:01", 7201), ("1-2", 93600), ("1-2:03", 93780),
     ("1-02:03:04", 93784)],
)  # fmt: skip
def test_a_time_limit_is_read_as_slurm_reads_it(time: str, time_s: int) -> None:
    assert SlurmSettings(time=time).time_s == time_s
    assert "--signal=USR1@180" in script(settings=f"nodes=1,time={time}" if time else "nodes=1")


@pytest.mark.parametrize("settings", ["time=4", "time=00:04:00", "time=10,warn_s=540"])
def test_a_job_that_would_be_asked_to_stop_at_its_start_is_refused(settings: str) -> None:
    with pytest.raises(ConfigError, match="leaves no time to train"):
        script(settings=settings)


TRY, AGAIN = ["agents"], ["true", "agents"]


@needs_bash
@pytest.mark.parametrize(
    ("codes", "exit_code", "called_for", "is_requeued"),
    [
        ("75", 0, TRY, True),  # stopped on request: back into the queue
        # an end, and errors that would come again
        *[(code, int(code), TRY, False) for code in ("0", "2", "3", "5", "6")],
        *[(f"{code} 0 0", 0, TRY + AGAIN, False) for code in ("1", "4", "137", "143")],
        ("4 1", 0, [*TRY, "true"], True),  # a node is lost
        ("4 0 4 0 4", 4, TRY + AGAIN + AGAIN, False),  # --restarts 2
    ],
)
def test_what_follows_the_end_of_the_agents(
    cluster: Path, codes: str, exit_code: int, called_for: list[str], is_requeued: bool
) -> None:
    assert run_script(script("restarts", "2"), SRUN_CODES=codes) == exit_code
    assert calls(cluster) == called_for
    assert called(cluster, "scontrol") == (["requeue", "17"] if is_requeued else [])


@needs_bash
def test_it_does_not_go_back_for_ever(cluster: Path) -> None:
    assert run_script(script(settings="requeues=3"), SRUN_CODES="75", SLURM_RESTART_COUNT="3") == 75
    assert called(cluster, "scontrol") == []


@needs_bash
def test_train_submits_and_says_the_number(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", *TRAIN, "--slurm", "nodes=2,partition=a,b", "--slurm", "nodes=3"]) == 0
    assert "job 17" in capsys.readouterr().out
    assert called(cluster, "sbatch") == ["--parsable"]
    said = (cluster / "sbatch.stdin").read_text()
    assert "--nodes=3\n" in said and "--partition=a,b\n" in said and sys.executable in said


@needs_bash
def test_a_dry_run_submits_nothing(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", *TRAIN, "--slurm", "nodes=2", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")
    assert called(cluster, "sbatch") == []


@needs_bash
def test_what_sbatch_says_is_passed_on(cluster: Path) -> None:
    executable(
        cluster / "bin" / "sbatch", '#!/bin/bash\necho "sbatch: error: invalid partition: x" >&2\nexit 1\n'
    )
    with pytest.raises(ClusterError, match="invalid partition: x"):
        submit("#!/bin/bash\n")


def test_without_sbatch_it_says_where_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="render slurm"):
        submit("#!/bin/bash\n")


def test_settings_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "slurm.yaml"
    path.write_text("partition: gpu\nnodes: 2\n")
    read = read_settings(SlurmSettings, [str(path), "nodes=4"], "--slurm")
    assert (read.partition, read.nodes) == ("gpu", "4")
    path.write_text("partition: gpu\nnode: 2\n")
    with pytest.raises(ConfigError, match=r"slurm\.yaml:2"):
        read_settings(SlurmSettings, [str(path)], "--slurm")


@pytest.mark.parametrize(
    ("settings", "device"), [("gpus=2", "0"), ("gpus=2", "cpu"), ("nodes=2", "0,1"), ("nodes=2", "mps")]
)
def test_devices_that_the_job_does_not_have_are_refused(settings: str, device: str) -> None:
    with pytest.raises(ConfigError, match="--device"):
        script("device", device, settings=settings)


@pytest.mark.parametrize(
    ("hosts", "machines"),
    [("a:8,b:4", "nodes=2,gpus=8"), ("a:cpu:2,b,c", "nodes=3"), ("localhost:+3", "nodes=1,gpus=1")],
)
def test_machines_over_ssh_are_refused_and_as_many_of_the_cluster_proposed(hosts: str, machines: str) -> None:
    with pytest.raises(ConfigError, match="--hosts and --slurm both choose") as caught:
        script("hosts", hosts)
    assert caught.value.hint.startswith(f"--slurm {machines} without --hosts: ")
    assert "leave out --slurm" in caught.value.hint


def test_a_fleet_file_is_refused_as_hosts_are(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("hosts: [a:2, b:2]\n")
    with pytest.raises(ConfigError, match="--fleet and --slurm both choose") as caught:
        script("fleet", str(tmp_path / "f.yaml"))
    assert caught.value.hint.startswith("--slurm nodes=2,gpus=2 without --fleet: ")


def test_what_every_process_of_the_job_would_refuse_is_refused_before_it_waits_in_the_queue() -> None:
    with pytest.raises(ConfigError, match="--sync-code has no effect"):
        script("sync_code", True)
    with pytest.raises(ConfigError, match="--detach has no effect: a job of --slurm"):
        script("detach", True)
    with pytest.raises(ConfigError, match="needs 4 numbers"):
        script("shares", "1,2", settings="nodes=2,gpus=2")
    assert "--shares=1,2,1,1" in script("shares", "1,2,1,1", settings="nodes=2,gpus=2")


def test_a_range_of_nodes() -> None:
    text = script(settings="nodes=2-4")
    assert "#SBATCH --nodes=2-4\n" in text
    assert "#SBATCH --ntasks-per-node" not in text, "SLURM would always give two nodes"
    with pytest.raises(ConfigError, match="nodes=4-2") as caught:
        script(settings="nodes=4-2")
    assert caught.value.hint == "--slurm nodes=2-4"
    with pytest.raises(ConfigError, match="does not fix how many"):
        script("shares", "1,2", settings="nodes=1-2")


def test_processes_of_a_node() -> None:
    assert "--nproc-per-node=3 " in script("device", "cpu:3")
    assert "--cpus-per-task=3\n" in script("device", "cpu:3")
    assert "--nproc-per-node=1 " in script("parallel", "dp", "device", "0,1", settings="gpus=2")


def test_a_run_that_is_continued_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.safetensors").touch()
    from yolofleet.config.stored.job import dump_config

    (tmp_path / "config.yaml").write_text(dump_config(*resolve_train({"data": "shapes", "model": "yolov5n"})))
    text = script("resume", str(tmp_path))
    assert f"--resume={tmp_path}\n" in text and "--name" not in text


@pytest.mark.parametrize(("name", "model"), [("slurm", SlurmSettings), ("kubernetes", KubernetesSettings)])
def test_the_page_names_every_key(name: str, model: type[BaseModel]) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/schedulers.md").read_text(encoding="utf-8")
    table = page.split(f"| `--{name}` |")[1].split("\n\n")[0]
    first_cells = "".join(row.split("|")[1] for row in table.splitlines()[2:])
    assert set(re.findall(r"`(\w+)`", first_cells)) == set(model.model_fields)
