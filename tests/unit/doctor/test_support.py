"""The archive for an issue report: what it holds, and that secrets are not in it wherever they stood."""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from pathlib import Path

import pytest

from yolofleet.cli import doctor, main
from yolofleet.config.schema import TrainConfig
from yolofleet.fleet.doctor.findings import Finding
from yolofleet.support.redaction import REMOVED, Redaction

pytestmark = pytest.mark.long

SECRETS = [f"n0body-may-see-{number}x" for number in range(20)]
USER = "annalena"


def archive_of(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a secret in each kind of place."""
    s = SECRETS
    folder = tmp_path / "home" / USER / "runs" / "exp"
    (folder / "logs").mkdir(parents=True)
    (folder / "weights").mkdir()
    (folder / "weights" / "best.safetensors").write_bytes(b"weights")
    (folder / "config.yaml").write_text(
        f"data: https://reader:{s[0]}@example.org/data.zip?sig={s[1]}&x=1\n"
        f"preempt_notice: curl -H 'Authorization: Bearer {s[2]}' -u bot:{s[3]} http://169.254.169.254/\n"
        f"weights: {folder.parents[1]}/yolov5n.pt\n"
    )
    (folder / "logs" / "rank-0.log").write_text(
        f"started: ['python', 'train.py', '--api-key', '{s[4]}', '--password={s[5]}']\n"
        f"the value {s[6]} of a variable, without its name\n"
        f'export AWS_SECRET_ACCESS_KEY={s[7]}\nwandb login: API key = "{s[8]}"\nCookie: id=1; session={s[9]}\n'
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{s[10]}\n-----END OPENSSH PRIVATE KEY-----\n"
        f"git clone https://{s[11]}@github.com/x/y\nmail to {USER}.m@example.org, ssh {USER}@node-b\nloss 0.125\n"
        "torch.distributed.DistBackendError: NCCL error\n"
    )
    (folder / "events.jsonl").write_text(
        json.dumps({"kind": "start", "hub_token": s[12], "argv": f'--token "{s[13]}"', "step": 3}) + "\n"
    )
    (folder / "logs" / "error-rank-0.json").write_text(
        json.dumps({"message": f"password: '{s[14]}'", "rank": 0})
    )
    (folder / "results.csv").write_text("epoch,step\n1,2\n")
    return folder


def test_no_secret_is_in_the_archive(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    s = SECRETS
    for name, value in {
        "MY_SERVICE_TOKEN": s[6], "SLURM_JOB_USER": USER, "NCCL_API_KEY": s[15], "DATABASE_PASSWORD": s[16],
        "http_proxy": f"http://me:{s[17]}@proxy:3128", "HOME": str(run.parents[1]), "LOGNAME": USER,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--support", "--log", str(run)]) in (0, 4)
    said = capsys.readouterr().out
    assert "yolofleet-support.zip: 10 files" in said and "nothing was sent" in said
    files = archive_of(tmp_path / "yolofleet-support.zip")
    assert {name.removeprefix("yolofleet-support/") for name in files} == {
        *("README.txt", "findings.txt", "findings.json", "facts.json", "versions.txt", "run/config.yaml"),
        *("run/results.csv", "run/events.jsonl", "run/logs/rank-0.log", "run/logs/error-rank-0.json"),
    }
    for name, text in files.items():
        found = [secret for secret in [*SECRETS, USER, str(run.parents[1])] if secret in text]
        assert not found, f"{name}: {found}"
    inside = {name.removeprefix("yolofleet-support/"): text for name, text in files.items()}
    log = inside["run/logs/rank-0.log"]
    assert "loss 0.125" in log and "DistBackendError: NCCL error" in log
    assert "weights: ~/yolov5n.pt" in inside["run/config.yaml"] and "torch==" in inside["versions.txt"]
    assert json.loads(inside["run/events.jsonl"])["step"] == 3
    assert json.loads(inside["facts.json"])["variables"]["NCCL_API_KEY"] == "[removed]"
    assert json.loads(inside["findings.json"])["findings"]


def test_without_a_run_and_never_over_an_older_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yolofleet-support.zip").write_bytes(b"mine")
    (tmp_path / "yolofleet-support2.zip").symlink_to("nowhere")
    assert main(["doctor", "--quick", "--support", "--json", "-"]) in (0, 4)
    out = capsys.readouterr()
    assert json.loads(out.out)["findings"] and "yolofleet-support3.zip: 5 files" in out.err
    assert (tmp_path / "yolofleet-support.zip").read_bytes() == b"mine"
    if os.name == "posix":  # what the redaction does not recognise is for the user alone
        assert (tmp_path / "yolofleet-support3.zip").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "nowhere").exists()


def test_only_a_folder_can_be_archived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for log in ("-", str(tmp_path / "a.log")):
        assert main(["doctor", "--support", "--log", log]) == 2
        assert "not the folder of a run" in capsys.readouterr().err


def test_links_of_a_run_folder_are_not_followed_and_long_logs_are_cut(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "id_rsa").write_text("private")
    (run / "logs" / "rank-1.log").symlink_to(tmp_path / "id_rsa")
    (run / "results.csv").unlink()
    (run / "results.csv").symlink_to(tmp_path / "id_rsa")
    os.mkfifo(run / "logs" / "rank-2.log")
    monkeypatch.setattr(doctor, "HEAD_BYTES", 1000)
    monkeypatch.setattr(doctor, "TAIL_BYTES", 3000)
    long = b"begin\n" + b"." * (4000 + (2 << 20)) + b"\nend\n"
    (run / "logs" / "rank-3.log").write_bytes(long)
    doctor.write_support([Finding("a", "ok", "", "x")], {}, str(run), io.StringIO())
    files = archive_of(tmp_path / "yolofleet-support.zip")
    assert not any(text == "private" for text in files.values())
    assert "cannot be read" in files["yolofleet-support/run/logs/rank-1.log"]
    assert "cannot be read" in files["yolofleet-support/run/logs/rank-2.log"]
    cut = files["yolofleet-support/run/logs/rank-3.log"]
    assert cut.startswith("begin\n") and cut.endswith("\nend\n") and "2.0 MiB left out" in cut


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("token is expired", "token is expired"),
        ("InvalidToken: The token has expired", "InvalidToken: [removed]"),
        ('{"max_token": 5, "n": 1}', '{"max_token": "[removed]", "n": 1}'),
        ('{"author": "someone"}', '{"author": "someone"}'),
        ("a sha256 " + "0af1" * 16, "a sha256 " + "0af1" * 16),
        ("wandb " + "0af1" * 10, "wandb [removed]"),
        ("C:\\Users\\bob\\x", "C:\\Users\\[user]\\x"),
        ("http://a.b/" + "c" * 5000 + "?key=1", "http://a.b/" + "c" * 5000 + "?[removed]"),
        ("----token abcdef", "----token [removed]"),
        (r"a\n--api-key abcdef\n", r"a\n--api-key [removed]\n"),
        (r'{"line": "token=\"a b\" c"}', r'{"line": "token=\"[removed]\" c"}'),
    ],
)
def test_what_the_rules_remove(text: str, clean: str) -> None:
    assert Redaction({})(text) == clean


@pytest.mark.parametrize(
    "part",
    [
        "eyJhbGciOi-", "http://", "token='\"", "-", "a: 1\n", "token:\n ", "pass", "password is ", "mysql ",
        "A_TOKEN ", "A_", "123456:", "hf_", "AKIA", "token: x\n", "https://a@",
    ],
)  # fmt: skip
def test_a_long_line_is_cleaned_in_linear_time(part: str) -> None:
    """A rule that could begin at every part would take hours if each attempt read the rest of the line."""
    size = 1 << 20 if part.startswith("eyJ") else 1 << 18
    text = part * (size // len(part)) + f" password={SECRETS[0]}"
    assert SECRETS[0] not in Redaction({})(text)


def test_root_and_short_values_stay() -> None:
    clean = Redaction({"TOKEN": "a", "KEY_AUTH": "longer"}, home="/", user="root")
    assert clean("a root / longer") == "a root / [removed]"


def test_variables_whose_name_holds_a_secret_part() -> None:
    names = [
        "DB_PASS", "KEY", "SSH_KEY", "ENCRYPTION_KEY", "PGPASS", "LICENSE_KEY", "DB_PW", "dbPass", "SVC_CRED", "GH_PAT",
        "APP_AUTH", "LOGIN_PWD", "USER_PASSWD", "JWT_SECRET", "A_TOKEN", "GCP_CREDENTIALS", "SMTPPASS", "MyKey", "KEY_DATA",
        "AZURE_STORAGE_CONNECTION_STRING",
    ]  # fmt: skip
    values = {name: f"v4lue-{number}'x" for number, name in enumerate(names, 10)}
    clean = Redaction(values)
    for name, value in values.items():
        assert clean(f"a {value} b") == f"a {REMOVED} b", name
    assert clean(json.dumps({"x": 'é "' + values["KEY"]})) == json.dumps({"x": f'é "{REMOVED}'})


def test_variables_that_are_no_secret() -> None:
    names = ["PWD", "OLDPWD", "MONKEY", "KEYBOARD", "AUTHOR", "COMPASS", "BYPASS", "PASSES", "KEYPOINTS"]
    text = " ".join(f"value-{name}" for name in names)
    assert Redaction({name: f"value-{name}" for name in names})(text) == text
    assert Redaction({"TOKENIZERS_PARALLELISM": "false", "USE_TOKEN": "true", "A_KEY": "train"})(
        "false true train"
    ) == ("false true train")


@pytest.mark.parametrize(
    "text",
    [
        '{"password": ["hid", "hid"], "n": 1}',
        '{"password": {"a": {"b": ["hid", 7]}, "c": "hid"}, "n": 1}',
        '{\n  "password": [\n    "hid"\n  ],\n  "n": 1\n}\n',
        '{"n": 1}\n{"password": ["hid"], "n": 1}\n',
        'n: 1 INFO {"password": ["hid", ["hid"], "hid"]}',
        'PASSWORD="hid\nhid it\'s\nhid"\nn: 1',
        "n: 1 PASSWORD='hid hid\n",
        '["--api-key", "hid", "n: 1"]',
        "{'password': 'it\\'s hid', 'n': 1}",
    ],
)
def test_everything_below_a_secret_name_is_removed(text: str) -> None:
    clean = Redaction({})(text)
    assert "hid" not in clean and REMOVED in clean
    assert re.search("""n["']?: 1""", clean)
    if text.startswith("{") and text.count("\n") != 2 and '"' in text:
        json.loads(clean)


@pytest.mark.parametrize("end", ["", "\n", "\nn: 1\n"])
@pytest.mark.parametrize("line", ["password: hid, hid", "  - db-password: hid hid hid", "'token': hid hid"])
def test_the_whole_value_of_a_line_is_removed(line: str, end: str) -> None:
    clean = Redaction({})(line + end)
    assert clean == f"{line.partition(':')[0]}: {REMOVED}{end}"
    assert Redaction({})(json.dumps({"x": line + end})) == json.dumps({"x": clean})


@pytest.mark.parametrize(
    "text",
    [
        "db_pass = hid", "password => hid", "LICENSE_KEY=hid", "FOO_PAT=hid", "CLEARML_API_SECRET_KEY=hid", "COMET_API_KEY=hid",
        "NEPTUNE_API_TOKEN=hid", "ssh_key: hid", "Authorization: Token hid", "//hid:hid@host",
        "get https://b.s3.amazonaws.com/k?X-Amz-Credential=hid&X-Amz-Signature=hid123&X-Amz-Security-Token=hid",
        "https://storage.googleapis.com/b/k?X-Goog-Signature=hid&X-Goog-Expires=600", "X-Amz-Signature=hid",
        "https://a.blob.core.windows.net/c/b?sv=2024&sig=hid%3D&se=1", "AccountName=a;AccountKey=hid==;Endpoint=b",
        "WANDB_API_KEY=hid", "export AWS_ACCESS_KEY_ID=hid", "AWS_SECRET_ACCESS_KEY: hid", "AWS_SESSION_TOKEN='hid'",
        "--hub-token hid", "--wandb-key=hid", "Authorization: AWS4-HMAC-SHA256 hid, Signature=hid",
        "s3://hid:hid@bucket/x", "https://user:hid@ss@hid@host/", "postgres://hid:hid@host:5/db", "mysql://root:@localhost",
    ],
)  # fmt: skip
def test_keys_and_passwords_in_text(text: str) -> None:
    clean = Redaction({}, home="/root", user="root")(f"x {text} y")
    assert "hid" not in clean and REMOVED in clean and "~" not in clean


@pytest.mark.parametrize(
    "text",
    [
        "secret of the run", "the password is wrong", "the secret is known to all hosts", "token is expired",
        "token bucket", "tokens: 4096", "max_tokens: 5", '{"max_tokens": 5, "tokens": [1, 2]}', "tokens:\n- 1\n- 2\n",
        "12 tokens/s: 3", "keypoints: 17", "monkey: george", "key: value", "sort_key: loss", "--shares 3",
        "cls_pw: 1.0\nobj_pw: 1.5\n", "forward pass: 3 ms", "pass: 2/3", "micro_batches_per_pass: auto",
        "--micro-batches-per-pass x", "compass: north", "epoch: 3\n  mAP50: 0.5\n  mAP50-95: 0.3\n",
        "author: someone\n  else\n", "sha256: " + "0af1" * 16, "https://example.org/a//b", "// a comment",
        "ssh-key-refused: the host refuses the key", "shares:\n- 1\n",
    ],
)  # fmt: skip
def test_harmless_text_stays(text: str) -> None:
    assert Redaction({})(text) == text


def test_no_setting_is_taken_for_a_secret() -> None:
    text = "".join(f"{name}: value\n" for name in TrainConfig.model_fields)
    assert Redaction({})(text) == text


def test_the_home_folder_is_replaced_as_a_whole_path() -> None:
    clean = Redaction({}, home="/svc")
    text = "/svc/x '/svc' HOME=/svc, file:///svc/x. /svc"
    assert clean(text) == "~/x '~' HOME=~, file://~/x. ~"
    for same in ("/svcfs", "/svc-2/x", "/svc.old", "/mnt/svc/x", "nfs://svc/x", "a/svc", "//svc/x"):
        assert clean(same) == same
