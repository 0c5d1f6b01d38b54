"""The README's first command on 64-bit Arm, as on the Spark: its dispatch checks pass there."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from builder.__main__ import run
from tests.engine.cache import MachineError

from .debian import CHECKOUT, HOME, SOURCE, Debian

if TYPE_CHECKING:
    from pathlib import Path

#: What the README's first block runs, without the interpreter.
COMMAND = "builder/bootstrap.py image --layers b12x-full"
#: An emulated processor takes seconds for what takes a tenth of one natively.
TIMEOUT = 2400.0


@pytest.fixture(scope="module")
def debian() -> Debian:
    try:
        return Debian()
    except MachineError as error:
        pytest.skip(f"NOT RUN: no arm64 here, so nothing is proven there: {error}")


def test_first_readme_command_passes_dispatch_on_arm64(
    debian: Debian, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert f"python3 {COMMAND}" in (CHECKOUT / "README.md").read_text("utf-8")
    words = f"cd {HOME} && rm -rf out && exec python3 {SOURCE}/{COMMAND} --json --output oci:out"
    done = debian.run("sh", "-c", words, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr + done.stdout
    made = json.loads(done.stdout)
    checks = [check for check in made["verify"]["checks"] if check["level"] == "dispatch"]
    assert len(checks) == 6
    assert {check["status"] for check in checks} == {"pass"}, checks
    for check in checks:
        assert any(re.match(r"torch 2\.11\.0 \(CUDA build", part) for part in check["simulated"])
    machine = debian.run(
        f"{HOME}/venv/bin/python", "-c", "import os; print(os.uname().machine)", timeout=60
    )
    assert machine.stdout == "aarch64\n"

    layout = f"oci:{tmp_path}/out"
    assert run(["image", "--layers", "b12x-full", "--no-verify", "--json", "-o", layout]) == 0
    here = json.loads(capfd.readouterr().out)
    assert made["digest"] == here["digest"], "an image is the same wherever it is made"
