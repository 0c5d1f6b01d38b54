"""Levels device and serve through a real engine: what happens to an image where there is no GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from . import support

if TYPE_CHECKING:
    from . import machine
    from .support import Cli

LEVELS = ("device", "serve")


def test_an_engine_without_gpus_passes_nothing(
    cli: Cli, engine: machine.Engine, base_image: str
) -> None:
    """The engine refuses the container itself; its words and the command are in the evidence."""
    before = support.containers(engine)
    words = ("verify", base_image, "--layers", "marlin", "--json", "--level", ",".join(LEVELS))
    done = cli(*words)
    checks = done.json["checks"]
    assert [(check["level"], check["status"]) for check in checks] == [
        (level, "not-run") for level in LEVELS
    ]
    for check in checks:
        assert "could not select device driver" in check["reason"]
        assert f"--gpus all --ipc host --entrypoint spark-verify {base_image}" in check["reason"]
    assert done.code == 5, "nothing passed"
    left = support.containers(engine)
    assert left == before, "a container that never started is removed too"


@pytest.mark.parametrize(("levels", "code"), [("static", 0), ("static,serve", 5)])
def test_a_requested_level_that_did_not_run_is_a_failure(
    cli: Cli, patched: str, levels: str, code: int
) -> None:
    assert cli("verify", patched, "--level", levels).code == code


def test_the_verifier_in_the_image_runs_what_it_can(engine: machine.Engine, patched: str) -> None:
    words = ("run", "--rm", "--network=none", "--entrypoint", "spark-verify", patched, "--json")
    checks = json.loads(engine.run(*words))["checks"]
    statuses = {(check["level"], check["status"]) for check in checks}
    assert statuses == {
        ("static", "pass"),
        ("dispatch", "pass"),
        ("device", "not-run"),
        ("serve", "not-run"),
    }
    reasons = {check["reason"] for check in checks if check["level"] in LEVELS}
    assert all("no GPU here: libcuda.so.1" in reason for reason in reasons)
