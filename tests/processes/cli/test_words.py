"""Errors of files and connections in words, without what Python calls them."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Called

    SparkBuild = Callable[..., Called]

#: Numbers and names that only people who know Python understand.
PYTHONS = re.compile(r"Errno|codec|RecursionError|urlopen|<class|Error\(|b'|line 1 column")
DEEP = '{"a":' * 100_000


@pytest.fixture
def silent() -> str:
    """The address of a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bench", "URL"), "Connection refused"),
        (("bench", "URL", "--against", "none"), "none cannot be read: No such file"),
        (("bench", "URL", "--log", "folder"), "Is a directory"),
        (("lint", "latin.sh"), "cannot read latin.sh: it is not text in UTF-8"),
        (("lint", "folder"), "cannot read folder: Is a directory"),
        (("lint", "weights.sh"), "weights.sh is not a text file"),
        (("lint", "large.sh"), "large.sh is larger than 1 MiB"),
        (("memory", "checkpoint"), "cannot be read: it is nested too deeply"),
        (("models", "show", "latin", "--models", "own"), "it is not text in UTF-8"),
        (("diagnose", "none.log"), "cannot read none.log: No such file"),
        (("recipes", "export", "--tags", "none", "--release", "0.33.0"), "cannot read none: No s"),
        (("plan", "-l", "marlin", "-b", "oci:folder"), "cannot be read: No such file"),
    ],
)
def test_what_went_wrong(
    spark_build: SparkBuild,
    tmp_path: Path,
    silent: str,
    words: tuple[str, ...],
    said: str,
) -> None:
    work = tmp_path / "work"
    for folder in ("folder", "checkpoint", "own"):
        (work / folder).mkdir()
    for file in ("latin.sh", "own/latin.toml"):
        (work / file).write_bytes(b"# Stra\xdfe\n")
    (work / "weights.sh").write_bytes(bytes(1000))
    (work / "large.sh").write_bytes(b"#" * ((1 << 20) + 1))
    (work / "checkpoint" / "model.safetensors.index.json").write_text(DEEP)
    done = spark_build(*(silent if word == "URL" else word for word in words))
    assert said in done.err
    assert not PYTHONS.search(done.err)
