"""Scripts that start a server, read by a shell."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from builder.serving.recipeformats import rendered
from tests.unit.serving.served import with_hard_values
from tests.unit.serving.test_recipeformats import PLACES, made

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("topology", PLACES)
@pytest.mark.parametrize("form", ["docker", "shell"])
def test_scripts_are_shell(form: str, topology: str) -> None:
    files = rendered(made(topology), form)
    for name, text in files.items():
        if name.endswith(".sh"):
            subprocess.run(["sh", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(("form", "program"), [("docker", "docker"), ("shell", "vllm")])
def test_a_shell_gives_each_word_and_variable_byte_for_byte(
    tmp_path: Path, form: str, program: str
) -> None:
    recipe = with_hard_values(made())
    (text,) = rendered(recipe, form).values()
    stub = tmp_path / program
    stub.write_text('#!/bin/sh\nprintf "%s\\0" "$@" "$VLLM_DISABLED_KERNELS"\n')
    stub.chmod(0o755)
    done = subprocess.run(
        ["sh"], input=text.encode(), capture_output=True, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/me"},
    )  # fmt: skip
    *words, seen, rest = done.stdout.decode().split("\0")
    assert (done.stderr, rest) == (b"", "")
    hard = recipe.env[-1].value
    expected = recipe.command(recipe.nodes[0])[1:]
    assert words[-len(expected) :] == expected
    if form == "docker":
        assert words[words.index(f"VLLM_DISABLED_KERNELS={hard}") - 1] == "--env"
    else:
        assert seen == hard
