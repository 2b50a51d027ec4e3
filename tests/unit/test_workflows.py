"""The workflows in .github: what can be checked without running them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import PAGES

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAY_WRITE = {
    ("release.yml", "publish"): {"id-token", "attestations"},
    ("release.yml", "github-release"): {"contents"},
}


def jobs(workflow: Path) -> dict[str, Any]:
    return yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_each_action_is_pinned_by_commit_with_its_version_beside_it(workflow: Path) -> None:
    for line in workflow.read_text(encoding="utf-8").splitlines():
        if "uses:" in line:
            assert re.search(r"uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_only_the_jobs_that_publish_may_write(workflow: Path) -> None:
    assert yaml.safe_load(workflow.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
    for name, job in jobs(workflow).items():
        writes = {scope for scope, right in job.get("permissions", {}).items() if right == "write"}
        assert writes == MAY_WRITE.get((workflow.name, name), set()), name
        assert job["timeout-minutes"] <= 360, name
    assert "secrets." not in workflow.read_text(encoding="utf-8")


def test_each_make_target_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called = []
    for job in [job for workflow in WORKFLOWS for job in jobs(workflow).values()]:
        called += [name.split()[0] for name in job.get("strategy", {}).get("matrix", {}).get("target", [])]
        called += re.findall(r"\bmake ([\w-]+)", str(job["steps"]))
    for page in PAGES:
        called += re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert called and set(called) <= targets


def test_the_tests_run_on_every_python_that_the_package_names() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r"Python :: (3\.\d+)", text)
    assert jobs(ROOT / ".github" / "workflows" / "test.yml")["linux"]["strategy"]["matrix"]["python"] == named


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_that_never_ran_says_so_in_its_first_line(workflow: Path) -> None:
    assert workflow.read_text(encoding="utf-8").startswith("# Never run: ")
