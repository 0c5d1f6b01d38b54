"""A release's interface is read once, from an index that then goes away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.serving.release import files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Called
    from tests.wheels.fakeindex import FakeIndex

READING = "reading the arguments of vLLM 1.2.3"


@pytest.mark.parametrize("command", ["memory", "lint"])
def test_the_second_command_needs_no_network(
    wheels: FakeIndex, spark_build: Callable[..., Called], tmp_path: Path, command: str
) -> None:
    wheels.add("vllm", "1.2.3", files())
    script = tmp_path / "serve.sh"
    script.write_text("vllm serve m --shade bright\n", "utf-8")
    words = {"memory": ["nemotron-3-super"], "lint": [str(script)]}[command]
    first = spark_build(command, *words, "--release", "1.2.3", "--json")
    assert READING in first.err
    wheels.__exit__()
    second = spark_build(command, *words, "--release", "1.2.3", "--json")
    assert (second.code, second.out) == (first.code, first.out)
    assert READING not in second.err
