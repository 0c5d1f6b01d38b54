"""A time limit ends a build as an interruption does, and says that it was the limit."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.cache import locked
from builder.images.engines import oci
from builder.images.rootfs.tar import tar_layer
from tests.unit.fakes import REPLACE, every_base_is, fake_base, layer_text, vllm_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Called

LAYER = layer_text(REPLACE, when=">=0.20.0")
IMAGE = ("image", "-l", "fix", "-b", "pypi:vllm==0.20.1", "--engine", "oci", "--no-verify")


@pytest.fixture
def image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark_build: Callable[..., Called]
) -> Callable[..., Called]:
    """``spark-build image`` of a vLLM in memory, in an empty directory."""
    (tmp_path / "patches" / "fix").mkdir(parents=True)
    (tmp_path / "patches" / "fix" / "layer.toml").write_text(LAYER)
    monkeypatch.setenv("SPARK_BUILD_PATCHES", str(tmp_path / "patches"))
    base = fake_base(vllm_files(), "pypi")
    every_base_is(monkeypatch, base)
    return lambda *words: spark_build(*IMAGE, "--output", f"oci:{tmp_path}/work/out", *words)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A disk that stops in the middle of a layer; gives the layers that were written after all."""
    whole: list[Any] = []

    def stopping(out: Any, *words: Any) -> Any:
        made = tar_layer(out, *words)
        time.sleep(120)
        whole.append(made)
        return made

    monkeypatch.setattr(oci, "tar_layer", stopping)
    return whole


def test_the_limit_stops_the_command(
    image: Callable[..., Called], slow: list[Any], tmp_path: Path
) -> None:
    result = image("--time-limit", "1s")
    assert not slow, "the command went on after the limit"
    assert result.code == 7
    assert "the time limit of 1s was reached in the step 'build with oci'" in result.err
    assert "a longer --time-limit" in result.err
    assert not result.out
    assert not list((tmp_path / "work").iterdir())
    with locked(str(tmp_path / "work" / "out"), wait=False):
        pass  # and it is not locked


@pytest.mark.usefixtures("slow")
def test_the_limit_from_the_environment(
    image: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_BUILD_TIME_LIMIT", "1s")
    error = image("--json").json["error"]
    assert error["code"] == 7
    assert "time limit of 1s" in error["message"]


def test_a_command_that_finishes_in_time(image: Callable[..., Called]) -> None:
    assert image("--time-limit", "1h").code == 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_an_interruption_is_still_reported_as_one(
    image: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(oci, "tar_layer", interrupted)
    assert image("--time-limit", "1h").code == 130


def test_an_invalid_time(image: Callable[..., Called]) -> None:
    result = image("--time-limit", "soon")
    assert result.code == 2
    assert "'soon' is not a duration such as" in result.err
    result = image("--time-limit", "0s")
    assert result.code == 2
    assert "must be more than 0" in result.err
