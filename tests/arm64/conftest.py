"""One emulated Debian, and one run of the README's first command, for all tests here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engine.cache import MachineError

from .debian import HOME, SOURCE, Debian

if TYPE_CHECKING:
    import subprocess

#: What the README's first block runs, without the interpreter.
COMMAND = "builder/bootstrap.py image --layers b12x-full"


@pytest.fixture(scope="session")
def debian() -> Debian:
    """The unpacked system."""
    try:
        return Debian()
    except MachineError as error:
        pytest.skip(f"NOT RUN: no arm64 here, so nothing is proven there: {error}")


@pytest.fixture(scope="session")
def made(debian: Debian) -> subprocess.CompletedProcess[str]:
    """What the first command gave: a layout ``out``, and a virtual environment."""
    words = f"cd {HOME} && rm -rf out && exec python3 {SOURCE}/{COMMAND} --json --output oci:out"
    done = debian.run("sh", "-c", words)
    assert done.returncode == 0, done.stderr + done.stdout
    return done
