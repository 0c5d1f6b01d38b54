"""A release that does not exist, and the release that is used if none is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.common.reference import NEWEST_VLLM
from builder.errors import EngineError
from builder.images.bases.identify import IDENTIFIERS
from builder.images.engines import docker
from tests.unit.fakes import fake_base, vllm_files
from tests.wheels.fakeindex import FakeIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.conftest import Called


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    with FakeIndex() as running:
        for version in ("0.20.1", "0.31.0", "0.40.0rc1"):
            running.add("vllm", version, vllm_files(version))
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


@pytest.mark.parametrize(
    ("words", "better"),
    [
        (("plan", "-l", "marlin", "-b", "pypi:vllm==0.99"), "plan -l marlin -b pypi:vllm=={}"),
        (
            ("recipe", "nemotron-3-super", "--release", "0.99"),
            "recipe nemotron-3-super --release {}",
        ),
        (("recipe", "nemotron-3-super", "--release=0.99"), "recipe nemotron-3-super --release={}"),
    ],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_the_command_again_with_the_newest_release(
    spark_build: Callable[..., Called],
    index: FakeIndex,
    words: tuple[str, ...],
    better: str,
    recorded: bool,
) -> None:
    """The newest that is recorded, or else the newest on the index that is final."""
    if recorded:
        index.add("vllm", NEWEST_VLLM, vllm_files(NEWEST_VLLM))
        index.add("vllm", "0.98.0", vllm_files("0.98.0"))
    done = spark_build(*words)
    assert done.code == 2
    assert "vllm 0.99 is not on the package index; the nearest releases are" in done.err
    newest = NEWEST_VLLM if recorded else "0.31.0"
    assert f"  try: spark-build {better.format(newest)}\n" in done.err


def test_a_default_base_says_why_and_names_the_newest(
    spark_build: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise EngineError("no Docker Engine is running")

    monkeypatch.setattr(docker, "connect", refused)
    files = vllm_files("0.20.1")
    monkeypatch.setitem(IDENTIFIERS, "pypi", lambda *_: fake_base(files))
    said = spark_build("plan", "-l", "b12x-full").err
    assert (
        "no --base: pypi:vllm==0.20.1, the default of b12x-full: this release has no b12x" in said
    )
    assert f"the newest supported release: --base pypi:vllm=={NEWEST_VLLM}\n" in said
    said = spark_build("plan", "-l", "flashinfer-cutlass").err
    assert "no --base" not in said, "its default is the newest"
