"""Render a run as an Indexed Job of Kubernetes with a headless service, as YAML for ``kubectl apply``.

Every pod is one machine with an agent (``fleet/launch/schedulers/agent.py``); the rendezvous is on pod 0. If a pod is evicted or its node
drained, its preStop hook sends SIGUSR1: the run saves, all pods end, Kubernetes starts them again, and the run resumes.
If a pod fails, the others lose their connections to it and end, and Kubernetes starts all of them again.
The project folder must be on a volume that all pods share, unless the data and the copies of the run are in a store.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from yolofleet.config.schema import Natural, setting
from yolofleet.fleet.launch.schedulers.scheduler import PERMANENT_CODES, JobSettings, ScheduledRun, Scheduler
from yolofleet.support.errors import ConfigError, Stopped
from yolofleet.support.system.children import SAFE_PATH
from yolofleet.support.text import shown

PORT = 29400
IMAGE_GROUP = 1000  # of the user of packaging/docker/Dockerfile and Dockerfile.cuda
LONGEST_NAME = 52  # a pod's host name has 63 characters: the job's name, a hyphen and the index
QUANTITY = r"^[0-9]{1,9}(\.[0-9]{1,3})?(m|[KMGT]i?)?$"
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SERVICE = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # names of services begin with a letter


class KubernetesSettings(JobSettings):
    """``--kubernetes``."""

    image: str = setting("", "container image with yolofleet", pattern=r"^([^\s]{1,500})?$")
    nodes: Natural = setting(1, "number of pods")
    gpus: int = setting(0, "GPUs of each pod", ge=0, le=64)
    cpus: str = setting("", "cores of each pod, as 16", pattern=f"{QUANTITY}|^$")
    memory: str = setting(
        "", "memory of each pod, as 64Gi; what lies in shm counts", pattern=f"{QUANTITY}|^$"
    )
    shm: str = setting("8Gi", "size of /dev/shm, which loader processes and NCCL need", pattern=QUANTITY)
    name: str = setting(
        "", "name of the job; default: of the run", pattern=rf"^({SERVICE})?$", max_length=LONGEST_NAME
    )
    namespace: str = setting("", "namespace", pattern=rf"^({LABEL})?$", max_length=63)
    claim: str = setting("", "persistent volume claim for data and results, shared by all pods", pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", max_length=253)  # fmt: skip
    secret: str = setting("", "secret whose values the pods get as environment variables: credentials of a store", pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", max_length=253)  # fmt: skip
    account: str = setting("", "service account of the pods, which a provider may let use a store", pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", max_length=253)  # fmt: skip
    mount: str = setting("/data", "where the claim is mounted; the working folder", pattern=r"^/[^:]*$")
    grace_s: int = setting(120, "seconds to save in when a pod is asked to end", ge=10, le=86400)
    retries: int = setting(20, "failures of the run after which the job is given up", ge=0)
    python: str = setting("python", "the Python of the image")

    @property
    def node_range(self) -> tuple[int, int]:
        return self.nodes, self.nodes

    @property
    def gpu_count(self) -> int:
        return self.gpus


def render(settings: KubernetesSettings, run: ScheduledRun) -> str:
    """Return the manifest, a Service and a Job, as YAML. Paths are those of the pods.

    Raises:
        ConfigError: there is no image, no volume that several pods share, or text that is not UTF-8.
    """
    if not settings.image:
        raise ConfigError(
            "--kubernetes needs image=...", hint="--kubernetes image=registry/yolofleet:1,nodes=2"
        )
    if settings.nodes > 1 and not settings.claim and not run.is_stored:
        raise ConfigError(
            f"--kubernetes nodes={settings.nodes}: the pods need a volume that they share, for data and checkpoints",
            hint="--kubernetes claim=NAME of a persistent volume claim (ReadWriteMany), or --data s3://... and --checkpoint-to",
        )
    name = settings.name or _label(run.name)
    labels = {"app.kubernetes.io/name": "yolofleet", "app.kubernetes.io/instance": name}
    metadata: dict[str, Any] = {"name": name, "labels": labels}
    if settings.namespace:
        metadata["namespace"] = settings.namespace
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",  # only host names: NAME-0.NAME is the first pod
            "publishNotReadyAddresses": True,  # the rendezvous comes before the pods are ready
            "selector": labels,
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": settings.nodes,
            "parallelism": settings.nodes,
            "backoffLimit": settings.retries * settings.nodes,  # a failure of the run fails all its pods
            "podFailurePolicy": {
                "rules": [
                    _rule("FailJob", PERMANENT_CODES),
                    _rule("Ignore", (Stopped.exit_code,)),
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {
                "metadata": {"labels": labels},
                "spec": _pod(settings, name, _command(settings, name, run)),
            },
        },
    }
    text = yaml.dump_all([service, job], Dumper=_Plain, sort_keys=False, allow_unicode=True, width=1000)
    # only the pod with rank 0 prints the progress
    selector = f"batch.kubernetes.io/job-name={name},batch.kubernetes.io/job-completion-index=0"
    namespace = f" --namespace {settings.namespace}" if settings.namespace else ""
    return f"# kubectl apply -f FILE; then kubectl logs -f{namespace} --selector {selector}\n{text}"


class _Plain(yaml.SafeDumper):
    """Write a value that occurs twice twice, not as an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _rule(action: str, exit_codes: tuple[int, ...]) -> dict[str, Any]:
    return {
        "action": action,
        "onExitCodes": {"containerName": "trainer", "operator": "In", "values": list(exit_codes)},
    }


