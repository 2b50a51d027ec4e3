"""The archive for an issue report: what it holds, and that secrets are not in it wherever they stood."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

import pytest

from yolofleet.cli import main
from yolofleet.fleet.doctor.findings import Finding
from yolofleet.fleet.doctor.support import HEAD_BYTES, TAIL_BYTES, write_support
from yolofleet.redaction import Redaction

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
        **{
            "MY_SERVICE_TOKEN": s[6],
            "SLURM_JOB_USER": USER,
            "NCCL_API_KEY": s[15],
            "DATABASE_PASSWORD": s[16],
        },
        **{"http_proxy": f"http://me:{s[17]}@proxy:3128", "HOME": str(run.parents[1]), "LOGNAME": USER},
    }.items():
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
    assert (
        "loss 0.125" in inside["run/logs/rank-0.log"] and "weights: ~/yolov5n.pt" in inside["run/config.yaml"]
    )
    assert (
        "DistBackendError: NCCL error" in inside["run/logs/rank-0.log"]
        and "torch==" in inside["versions.txt"]
    )
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
    long = b"begin\n" + b"." * (HEAD_BYTES + TAIL_BYTES + (2 << 20)) + b"\nend\n"
    (run / "logs" / "rank-3.log").write_bytes(long)
    write_support([Finding("a", "ok", "", "x")], {}, str(run), io.StringIO())
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
        ('{"max_tokens": 5, "n": 1}', '{"max_tokens": "[removed]", "n": 1}'),
        ('{"author": "someone"}', '{"author": "someone"}'),
        ("a sha256 " + "0af1" * 16, "a sha256 " + "0af1" * 16),
        ("wandb " + "0af1" * 10, "wandb [removed]"),
        ("/home/bob/x and C:\\Users\\bob\\x", "/home/[user]/x and C:\\Users\\[user]\\x"),
        ("ghp_" + "a1" * 18, "[removed]"),
        ("eyJhbGciOi.eyJzdWIi.c2ln", "[removed]"),
        ("http://a.b/c?key=1, https://d.e/f", "http://a.b/c?[removed], https://d.e/f"),
        ("http://a.b/" + "c" * 5000 + "?key=1", "http://a.b/" + "c" * 5000 + "?[removed]"),
        ("----token abcdef", "----token [removed]"),
        (r"a\n--api-key abcdef\n", r"a\n--api-key [removed]\n"),
        (r'{"line": "token=\"a b\" c"}', r'{"line": "token=\"[removed]\" c"}'),
        ("DB_PASS=s3cr3t KEY=abcd99 x", "DB_PASS=[removed] KEY=[removed] x"),
        ("PGPASS: s3cr3t, LICENSE_KEY='AA-BB'", "PGPASS: [removed], LICENSE_KEY='[removed]'"),
        ("pass: s3cr3t\nmysql pass=x1 y", "pass: [removed]\nmysql pass=[removed] y"),
        ("the password is s3cr3t.", "the password is [removed]"),
        ("micro_batches_per_pass: 4\nfirst pass: 3 s", "micro_batches_per_pass: 4\nfirst pass: 3 s"),
        ("monkey: 1, keypoints: 17, key: value", "monkey: 1, keypoints: 17, key: value"),
        (
            "a:\n  password: >\n    one\n\n    two\n  b: 1",
            "a:\n  password: [removed]\n    [removed]\n\n    [removed]\n  b: 1",
        ),
        ("token:\n- one\n- two\nb:\n- 1", "token:\n[removed]\n[removed]\nb:\n- 1"),
        ('{\n "password": [\n  "a"\n ],\n "b": 1}', '{\n "password": [\n  [removed]\n ],\n "b": 1}'),
        ('{"password": ["a", {"x": "b"}], "n": 1}', '{"password": "[removed]", "n": 1}'),
        ('{"secret": {"a": {"b": "x"}}, "n": 1}', '{"secret": "[removed]", "n": 1}'),
        ('PASSWORD="two\nlines"\nb=1', 'PASSWORD="[removed]"\nb=1'),
        ("https://user:p@ss@word@host/a", "https://[removed]@host/a"),
        ("mount //user:pw@host/share", "mount //[removed]@host/share"),
        ("https://hooks.slack.com/services/T01/B02/xyz", "https://hooks.slack.com/services/[removed]"),
        ("npm_" + "a1" * 18, "[removed]"),
        ("pypi-" + "Ag" * 20, "[removed]"),
        ("SG." + "a" * 22 + "." + "b" * 43, "[removed]"),
        ("dckr_pat_" + "a" * 27, "[removed]"),
        ("ya29." + "a" * 40, "[removed]"),
    ],
)
def test_what_the_rules_remove(text: str, clean: str) -> None:
    assert Redaction({})(text) == clean


@pytest.mark.parametrize(
    ("part", "size"),
    [
        ("eyJhbGciOi-", 5 << 20),
        ("http://", 1 << 18),
        ("token='\"", 1 << 18),
        ("-", 1 << 18),
        ("token=[", 1 << 18),
        ("token={a", 1 << 18),
        ("//a:b", 1 << 18),
        ("A_KEY", 1 << 18),
        ("token=\n", 1 << 18),
        ("token='\n", 1 << 18),
    ],
)
def test_a_long_line_is_cleaned_in_linear_time(part: str, size: int) -> None:
    """A rule that could begin at every part would take hours if each attempt read the rest of the line."""
    text = part * (size // len(part)) + f" password={SECRETS[0]}"
    assert SECRETS[0] not in Redaction({})(text)


def test_root_and_short_values_stay() -> None:
    clean = Redaction({"TOKEN": "a", "KEY_AUTH": "longer"}, home="/", user="root")
    assert clean("a root / longer") == "a root / [removed]"


def test_variables_with_telling_names_and_the_home_folder() -> None:
    names = ["DB_PASS", "KEY", "SSH_KEY", "PGPASS", "ENCRYPTION_KEY", "MY_PW", "X_CREDS"]
    secrets = {name: f"value-of-{number}" for number, name in enumerate(names)}
    clean = Redaction(
        {**secrets, "PWD": "/work/here", "KEYBOARD": "german", "BYPASSED": "maybe"}, home="/root"
    )
    assert clean(" ".join(secrets.values())) == " ".join(["[removed]"] * len(names))
    assert clean("german maybe /work/here") == "german maybe /work/here"
    assert clean("/root/a file:///root/b /rooted") == "~/a file://~/b /rooted"
    assert clean("mysql://root:@localhost") == "mysql://[removed]@localhost"
