"""Without a Docker Engine: an image of this machine cannot be seen, and wheels need neither."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.errors import EngineError
from builder.images.engines import docker

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.conftest import Called

#: Nothing listens there.
REGISTRY = "127.0.0.1:1"
OFFICIAL = f"{REGISTRY}/vllm/vllm-openai"


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise EngineError("no Docker Engine is running at the default socket")

    monkeypatch.setattr(docker, "connect", refused)


@pytest.mark.parametrize(
    "words",
    [
        ("verify", f"{REGISTRY}/spark"),
        ("plan", "-l", "b12x-full", "-b", f"{REGISTRY}/spark"),
        ("publish", f"{REGISTRY}/spark", "--to", f"{REGISTRY}/x"),
        ("distribute", f"{REGISTRY}/spark", "node"),
        ("rebuild", f"{REGISTRY}/spark"),
        ("recipe", "nemotron-3-super", "--image", f"{REGISTRY}/spark"),
    ],
    ids=lambda words: words[0],
)
def test_an_image_of_this_machine(
    spark_build: Callable[..., Called], words: tuple[str, ...]
) -> None:
    done = spark_build(*words)
    assert done.code == 8, done.err
    assert (
        "no Docker Engine is running, so the images of this machine cannot be seen, and "
        f"{REGISTRY}/spark could not be read from its registry"
    ) in done.err
    assert "  try: start Docker; or name an image that needs none: docker://" in done.err


def test_a_registry_that_was_named_is_not_about_the_engine(
    spark_build: Callable[..., Called],
) -> None:
    for target in (f"docker://{REGISTRY}/spark", f"docker://{OFFICIAL}:v0.30.0"):
        assert "Docker Engine" not in spark_build("verify", target).err
        assert "Docker Engine" not in spark_build("plan", "-l", "marlin", "-b", target).err


@pytest.mark.parametrize(
    ("words", "better"),
    [
        (
            ("image", "-l", "b12x-full", "-b", f"{OFFICIAL}:v0.30.0", "-t", "x"),
            "image -l b12x-full -b pypi:vllm==0.30.0 -t x",
        ),
        (("plan", "-l", "marlin", f"--base={OFFICIAL}"), "plan -l marlin --base=pypi:vllm==0.33.0"),
        (
            ("plan", "-l", "marlin", "-b", f"{OFFICIAL}:v0.17.1-cu130"),
            "plan -l marlin -b pypi:vllm==0.17.1",
        ),
        (
            ("recipe", "nemotron-3-super", "--image", f"{OFFICIAL}:v0.30.0"),
            "recipe nemotron-3-super --release 0.30.0",
        ),
    ],
)
def test_the_wheels_of_an_official_image(
    spark_build: Callable[..., Called], words: tuple[str, ...], better: str
) -> None:
    assert f"  try: spark-build {better}\n" in spark_build(*words).err
