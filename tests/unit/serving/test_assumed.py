"""``preflight`` of a model whose configuration cannot be downloaded: the nearest one stands in."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from builder.cli import preflight as command
from builder.common.document import plain
from builder.errors import Exit, RemoteError, SparkBuildError
from builder.pipeline.options import PlanOptions
from builder.proof.wholemodel import Refusal, Release, Target
from builder.serving import preflight as asking
from builder.serving import preflightfile
from builder.serving.options import Given
from builder.serving.preflight import (
    Preflight,
    PreflightRequest,
    in_short,
    preflight,
    preflight_on,
    refuse_if_it_does_not_start,
    refuse_if_it_starts_nowhere,
)
from tests.unit.fakes import fake_base, vllm_files
from tests.unit.serving.test_preflight import answer, layer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from builder.proof.wholemodel import ModelAnswer

NEAR = "me/Qwen3.5-27B-NVFP4"
ASSUMED = "the configuration of Qwen/Qwen3.5-27B, in NVFP4 as the name says"


class Offline:
    """A release that answers, and a network that does not."""

    def __init__(self) -> None:
        self.answer = answer(layers=(layer(kernels=("CUTLASS",), bytes=1 << 30),))
        self.folders: list[Path] = []
        self.sized: list[bool] = []

    def ask(
        self, folder: Path, flags: list[tuple[str, ...]], device: object, _weights: object
    ) -> list[ModelAnswer]:
        self.folders.append(folder)
        self.sized.append(device is not None)
        return [self.answer] * len(flags)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Offline:
    made = Offline()

    def downloaded(_release: Release, name: str) -> Path:
        raise RemoteError(f"cannot download the configuration of {name}")

    @contextmanager
    def target(_options: PlanOptions) -> Iterator[Target]:
        yield Target.of(fake_base(vllm_files(), "pypi"))

    monkeypatch.setattr(Release, "downloaded", downloaded)
    monkeypatch.setattr(Release, "ask", made.ask)
    monkeypatch.setattr(asking, "_target", target)
    return made


def asked(model: str, *, assume: bool = True, cures: bool = False) -> Preflight:
    plan = PlanOptions(base="pypi:vllm==0.33.0")
    return preflight(
        PreflightRequest(model=model, plan=plan, assume=assume, cures=cures, trust_image=True)
    )


def refusal(message: str, stage: str = "model") -> Refusal:
    return Refusal(type="ValueError", message=message, where="vllm/x.py:1", stage=stage)


def test_the_nearest_configuration_stands_in_and_is_said(offline: Offline) -> None:
    document = asked(NEAR)
    assert (document.starts, document.assumed) == ("not known", ASSUMED)
    assert plain(document)["assumed"] == ASSUMED
    text = "\n".join(command._lines(document))
    assert f"NOT KNOWN: cannot download the configuration of {NEAR}\n  assumed: {ASSUMED}" in text
    assert "with it the release built the model on a simulated GB10" in text
    assert "weights " in text
    assert offline.sized == [True]


def test_what_was_assumed_is_no_success(offline: Offline) -> None:
    with pytest.raises(SparkBuildError, match="it is not known whether") as caught:
        refuse_if_it_does_not_start(asked(NEAR))
    assert caught.value.code == Exit.REMOTE


def test_what_another_configuration_is_refused_is_no_refusal(offline: Offline) -> None:
    offline.answer = replace(offline.answer, error=refusal("no kernel"))
    document = asked(NEAR, cures=True)
    assert document.starts == "not known"
    text = "\n".join(command._lines(document))
    assert "with it the release refuses:\n  ValueError: no kernel" in text
    with pytest.raises(RemoteError):
        refuse_if_it_does_not_start(document)


def test_what_no_model_decides_is_refused_for_sure(offline: Offline) -> None:
    error = refusal("unrecognized arguments: --new", "arguments")
    offline.answer = replace(offline.answer, error=error)
    document = asked(NEAR)
    assert (document.starts, document.assumed) == ("no", ASSUMED)
    assert f"assumed: {ASSUMED}" in "\n".join(command._lines(document))
    with pytest.raises(SparkBuildError, match="does not start") as caught:
        refuse_if_it_does_not_start(document)
    assert caught.value.code == Exit.VERIFY_FAILED


def test_a_copy_of_the_models_own_configuration_is_an_answer(offline: Offline) -> None:
    document = asked("nvidia/Kimi-K2.6-NVFP4")
    assert (document.starts, document.assumed) == ("yes", "")
    assert document.configuration == "nvidia/Kimi-K2.6-NVFP4"
    refuse_if_it_does_not_start(document)
    assert "its configuration is that of our data" in "\n".join(command._lines(document))


def test_another_size_tells_nothing_of_memory(offline: Offline) -> None:
    document = asked("me/Qwen3.5-9B")
    assert (document.memory, offline.sized) == (None, [False])
    assert [row.bytes for row in document.layers] == [0]
    text = "\n".join(command._lines(document))
    assert "assumed: the configuration of Qwen/Qwen3.5-27B (another size: the name says 9B)" in text
    assert "weights " not in text


@pytest.mark.parametrize("model", ["me/Other-7B", "me/Qwen3.6-35B-A3B-GGUF"])
def test_without_a_near_one_the_error_is_that_of_the_network(offline: Offline, model: str) -> None:
    with pytest.raises(RemoteError, match=f"configuration of {model}"):
        asked(model)


def test_nothing_stands_in_where_nobody_asked_for_it(offline: Offline) -> None:
    """Other commands read only whether it starts."""
    with pytest.raises(RemoteError, match="cannot download"):
        asked(NEAR, assume=False)
    given = Given(model=NEAR, flags=(), release="0.33.0", plan=PlanOptions())
    assert preflightfile.request_of(given).assume


def test_several_releases(offline: Offline) -> None:
    request = PreflightRequest(model=NEAR, plan=PlanOptions(), assume=True, trust_image=True)
    document = preflight_on(request, ["0.30.0", "0.33.0"])
    assert ([row.starts for row in document.rows], document.assumed) == (["not known"] * 2, ASSUMED)
    assert document.starting == []
    text = " ".join(" ".join(command._matrix(document)).split())
    assert f"its configuration is not here; assumed: {ASSUMED}" in text
    assert "assumed CUTLASS" in text
    with pytest.raises(RemoteError, match="it is not known whether"):
        refuse_if_it_starts_nowhere(document)
    assert ASSUMED in preflightfile.preflight_page(document)


def test_the_page_says_it_too(offline: Offline) -> None:
    page = preflightfile.preflight_page(asked(NEAR))
    assert f"Assumed: {ASSUMED}." in page
    assert "</b> not known</span>" in page
    assert "What it would get" in page
    offline.answer = replace(offline.answer, error=refusal("no kernel"))
    page = preflightfile.preflight_page(asked(NEAR))
    assert "no kernel" in page
    assert in_short("x", asked(NEAR)).why == "no kernel"
