"""Every `run:` step of the workflows and of the action, run for real on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import requests

from tests.actions.runner import ACTION, ROOT, WORKFLOWS, Machine, StepFailed, run_steps
from tests.engine.cache import MachineError
from tests.engine.machine import Registry, ensure_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IMAGES = ROOT / ".github" / "workflows" / "images.yml"
#: Steps that other tests are: the first is this very test run, the others need a Docker Engine.
ELSEWHERE = {
    ("ci.yml", "test", "0"): "installs packages on the machine; the step after it is this run",
    ("ci.yml", "test", "2"): "is this run",
    ("images.yml", "docker", "1"): "tests/engine/test_actions.py",
    ("gb10.yml", "device", "1"): "tests/engine/test_actions.py",
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("runner") / "home")


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    try:
        tools = ensure_engine()
    except MachineError as error:
        pytest.fail(f"no registry: {error}", pytrace=False)
    with Registry(tools) as running:
        yield running


def only_release(workspace: Path) -> None:
    """The list of images, shortened to what can be had without Docker Hub."""
    path = workspace / ".github" / "images.json"
    path.write_text(
        json.dumps({"profiles": ["marlin"], "bases": ["pypi:vllm==0.20.1"], "docker": []})
    )


@pytest.fixture(scope="module")
def listed(machine: Machine) -> dict[str, Any]:
    """The first job, run on the real list."""
    outputs = machine.job(IMAGES, "list")
    assert outputs is not None
    return outputs


@pytest.fixture(scope="module")
def entry() -> dict[str, str]:
    return {"name": "marlin-0.20.1", "profile": "marlin", "base": "pypi:vllm==0.20.1"}


@pytest.fixture(scope="module")
def built(machine: Machine, listed: dict[str, Any], entry: dict[str, str]) -> Path:
    """The build job: the action's own steps."""
    contexts = {"matrix": entry, "needs": {"list": {"outputs": listed}}}
    assert machine.job(IMAGES, "build", **contexts) is not None
    return machine.home / "artifacts" / entry["name"]


@pytest.fixture(scope="module")
def published(
    machine: Machine, built: Path, registry: Registry, listed: dict[str, Any], entry: dict[str, str]
) -> str:
    """The publish job, to a registry of our own."""
    assert built.is_dir()
    machine.env["REGISTRY"] = registry.address
    contexts = {"matrix": entry, "needs": {"list": {"outputs": listed}}}
    assert machine.job(IMAGES, "publish", **contexts) is not None
    return f"{registry.url}/v2/somebody/spark-build"


def test_list_is_every_profile_on_every_base(listed: dict[str, Any]) -> None:
    wanted = json.loads((ROOT / ".github" / "images.json").read_text())
    rows = json.loads(listed["thin"])
    assert len(rows) == len(wanted["profiles"]) * len(wanted["bases"])
    assert len({row["name"] for row in rows}) == len(rows)


def test_a_filter_that_matches_nothing_fails(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "home", contexts={"inputs": {"only": "no-such-profile"}})
    with pytest.raises(StepFailed) as failed:
        machine.job(IMAGES, "list")
    assert "no image" in failed.value.err


def test_build_leaves_image_and_evidence(built: Path, machine: Machine) -> None:
    evidence = json.loads((built / "evidence.json").read_text())
    assert evidence["passed"]
    assert {check["level"] for check in evidence["checks"]} >= {"static", "dispatch"}
    assert (built / "image" / "index.json").is_file()
    assert "<html" in (built / "evidence.html").read_text()
    assert "Using MarlinNvFp4LinearKernel" in machine.summary


def test_a_build_that_fails_verification_fails_the_job(
    machine: Machine, built: Path, entry: dict[str, str]
) -> None:
    """The level that this release cannot prove here is required."""
    assert built.is_dir()
    contexts = {"matrix": entry, "steps": {}, **machine.contexts}
    given = {"layers": "marlin", "base": entry["base"], "require": "device", "compile": "true"}
    with pytest.raises(StepFailed) as failed:
        machine.composite(given, contexts, {})
    assert failed.value.code == 5


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ({"locked": "true"}, 9, "--locked, and there is no spark-build.lock"),
        ({"with-pr": "vllm-project/vllm#1@0123abc\n  not-a-pull"}, 2, "not-a-pull"),
    ],
    ids=["locked", "with-pr"],
)
def test_what_the_action_is_given_arrives(
    machine: Machine, entry: dict[str, str], given: dict[str, str], code: int, said: str
) -> None:
    contexts = {"matrix": entry, "steps": {}, **machine.contexts}
    with pytest.raises(StepFailed) as failed:
        machine.composite({"layers": "marlin", "base": entry["base"], **given}, contexts, {})
    assert failed.value.code == code
    assert said in failed.value.out + failed.value.err


def test_publish_tags_the_image(published: str, machine: Machine, entry: dict[str, str]) -> None:
    tags = requests.get(f"{published}/tags/list", timeout=10).json()["tags"]
    image = json.loads((machine.home / "artifacts" / entry["name"] / "image.json").read_text())
    plan = image["plan_digest"].removeprefix("sha256:")[:12]
    assert {f"0.20.1-marlin-{plan}", "marlin"} <= set(tags)
    assert "Published `" in machine.summary
    assert "a-secret-of-the-test" not in machine.summary


@pytest.mark.parametrize("event", [{"event_name": "pull_request"}, {"ref": "refs/heads/other"}])
@pytest.mark.parametrize("job", ["publish", "docker"])
def test_nothing_is_published_for_a_pull_request(
    machine: Machine, entry: dict[str, str], event: dict[str, str], job: str
) -> None:
    github = {**machine.contexts["github"], **event}
    needs = {"list": {"outputs": {"thin": "[1]", "docker": "[1]"}}}
    assert machine.job(IMAGES, job, github=github, matrix=entry, needs=needs) is None


def test_every_run_step_has_run(machine: Machine, published: str) -> None:
    assert published
    steps = set().union(*(run_steps(path) for path in [*WORKFLOWS, ACTION]))
    publishes = {step for step in steps if step[0] == ACTION.name} - set(machine.ran)
    assert set(ELSEWHERE) <= steps
    missing = steps - set(machine.ran) - set(ELSEWHERE) - publishes
    assert not missing, f"no test runs {missing}"
    assert len(publishes) <= 1, "only the action's own publish step is left to the Docker lane"


def test_ci_runs_what_the_readme_says() -> None:
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
