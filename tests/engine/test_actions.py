"""Workflow steps that need a Docker Engine: the fallback lane, and the one for a real Spark."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import requests

from tests.actions.runner import ROOT, Machine, StepFailed

from . import support

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .machine import Engine, Registry

FLOWS = ROOT / ".github" / "workflows"


@pytest.fixture
def machine(engine: Engine, tmp_path: Path) -> Iterator[Machine]:
    """A runner; unlike a hosted one it is not thrown away, so what a lane builds is removed."""
    before = support.tags(engine)
    yield Machine(tmp_path / "home", env=dict(engine.env))
    made = set(support.tags(engine)) - set(before)
    if made:
        engine.run("image", "rm", *sorted(made))


def test_the_docker_lane_frees_disk_builds_and_publishes(
    machine: Machine, base_image: str, registry: Registry, tmp_path: Path
) -> None:
    unused, used = tmp_path / "root/usr/share/dotnet/sdk", tmp_path / "root/usr/share/keep"
    unused.mkdir(parents=True)
    used.mkdir()
    machine.env |= {"DISK_ROOT": str(tmp_path / "root"), "REGISTRY": registry.address}
    entry = {
        "name": "marlin",
        "profile": "marlin",
        "base": base_image,
        "platform": "linux/amd64",  # of the base here; on GitHub it is the Spark's
    }
    needs = {"list": {"outputs": {"docker": "[1]"}}}
    assert machine.job(FLOWS / "images.yml", "docker", matrix=entry, needs=needs) is not None
    assert not unused.parent.exists()
    assert used.is_dir()
    url = f"{registry.url}/v2/somebody/spark-build/tags/list"
    tags = requests.get(url, timeout=600).json()["tags"]
    assert any(tag.startswith("0.20.1-marlin-") for tag in tags)
    assert ("action.yml", "runs", "3") in machine.ran


def test_device_job_without_a_gpu_fails_with_a_reason(machine: Machine, patched: str) -> None:
    machine.contexts["github"]["event_name"] = "workflow_dispatch"
    machine.contexts["inputs"] = {"image": patched, "levels": "device,serve"}
    with pytest.raises(StepFailed) as failed:
        machine.job(FLOWS / "gb10.yml", "device")
    assert failed.value.code == 5
    evidence = json.loads((machine.home / "temp" / "evidence" / "evidence.json").read_text())
    assert not evidence.get("passed")
    assert "not run" in machine.summary
