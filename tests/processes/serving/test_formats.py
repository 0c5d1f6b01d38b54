"""Scripts that start a server, read by a shell."""

from __future__ import annotations

import subprocess

import pytest

from builder.serving.formats.all import rendered
from tests.unit.serving.test_formats import PLACES, made


@pytest.mark.parametrize("topology", PLACES)
@pytest.mark.parametrize("form", ["docker", "shell"])
def test_scripts_are_shell(form: str, topology: str) -> None:
    files = rendered(made(topology), form)
    for name, text in files.items():
        if name.endswith(".sh"):
            subprocess.run(["sh", "-n"], input=text, text=True, check=True)
