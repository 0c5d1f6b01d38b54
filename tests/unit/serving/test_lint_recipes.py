"""What is set in a recipe passes the checks of ``lint``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from builder.errors import UsageError
from builder.serving import recipefiles
from builder.serving.lint import linted_recipe
from builder.serving.recipe import Place
from tests.unit.serving.served import TWO, interface, request, served

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.conftest import Called

OFFICIAL: dict[str, Any] = {"image": "vllm/vllm-openai:v0.25.0", "flags": (), "moe_flags": ()}


def added(*chosen: str, **options: Any) -> list[str]:
    """The notes that are there because of what was chosen."""
    without = linted_recipe(request(**options)).notes
    return [n for n in linted_recipe(request(chosen=chosen, **options)).notes if n not in without]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("gpu-memory-utilization=0.95", "0.95 of 128 GB that the CPU uses too; 0.85, or --kv-"),
        ("gpu-memory-utilization=0.92", "0.92 of 128 GB that the CPU uses too; 0.85, or --kv-"),
        ("gpu-memory-utilization=0.9", ""),
        ("max-model-len=32768", "a context of 32768 tokens: write-up of one GB10"),
        ("max-model-len=100000", ""),
        ("enforce-eager", ""),
        ("max-num-batched-tokens=1024", "1024 batched tokens are fewer than a block"),
        ("NCCL_SOCKET_IFNAME=eth0", "two nodes also need GLOO_SOCKET_IFNAME"),
    ],
)
def test_a_warning_is_a_note(text: str, note: str) -> None:
    found = added(text)
    assert (len(found), note in "".join(found)) == (1 if note else 0, True)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "linear-backend=flashinfer_b12x",
            {"served": served("0.25.0", interface=interface("0.25.0"), **OFFICIAL)},
            "--set linear-backend=flashinfer_b12x: vLLM 0.25.0 accepts --linear-backend",
        ),
        (
            "distributed-executor-backend=ray",
            {"served": served("0.25.0", interface=interface("0.25.0"), **OFFICIAL)},
            "come without Ray",
        ),
    ],
)
def test_an_error_is_refused(text: str, options: dict[str, Any], message: str) -> None:
    assert linted_recipe(request(**options))
    with pytest.raises(UsageError) as failure:
        linted_recipe(request(chosen=(text,), **options))
    assert message in str(failure.value)
    assert failure.value.hint


@pytest.mark.parametrize("topology", ["solo", "tp2"])
def test_without_a_choice_there_is_nothing_to_note(topology: Any) -> None:
    place = Place(topology=topology, **(TWO if topology == "tp2" else {}))
    assert not any("GLOO" in note for note in linted_recipe(request(place=place)).notes)


def test_the_command(spark_build: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipefiles, "served_profile", lambda *_: served())
    words = ("recipe", "nemotron-3-super", "--release", "0.33.0", "--set")
    refused = spark_build(*words, "gpu-memory-utilization=2")
    assert (refused.code, "takes a fraction of 1, not 2" in refused.err) == (2, True)
    better = f"try: spark-build {' '.join(words)} gpu-memory-utilization=0.85\n"
    assert better in refused.err
    warned = spark_build(*words, "gpu-memory-utilization=0.95")
    assert (warned.code, "# note: 0.95 of 128 GB" in warned.out) == (0, True)
