"""JSON that a stranger nested a hundred thousand times is malformed, and nothing worse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.errors import SparkBuildError
from builder.images.registry.model import parse_json
from builder.proof.ongpu import NoGpu, verifier_document
from builder.publishing.distribute import _parse_survey
from builder.serving.bench import read_bench
from builder.serving.checkpoint import read_config
from builder.serving.recipefiles import images_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.caller import Call

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "line",
    [DEEP, '{"a":' * 100_000, f"free {'9' * 10_000}", "free ²", "free -1", "arch"],
)
def test_a_node_that_answers_nonsense_has_no_layers(line: str) -> None:
    """What a machine answers over SSH is read line by line."""
    facts = _parse_survey(f'arch arm64\n{line}\n["sha256:a"]\nfree 12\n')
    assert facts.layers == {"sha256:a"}
    assert facts.free == 12 << 10


def test_a_verifier_that_answers_nonsense_has_no_document() -> None:
    with pytest.raises(NoGpu, match="no document"):
        verifier_document(DEEP, 1)


@pytest.mark.parametrize(
    "read",
    [read_bench, lambda path: images_of(path, "0.33.0"), lambda path: read_config(path.parent)],
)
def test_a_file_is_refused(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "config.json"
    path.write_text(DEEP)
    with pytest.raises(SparkBuildError):
        read(path)


@pytest.mark.parametrize(
    "words",
    [
        ("audit", "./deep"),
        ("bake", "--images", "deep", "-o", "out"),
        ("verify", "oci:image", "--level", "serve", "--bench", "--against", "deep"),
    ],
)
def test_a_command_says_what_is_wrong(call: Call, words: tuple[str, ...]) -> None:
    Path("deep").write_text(DEEP)
    done = call(*words)
    assert done.code == 2
    assert "internal error" not in done.err


def test_a_name_that_is_there_twice_is_found_among_many() -> None:
    """Each name was counted in all of them: 100,000 names took a minute, 4 MiB of them hours."""
    names = ",".join(f'"{number}":1' for number in range(100_000))
    with pytest.raises(ValueError, match="has the name '99999' twice"):
        parse_json(f'{{{names},"99999":2}}')
