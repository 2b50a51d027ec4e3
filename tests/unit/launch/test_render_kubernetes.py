"""The manifest is what Kubernetes' own schemas allow, and says what was asked for."""

from __future__ import annotations

import os
import re
from typing import Any

import kubernetes_validate as validator
import pytest
import yaml

from yolofleet.cli.app import run
from yolofleet.config.load import resolve_train
from yolofleet.fleet.launch.machines import scheduled_run
from yolofleet.fleet.launch.schedulers.kubernetes import KubernetesSettings, render
from yolofleet.fleet.launch.schedulers.scheduler import read_settings
from yolofleet.support.errors import ConfigError

JOB = "image=registry.example/yolofleet:1,nodes=2,gpus=8,claim=work,memory=64Gi,cpus=32,namespace=vision"
HOSTILE = [
    "$(JOB_COMPLETION_INDEX)",
    "$$(JOB_UID)$",
    "a: b # c",
    "'\"\n- x: {{}}\n---\nkind: Pod",
    "&a *a !!python/object:os.system",
    "yes",
    "1e3",
    "Grüße 狗",
    " x ",
]


def manifest(settings: str = JOB, **given: Any) -> str:
    given = {"data": "/data/coco.yaml", "model": "yolov5n"} | given
    config, _ = resolve_train(given)
    job = read_settings(KubernetesSettings, [settings], "--kubernetes")
    return render(job, scheduled_run(config, given, "", job, "--kubernetes"))


def parts(text: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Service, job, and the job's container."""
    service, job = yaml.safe_load_all(text)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return service, job, container


def expanded(word: str, variables: dict[str, str]) -> str:
    """What the kubelet makes of a word: $(NAME) is replaced when it is known, $$ is $."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))?",
        lambda m: "$" if m[1] == "$" else variables.get(m[2], m[0]) if m[2] else m[0],
        word,
    )


@pytest.mark.parametrize("version", ["1.31", "1.34", "1.37"])
@pytest.mark.parametrize("settings", [JOB, "image=a", JOB + ",name=n,mount=/a b,grace_s=600,shm=1.5Gi"])
def test_the_schemas_of_kubernetes_allow_it(settings: str, version: str) -> None:
    for document in yaml.safe_load_all(manifest(settings)):
        validator.validate(document, version, strict=True)
    _, job, _ = parts(manifest(settings))
    job["spec"]["completionMod"] = "Indexed"
    with pytest.raises(validator.ValidationError):  # it does look
        validator.validate(job, version, strict=True)


def test_a_job_of_two_pods(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        *("render", "kubernetes", "--data", "/data/coco.yaml", "--model", "yolov5n", "--batch-size", "64"),
        "--name",
        "Cats 2",
    ]
    assert run([*argv, "--kubernetes", JOB]) == 0
    service, job, container = parts(capsys.readouterr().out)
    assert container["command"] == [
        "python", "-m", "yolofleet.fleet.launch.schedulers.agent", "--nnodes=2", "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--master-addr=cats-2-0.cats-2", "--master-port=29400", "--nproc-per-node=8", "-m", "yolofleet", "train",
        "--data=/data/coco.yaml", "--model=yolov5n", "--batch=64", "--name=Cats 2-$(JOB_UID)",
        "--exist-ok", "--resume=auto",
    ]  # fmt: skip
    pod = job["spec"]["template"]
    assert service["metadata"]["name"] == pod["spec"]["subdomain"] == job["metadata"]["name"] == "cats-2"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert {service["metadata"]["namespace"], job["metadata"]["namespace"]} == {"vision"}
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (
        2,
        2,
        "Indexed",
    )
    assert job["spec"]["backoffLimit"] == 2 * 20, "a failure of the run fails both pods"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "32", "memory": "64Gi"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["spec"]["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert container["workingDir"] == "/data" and pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 120
    assert container["lifecycle"]["preStop"]["exec"]["command"][-1] == "kill -USR1 1; sleep 120"
    # user 1000 of the images may write to the volume
    assert pod["spec"]["securityContext"]["fsGroup"] == 1000
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_first_line_shows_the_log_of_the_pod_with_rank_0() -> None:
    selector = "batch.kubernetes.io/job-name=cats,batch.kubernetes.io/job-completion-index=0"
    first = manifest(name="cats").splitlines()[0]
    assert first.endswith(f"kubectl logs -f --namespace vision --selector {selector}")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_names_stay_words(hostile: str) -> None:
    _, job, container = parts(manifest(name=hostile, project=hostile, weights=hostile))
    variables = {"JOB_UID": "7f", "JOB_COMPLETION_INDEX": "1"}
    words = [expanded(word, variables) for word in container["command"]]
    assert words[words.index("train") + 3 :] == [
        f"--project={hostile}",
        f"--weights={hostile}",
        f"--name={hostile}-7f",
        "--exist-ok",
        "--resume=auto",
    ]
    assert "--node-rank=1" in words
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", job["metadata"]["name"])


@pytest.mark.parametrize("name", ["x" * 200, "-", "9 lives", "x" * 51 + "-y"])
def test_names_that_kubernetes_does_not_allow_are_changed(name: str) -> None:
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", parts(manifest(name=name))[1]["metadata"]["name"])


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ("nodes=1", "image="),
        ("image=a,nodes=2", "claim="),
        ("image=a,memory=lots", "memory"),
        ("image=a,name=Cats", "name"),
        ("image=a,gpu=2", "gpus"),
    ],
)
def test_what_is_missing_or_wrong_is_said(settings: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        manifest(settings)


def test_a_path_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"UTF-8|is not a string"):  # pydantic before 2.8 refuses it
        manifest(weights=os.fsdecode(b"/data/\xff"))


def test_data_and_copies_in_a_store_need_credentials_and_no_volume() -> None:
    settings = "image=a,nodes=2,secret=store,account=trainer"
    copied = {"checkpoint_to": "s3://bucket/runs/x"}
    with pytest.raises(ConfigError, match="claim="):
        manifest(settings, **copied)
    _, job, container = parts(manifest(settings, data="s3://bucket/coco/data.yaml", **copied))
    assert container["envFrom"] == [{"secretRef": {"name": "store"}}]
    pod = job["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "trainer" and [volume["name"] for volume in pod["volumes"]] == ["shm"]
    assert {"--checkpoint-to=s3://bucket/runs/x", "--resume=auto"} <= {*container["command"]}
