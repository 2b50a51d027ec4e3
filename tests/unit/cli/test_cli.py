"""The command line from words to exit code, and the scripts in the root folder."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import small_shapes
from reference import reference
from walks import sampled

import yolofleet
from yolofleet.cli import main
from yolofleet.cli.app import APP
from yolofleet.cli.commands import Verbs
from yolofleet.config import checks
from yolofleet.config.schema import TrainConfig, ValConfig, flag_of
from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.config.words.spellings import SPELLINGS

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def cli(capsys):
    """Runs a command line in this process: exit code, standard output, standard error."""

    def run(*argv):
        code = main(list(argv))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def settings(out):
    """name -> (value, source) of a dry run."""
    rows = [line.split(maxsplit=2) for line in out.splitlines() if line.startswith("  ")]
    return {row[0]: tuple(row[1:]) for row in rows if len(row) == 3}


def test_version_and_help(cli):
    assert cli("--version") == (0, f"yolofleet {yolofleet.__version__}\n", "")
    for argv in ([], ["--help"], ["-h"], ["data"], ["weights"], ["checkpoints"]):
        code, out, err = cli(*argv)
        assert code == 0 and "Verbs:" in out and err == ""
    for verb in (
        ["train"],
        ["val"],
        ["predict"],
        ["data", "check"],
        ["weights", "inspect"],
        ["checkpoints", "list"],
    ):
        code, out, err = cli(*verb, "--help")
        assert code == 0 and out.startswith(f"Usage: yolofleet {' '.join(verb)}") and err == ""


def test_help_of_a_verb_shows_every_setting_under_its_heading(cli):
    for verb, model in (("train", TrainConfig), ("val", ValConfig), ("predict", PredictConfig)):
        out = cli(verb, "--help-all")[1]
        for name, field in model.model_fields.items():
            assert flag_of(name, field)[2:] in out
        assert "Input:\n" in out and "Execution:\n" in out


GUIDES = [  # command lines of the well-known guides; tests/unit/config/test_aliases.py has the spellings
    ("--data coco.yaml --epochs 300 --weights '' --cfg yolov5s.yaml --batch-size 32",
     {"data": "coco.yaml", "epochs": "300", "cfg": "yolov5s.yaml", "batch": "32"}),
    ("--data d --weights w.pt --sync-bn --hyp hyp.scratch-high.yaml --cache --freeze 0 1 2",
     {"sync_bn": "true", "recipe": "hyp.scratch-high.yaml", "cache": "ram", "freeze": "0,1,2"}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), GUIDES)
def test_commands_of_the_guides_are_understood(cli, line, expected):
    out = cli("train", *("" if word == "''" else word for word in line.split()), "--dry-run")[1]
    found = settings(out)  # a dry run shows the settings before it looks for GPUs, COCO and weights
    for name, value in expected.items():
        assert found[name] == (value, "command line")


def test_a_dry_run_says_what_would_run(cli, tmp_path):
    (tmp_path / "a.yaml").write_text("model: yolov5n\nbatch: 32\n")
    argv = [
        *("train", "--config", "a.yaml", "--data", "shapes", "--device", "cpu:2", "--set", "lr0=0.02"),
        "--cos-lr",
    ]
    code, out, err = cli(*argv, "--dry-run")
    assert code == 0
    assert err.startswith("note: --cos-lr is now --lr-schedule cosine\n")
    found = settings(out)
    assert found["batch"] == ("32", "a.yaml:2") and found["lr0"] == ("0.02", "command line")
    assert found["seed"] == ("0", "default") and found["mixup"] == ("0.0", "recipe scratch-low")
    assert (
        "would run\n  2 processes\n  steps of 64 images: 8 micro-batches of 8\n  note: recipe scratch-few"
        in out
    )
    out = cli("train", "--model", "dfine-n", *argv[3:], "--recipe", "finetune", "--dry-run")[1]
    assert "\n  warning: recipe finetune was made for the family yolov5" in out
    assert list(tmp_path.iterdir()) == [tmp_path / "a.yaml"]


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("--data d --model yolov5n", 2, "data set d does not exist"),
        ("--data coco --model yolov5n", 3, "yolofleet data download coco"),
        ("--data only_train.yaml --model yolov5n --sampler weights", 2, "no val split"),
        ("--data lost.yaml --model yolov5n", 3, "train images nowhere do not exist"),
        ("--data shapes:4 --model yolov5q", 2, "did you mean yolov5"),
        ("--data shapes:4 --cfg no.cfg", 2, "no.cfg"),
        ("--data shapes:4 --weights folder/w.pt", 3, "weights file folder/w.pt does not exist"),
        ("--data shapes:4 --weights yolov3-tiny", 3, "no published digest"),
        ("--data shapes:4 --weights yolov5s.pt", 3, "YOLOFLEET_OFFLINE is set"),
    ],
)
def test_a_dry_run_fails_where_the_run_would_for_lack_of_a_file(cli, tmp_path, monkeypatch, line, code, says):
    monkeypatch.setenv("YOLOFLEET_OFFLINE", "1")
    images = small_shapes(tmp_path, images=2, val_images=2).parent / "images" / "train"
    (tmp_path / "only_train.yaml").write_text(f"train: {json.dumps(str(images))}\nnames: [a, b, c, d]\n")
    (tmp_path / "lost.yaml").write_text(f"train: nowhere\nval: {json.dumps(str(images))}\nnames: [a]\n")
    before = sorted(tmp_path.rglob("*"))
    rehearsed, out, err = cli("train", *line.split(), "--device", "cpu", "--dry-run")
    assert (rehearsed, "would run" in out) == (code, True) and says in err
    assert sorted(tmp_path.rglob("*")) == before
    ran, _, err = cli("train", *line.split(), "--device", "cpu")
    assert ran == code, err


def test_a_dry_run_downloads_nothing(cli, tmp_path, monkeypatch):
    monkeypatch.delenv("YOLOFLEET_OFFLINE", raising=False)
    before = sorted(tmp_path.rglob("*"))
    assert cli("train", "--data", "shapes", "--weights", "yolov5s.pt", "--device", "cpu", "--dry-run")[0] == 0
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="has GPUs, or may")
def test_a_dry_run_fails_where_a_gpu_is_not_there(cli):
    code, _, err = cli("train", "--data", "shapes", "--model", "yolov5n", "--device", "0,1", "--dry-run")
    assert code == 2 and "--device 0,1: no NVIDIA GPU here" in err


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has the device")
@pytest.mark.parametrize(
    "line",
    [
        "train --data shapes --model yolov5n --dry-run",
        "train --data shapes --model yolov5n",
        "tune --data shapes --model yolov5n",
        "val --data shapes --weights a.pt",
        "predict --source a.jpg --weights a.pt",
        "bench --weights a.pt",
    ],
)
def test_the_device_of_a_mac_is_refused_elsewhere_before_anything_starts(cli, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    code, _, err = cli(*line.split(), "--device", "mps")
    assert code == 2 and "--device mps is the GPU of a Mac" in err and "from : command line" in err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_on_a_mac_says_that_it_cannot_know_the_device(cli, monkeypatch):
    # for this module alone: others would look for a Mac's standard library
    monkeypatch.setattr(checks, "sys", SimpleNamespace(platform="darwin"))
    argv = ["train", "--data", "shapes", "--model", "yolov5n", "--device", "mps", "--dry-run"]
    code, _, err = cli(*argv)
    assert code == 0 and "cannot know whether torch finds the GPU of this Mac" in err
    code, _, err = cli(*argv, "--reduce", "exact")
    assert code == 2 and "--reduce exact rounds in 64 bits, which --device mps does not have" in err


def test_a_run_whose_devices_would_idle_is_refused_with_what_to_type(cli):
    argv = ["train", "--data", "shapes:2000", "--model", "yolov5n", "--device", "cpu:12", "--dry-run"]
    code, out, err = cli(*argv)  # steps of 64 images as 8 micro-batches of 8
    assert code == 2 and out.endswith("steps of 64 images: 8 micro-batches of 8\n")
    assert "4 of 12 devices get no work: a step of 64 images has 8 micro-batches of 8" in err
    assert "--micro-batch 4 (batch normalisation then sees 4 images), or 8 devices" in err
    assert cli(*argv, "--micro-batch", "4")[0] == 0
    argv[2] = "shapes"  # fewer than 1,000 images, whose steps are small
    code, out, _ = cli(*argv)
    assert code == 0
    assert "  warning: 10 of 12 devices get no work: a step of 16 images has 2 micro-batches of 8; " in out


def test_notes_are_printed_by_one_process_only(cli, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    code, _, err = cli("train", "--data", "shapes", "--model", "yolov5n", "--cos-lr", "--dry-run")
    assert code == 0 and "note: --cos-lr" not in err


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("detect", 2, "did you mean predict?"),
        ("sing", 2, "verbs: train, tune, val, predict"),
        ("data chekc x", 2, "did you mean check?"),
        ("--verson", 2, "--verson"),
        ("train coco.yaml", 2, "coco.yaml"),
        ("train", 2, "--data is missing"),
        ("train --data d --model m --config no.yaml", 2, "no.yaml does not exist"),
        ("train --data no.yaml --model yolov5n --evolve 3", 2, "no.yaml"),
        ("val --data d", 2, "--weights is missing"),
        ("predict --weights w", 2, "--source is missing"),
        ("predict --weights w --source s --conf-thres 2", 2, "--conf 2 is above 1"),
        ("data check", 2, "DATA"),
        ("data check no.yaml", 2, "no.yaml does not exist"),
        ("data make circles --out x", 2, "yolofleet data make shapes"),
        ("data make shapes --out x --images many", 2, "many"),
        ("checkpoints list nowhere", 2, "nowhere is not a folder"),
        ("checkpoints list .", 3, "has no checkpoint"),
    ],
)  # fmt: skip
def test_mistakes_end_with_one_message_and_their_exit_code(cli, line, code, says):
    found, out, err = cli(*line.split())
    assert found == code and says in err and out == ""
    assert sum("Error: " in text for text in err.splitlines()) == 1


TAKES = "is a setting of training that {verb} does not take"
SPELLED_AS_TRAIN = [  # as typed, its name, a setting of train and an old spelling that it does not take, and what it says of them
    ("plan", "plan fleets", "--threads 4", "--nosave", "does not change the prediction of plan"),
    ("plan fleets", "plan fleets", "--no-plots", "--hyp a.yaml", "does not change the prediction of plan fleets"),
    ("plan probe", "plan probe", "--epochs 3", "--noval", TAKES),
    ("bench train", "bench train", "--name a", "--nosave", TAKES),
    ("bench start", "bench start", "--name a", "--nosave", TAKES),
    ("bench scaling", "bench scaling", "--shares 1,2", "--noval", TAKES),
    ("tune", "tune", "--exist_ok", "--detach", TAKES),
    ("render slurm", "render slurm", "", "", ""),
    ("render kubernetes", "render kubernetes", "", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "name", "setting", "spelling", "says"), SPELLED_AS_TRAIN)
def test_errors_of_a_verb_with_the_spellings_of_train_name_the_verb(
    cli, typed, name, setting, spelling, says
):
    code, _, err = cli(*typed.split(), "--zzz")
    assert code == 2 and f"ConfigError: {typed} has no --zzz\n" in err
    assert f"yolofleet {name} --help lists them" in err
    for words in filter(None, (setting, spelling)):
        code, _, err = cli(*typed.split(), *words.split())
        assert code == 2 and f"ConfigError: {words.split()[0]} {says.format(verb=typed)}\n" in err


def test_every_verb_with_the_spellings_of_another_is_tried_above():
    def verbs(group, path):
        for name in group.members:
            member = group.get_command(None, name)
            if isinstance(member, Verbs):
                yield from verbs(member, f"{path}{name} ")
            elif member.spelled_as in SPELLINGS and member.spelled_as != f"{path}{name}":
                yield f"{path}{name}"

    assert set(verbs(APP, "")) == {name for _, name, *_ in SPELLED_AS_TRAIN}


def test_plan_takes_the_model_of_a_configuration_and_not_its_recipe(cli):
    words = "-c ppyoloe_crn_s_300e_coco.yml --machine 8xA100 --images 1000 --val-images 100 --json -"
    code, out, err = cli("plan", *words.split())
    assert code == 0 and "-c ppyoloe_crn_s_300e_coco.yml is now --model ppyoloe-s" in err
    assert json.loads(out)["workload"]["network"]["name"] == "ppyoloe-s"


def test_a_mistake_below_a_group_of_verbs_names_the_group(cli):
    code, _, err = cli("data", "check", "--zzz")
    assert code == 2 and "data check has no --zzz" in err and "yolofleet data check --help lists them" in err


def test_a_failure_shows_its_traceback_when_asked(capsys, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_TRACEBACK", "1")
    assert main(["train"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and "--data is missing" in err


def test_our_own_fault_is_shown_as_one(capsys, monkeypatch):
    monkeypatch.setattr("yolofleet.cli.app.APP.invoke", lambda *a, **k: 1 / 0)
    assert main(["train"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err and "this is a bug in yolofleet" in err


def test_a_broken_pipe_elsewhere_is_not_taken_for_a_reader_that_left(capsys, monkeypatch):
    def broken(*_args, **_kwargs):
        raise BrokenPipeError("a worker is gone")

    monkeypatch.setattr("yolofleet.cli.app.APP.invoke", broken)
    assert main(["train"]) == 1
    assert "a worker is gone" in capsys.readouterr().err


def test_ctrl_c_ends_in_a_word(cli, monkeypatch):
    class Keyboard(io.StringIO):
        def readline(self, size=-1):
            signal.raise_signal(signal.SIGINT)
            return ""

    monkeypatch.setattr(sys, "stdin", Keyboard())
    code, out, err = cli("doctor", "--log", "-")
    assert (code, out, err.strip()) == (130, "", "interrupted")


def test_a_reader_that_leaves_early_gets_no_traceback():
    argv = [sys.executable, "-m", "yolofleet", "train", "--data", "shapes", "--model", "m", "--dry-run"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141  # as other programs in a pipe


@pytest.mark.parametrize("lines", [250, pytest.param(800, marks=pytest.mark.slow)])
def test_random_flags_and_values_never_end_in_a_traceback(capsys, lines):
    """Command lines from a fixed seed: known and mangled flags with values of every kind."""
    draw = random.Random(20)
    values = ["", "-1", "0", "1", "3", "1e-3", "nan", "inf", "true", "x", "0,1", "cpu:2", "é\n", "--", "-", "=", "a=b",
              "9" * 30, "{", "[1", "*a", "&a", "!!x", "none", ".", "\x00", "a" * 5000, "lr0=1", "lr0={", "\udcff"]  # fmt: skip
    flags = {
        verb: [flag_of(name, field) for name, field in model.model_fields.items()] + list(SPELLINGS[verb])
        for verb, model in (("train", TrainConfig), ("val", ValConfig), ("predict", PredictConfig))
    }
    codes = set()
    for _ in range(lines):
        verb = draw.choice(list(flags))
        # a setting that is missing ends each of them before any work begins
        argv = [
            verb,
            "--config" if draw.random() < 0.1 else "--data" if verb == "train" else "--weights",
            "here",
        ]
        for _ in range(draw.randint(0, 5)):
            flag = draw.choice(flags[verb])
            if draw.random() < 0.2:
                at = draw.randrange(len(flag) + 1)
                flag = flag[:at] + draw.choice("-_=xé ") + flag[at:]
            shape = draw.random()
            argv += (
                [flag]
                if shape < 0.3
                else [f"{flag}={draw.choice(values)}"]
                if shape < 0.5
                else [flag, draw.choice(values)]
            )
        argv += {
            "train": ["--model=", "--cfg=", "--weights=", "--resume="],
            "val": ["--data="],
            "predict": ["--source="],
        }[verb]
        code = main(argv)
        err = capsys.readouterr().err
        assert "Traceback" not in err and code in (0, 2), f"{argv}: exit {code}\n{err}"
        codes.add(code)
    assert codes == {2}


# -- data


def test_a_set_is_made_in_an_empty_folder_only(cli):
    argv = ["data", "make", "shapes", "--out", "set", "--images", "6", "--val-images", "3", "--img", "96"]
    code, out, _ = cli(*argv)
    assert code == 0 and Path(out.strip()).is_file()
    assert cli(*argv)[0] == 2


def test_data_list_knows_the_built_in_sets(cli):
    code, out, _ = cli("data", "list")
    assert code == 0 and "shapes" in out and "coco128" in out


# -- files of a run


def test_checkpoints_are_listed_and_verified(cli, tmp_path):
    import torch

    from yolofleet.runs.checkpoint.store import CheckpointStore, Snapshot

    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    store = CheckpointStore(run / "checkpoints", keep=3)
    for step in (5, 10):
        store.save(Snapshot(step, {"a": torch.ones(8)}, {"x": 1}))
        store.flush()
    code, out, _ = cli("checkpoints", "list", str(run))
    assert code == 0 and [line.split()[1] for line in out.splitlines()] == ["10", "5"]
    assert cli("checkpoints", "verify", str(run))[0] == 0

    broken = run / "checkpoints" / "step-00000010.safetensors"
    content = bytearray(broken.read_bytes())
    content[-1] ^= 1
    broken.write_bytes(content)
    code, out, err = cli("checkpoints", "verify", str(run))
    assert code == 3 and "BROKEN" in out.splitlines()[0] and "whole" in out.splitlines()[1]
    assert "1 of 2 checkpoints are broken" in err


def test_the_folder_of_a_run_means_its_best_weights_as_for_val_and_export(cli, tmp_path):
    (tmp_path / "run/weights").mkdir(parents=True)
    assert (
        cli("weights", "convert", str(reference("weights/yolov5n.pt")), "run/weights/best.safetensors")[0]
        == 0
    )
    for verb in ("inspect", "verify"):
        code, out, _ = cli("weights", verb, "run")
        assert code == 0 and str(Path("run/weights/best.safetensors")) in out

    (tmp_path / "bad.pt").write_text("no")
    code, _, err = cli("weights", "inspect", "bad.pt")
    assert code == 3 and "bad.pt is not a torch checkpoint" in err and "docs/models.md" in err


# -- the scripts in the root folder


SCRIPTS = {
    **{"train.py": "train", "val.py": "val", "detect.py": "predict", "export.py": "export"},
    **{f"segment/{verb}.py": verb for verb in ("train", "val", "predict")},
}


@pytest.mark.parametrize(("script", "is_installed"), sampled(product(SCRIPTS, (True, False)), 3))
def test_root_scripts_work_from_anywhere_installed_or_not(script, is_installed, tmp_path):
    if is_installed:
        argv = [sys.executable, str(ROOT / script), "--help"]
    else:  # what an environment with the dependencies but without yolofleet sees
        site = next(Path(p) for p in sys.path if p.endswith("site-packages") and (Path(p) / "click").is_dir())
        code = (
            f"import sys, runpy; sys.path[0] = {str(ROOT)!r}; sys.path.append({str(site)!r}); sys.argv = [{script!r}, '--help'];"
            f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')"
        )
        argv = [sys.executable, "-S", "-c", code]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stdout.startswith(f"Usage: yolofleet {SCRIPTS[script]}"), done.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "detect train data=d.yaml model=yolov5n.pt epochs=1",
            "yolofleet train --data d.yaml --weights yolov5n.pt --epochs 1",
        ),
        ("detect predict model=a.pt source=x", "yolofleet predict --weights a.pt --source x"),
        ("detect export model=a.pt half=True nms=False", "yolofleet export --weights a.pt --half --no-nms"),
        ("detect --source x", "did you mean predict?"),
    ],
)
def test_commands_of_ultralytics_are_refused_with_the_whole_command(cli, line, says):
    code, _, err = cli(*line.split())
    assert code == 2 and f"  try  : {says}\n" in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--data nowhere.yaml --model yolov5n --device cpu", ("data set nowhere.yaml does not exist", "looked in")),
        pytest.param("--data shapes --modl yolov5n", ("train has no --modl", "command line"), marks=pytest.mark.slow),
        pytest.param("--data shapes --model yolov5n --device 98,99", ("--device 98,99: no CUDA device 98", "command line"), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_an_error_of_all_ranks_of_a_torchrun_is_printed_once_and_in_its_report(line, words, tmp_path):
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    argv += [str(ROOT / "train.py"), *line.split()]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=900)
    printed, _, report = done.stderr.partition("Traceback (most recent call last)")
    what, source = words
    assert done.returncode == 1 and printed.count(f"ConfigError: {what}") == 1, done.stderr
    assert printed.count(f"  from : {source}") == printed.count("  try  : ") == 1
    cause = report.partition("Root Cause")[2]
    assert what in cause and source in cause and "try  : " in cause and report.count(what) == 1


@pytest.mark.parametrize(
    "problem",
    [
        ImportError("libssl-1.so: failed to map segment from shared object"),
        ImportError("x.so: cannot create shared object descriptor: Cannot allocate memory"),
        OSError(12, "Cannot allocate memory"),
        MemoryError(),
    ],
)
def test_a_library_that_gets_no_memory_makes_a_message(problem, tmp_path, monkeypatch, capsys):
    """As under `ulimit -v 1000000`, where OpenCV cannot be imported."""

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "yolofleet.data.datasets.shapes":
                raise problem

    monkeypatch.delitem(sys.modules, "yolofleet.data.datasets.shapes", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert main(["data", "make", "shapes", "--out", str(tmp_path / "out")]) == 3
    said = capsys.readouterr().err
    assert "this machine has too little memory" in said and "Traceback" not in said and "ulimit -v" in said
