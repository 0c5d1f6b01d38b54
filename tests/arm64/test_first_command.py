"""The README's first command on 64-bit Arm, as on the Spark: its dispatch checks pass there."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from builder.__main__ import run

from .conftest import COMMAND
from .debian import CHECKOUT, HOME

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    import pytest

    from .debian import Debian


def test_first_readme_command_passes_dispatch_on_arm64(
    debian: Debian,
    made: subprocess.CompletedProcess[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert f"python3 {COMMAND}" in (CHECKOUT / "README.md").read_text("utf-8")
    image = json.loads(made.stdout)
    checks = [check for check in image["verify"]["checks"] if check["level"] == "dispatch"]
    assert len(checks) == 6
    assert {check["status"] for check in checks} == {"pass"}, checks
    for check in checks:
        assert any(re.match(r"torch 2\.11\.0 \(CUDA build", part) for part in check["simulated"])
    machine = debian.run(f"{HOME}/venv/bin/python", "-c", "import os; print(os.uname().machine)")
    assert machine.stdout == "aarch64\n"

    layout = f"oci:{tmp_path}/out"
    assert run(["image", "--layers", "b12x-full", "--no-verify", "--json", "-o", layout]) == 0
    here = json.loads(capfd.readouterr().out)
    assert image["digest"] == here["digest"], "an image is the same wherever it is made"
