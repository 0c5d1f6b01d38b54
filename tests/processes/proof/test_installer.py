"""What a uv of the package index does where it does not run, or fails."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from builder.proof import isolation
from builder.proof.isolation import Command, SandboxUnavailable, call

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("#!/bin/sh\nexit 1\n", subprocess.CalledProcessError),
        ("\x7fELF of another machine", OSError),
    ],
)
def test_a_uv_that_does_not_run_here_is_not_kept(
    script: str, error: type[Exception], tmp_path: Path
) -> None:
    program = tmp_path / "uv"
    program.write_text(script)
    program.chmod(0o755)
    with pytest.raises(error):
        isolation._check_runs(program)
    program.write_text("#!/bin/sh\n")
    isolation._check_runs(program)


def test_pip_does_what_a_uv_of_the_index_fails_at() -> None:
    ok = Command((sys.executable, "-c", "print('pip')"))
    failing = Command((sys.executable, "-c", "raise SystemExit('no certificate')"), {}, ok)
    assert call(failing) == "pip\n"
    with pytest.raises(SandboxUnavailable, match="no certificate"):
        call(Command(failing.words))
