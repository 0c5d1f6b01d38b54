"""Builders of docker buildx, with a docker client that is started."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from builder.errors import EngineError
from builder.images.engines.buildx import reached

if TYPE_CHECKING:
    from pathlib import Path


ANSWER = """\
Name:          farm
Driver:        {driver}

Nodes:
Name:             farm0
Endpoint:         tcp://buildkitd:1234
Status:           {status}
BuildKit version: {version}
Platforms:        linux/arm64
"""


def fake_docker(folder: Path, text: str, code: int = 0) -> str:
    """A docker client that writes down how it is called, and answers."""
    answer, path = folder / "answer", folder / "docker"
    answer.write_text(text)
    path.write_text(
        f'#!/bin/sh\necho "$@" "BUILDX_CONFIG=$BUILDX_CONFIG" >>{folder}/calls\n'
        f'[ "$2" = create ] && exit 0\ncat {answer} {">&2" if code else ""}\nexit {code}\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("version", "links"),
    [
        ("v0.12.5", True),
        ("v0.11.0", True),
        ("v0.10.6", False),
        ("v0.0.0+unknown", True),
        ("", True),
    ],
)
def test_a_working_builder(tmp_path: Path, version: str, links: bool) -> None:
    text = ANSWER.format(driver="kubernetes", status="running", version=version)
    with reached(fake_docker(tmp_path, text), "farm") as builder:
        assert (builder.name, builder.driver, builder.links) == ("farm", "kubernetes", links)
        assert builder.env == {}
    assert "buildx inspect --bootstrap farm" in (tmp_path / "calls").read_text()


def test_a_builder_for_an_address_is_removed(tmp_path: Path) -> None:
    text = ANSWER.format(driver="remote", status="running", version="v0.12.5")
    with reached(fake_docker(tmp_path, text), "kube-pod://buildkitd-0") as builder:
        folder = builder.env["BUILDX_CONFIG"]
        assert os.path.isdir(folder)  # noqa: PTH112
    assert not os.path.exists(folder)  # noqa: PTH110
    made, asked = (tmp_path / "calls").read_text().splitlines()
    assert made == (
        "buildx create --name spark-build --driver remote kube-pod://buildkitd-0 "
        f"BUILDX_CONFIG={folder}"
    )
    assert asked.endswith(f"inspect --bootstrap spark-build BUILDX_CONFIG={folder}")


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ('ERROR: no builder "farm" found\n', 1, 'cannot be used:\n  no builder "farm" found'),
        (ANSWER.format(driver="remote", status="inactive", version=""), 0, "cannot be used"),
        (ANSWER.format(driver="docker", status="running", version=""), 0, "is a Docker Engine"),
    ],
)
def test_an_unusable_builder(tmp_path: Path, text: str, code: int, said: str) -> None:
    with (
        pytest.raises(EngineError, match=said) as caught,
        reached(fake_docker(tmp_path, text, code), "farm"),
    ):
        pytest.fail("it was used")
    assert caught.value.code == 6
    assert "docker" in caught.value.hint