def _pod(settings: KubernetesSettings, name: str, command: list[str]) -> dict[str, Any]:
    amounts = {"nvidia.com/gpu": str(settings.gpus) if settings.gpus else ""}
    amounts |= {"cpu": settings.cpus, "memory": settings.memory}
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm}}
    ]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if settings.claim:
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": settings.claim}})
        mounts.append({"name": "work", "mountPath": settings.mount})
    trainer = {
        "name": "trainer",
        "image": settings.image,
        "command": command,
        **({"workingDir": settings.mount} if settings.claim else {}),
        "env": [
            {  # part of the run's name, so that a new job of the same name does not resume an old run
                "name": "JOB_UID",
                "valueFrom": {
                    "fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}
                },
            },
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": SAFE_PATH, "value": "1"},  # import nothing from the working folder
        ],
        **({"envFrom": [{"secretRef": {"name": settings.secret}}]} if settings.secret else {}),
        "ports": [{"name": "rendezvous", "containerPort": PORT}],
        "resources": {"limits": {kind: amount for kind, amount in amounts.items() if amount}},
        # Ready means that the rendezvous is complete and the workers run. There is no liveness probe: the run's own
        # watchdog can tell a long validation from a stall.
        "readinessProbe": {
            "exec": {"command": ["sh", "-c", "grep -q . /proc/1/task/1/children"]},
            "periodSeconds": 10,
        },
        # The agent (process 1) forwards the signal. The container ends when the run has saved.
        "lifecycle": {
            "preStop": {"exec": {"command": ["sh", "-c", f"kill -USR1 1; sleep {settings.grace_s}"]}}
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    return {
        "subdomain": name,
        **({"serviceAccountName": settings.account} if settings.account else {}),
        "restartPolicy": "Never",  # the policy above replaces a pod that failed
        "terminationGracePeriodSeconds": settings.grace_s,
        "securityContext": {
            # The images of packaging/docker/ run as user 1000, who must be able to write to the volume. NFS ignores fsGroup.
            "fsGroup": IMAGE_GROUP,
            "fsGroupChangePolicy": "OnRootMismatch",  # does not visit every file of the volume at each start
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [trainer],
        "volumes": volumes,
    }


def _command(settings: KubernetesSettings, name: str, run: ScheduledRun) -> list[str]:
    """Return the container's argv. Kubernetes replaces ``$(VARIABLE)`` in it, so any other dollar is doubled."""
    for word in (*run.arguments, run.name):
        # bytes of a file's name that are not UTF-8
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ConfigError(f"{shown(word)} is not UTF-8, which Kubernetes requires")
    words = [*run.arguments, *([f"--resume={run.resume}"] if run.resume else [])]
    literal = [word.replace("$", "$$") for word in words]
    if not run.resume:
        literal += [f"--name={run.name.replace('$', '$$')}-$(JOB_UID)", "--exist-ok", "--resume=auto"]
    rendezvous = [
        f"--nnodes={settings.nodes}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--master-addr={name}-0.{name}",
        f"--master-port={PORT}",
    ]
    return [
        settings.python.replace("$", "$$"),
        *("-m", "yolofleet.fleet.launch.schedulers.agent", *rendezvous),
        f"--nproc-per-node={run.processes}",
        *("-m", "yolofleet", "train", *literal),
    ]


def _label(name: str) -> str:
    """Return a run's name in the form that Kubernetes allows for a service."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"yolofleet-{label}"
    return label[:LONGEST_NAME].strip("-")


SCHEDULER = Scheduler(
    KubernetesSettings,
    render,
    "Write a training run as a Kubernetes Job, for `kubectl apply -f -`. Paths are paths inside the pods.",
)
