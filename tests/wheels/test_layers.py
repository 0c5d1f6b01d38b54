"""The device level's own path, on a CPU: released vLLM's layers, filled, finished, run and judged.

vLLM's linear layer runs with its emulated NVFP4 kernel; its experts run up to the fused kernel,
which the harness computes.  That shows that the check fills a layer as each release wants it, and
that what a sound kernel gives is found sound: only the arithmetic of SM121 is left to the Spark.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ..unit.inimage import load
from .sandboxed import Release, release_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .support import Planner

#: One release of each form of vLLM's layers that has an emulated kernel: environment variable, then
#: flag; experts in one class, then in a factory; quantisation methods in one file, then in schemes.
RELEASES = ("0.20.1", "0.24.0", "0.28.0", "0.33.0")
KINDS = ("nvfp4-linear", "nvfp4-moe", "fp8-linear")
#: A line that each logs, and how many cases it has.
SHOWN = {
    "nvfp4-linear": ("EmulationNvFp4LinearKernel for NVFP4", 14),
    "nvfp4-moe": ("'EMULATION' NvFp4", 5),
    "fp8-linear": ("FP8ScaledMMLinearKernel for", 7),
}


@pytest.fixture(scope="module")
def release(planned: Planner) -> Callable[[str], Release]:
    """A release with the profile b12x-full put on, by version."""
    made: dict[str, Release] = {}

    def get(version: str) -> Release:
        if version not in made:
            made[version] = release_of(planned(f"pypi:vllm=={version}", "b12x-full"))
        return made[version]

    return get


def events(release: Release, kind: str, broken: str = "none") -> list[dict[str, Any]]:
    """What the probe says of a release's layer."""
    by_variable = release.version < "0.24"
    env = {"VLLM_NVFP4_GEMM_BACKEND": "emulation"} if by_variable else {}
    request: dict[str, Any] = {"kind": kind, "device": "cpu", "activations": "fp4"}
    request["simulate"] = release.simulation(**env)
    if kind == "nvfp4-moe":
        request |= {"moe_backend": "emulation", "shapes": [[4, 256, 128]]}
    else:
        request |= {"shapes": [[1, 128, 128], [17, 96, 256]]}
        emulated = kind == "nvfp4-linear" and not by_variable
        request |= {"linear_backend": "emulation"} if emulated else {}
    return release.run("emulate.py", broken, given=request)


def of(found: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [item for item in found if item["event"] == event]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", RELEASES)
def test_a_layer_of_a_release_passes(
    release: Callable[[str], Release], version: str, kind: str
) -> None:
    found = events(release(version), kind)
    assert of(found, "error") == []
    assert found[-1] == {"event": "end"}
    line, count = SHOWN[kind]
    assert any(line in text for text in of(found, "selected")[0]["lines"])
    cases = of(found, "case")
    assert len(cases) == count
    assert [case for case in cases if case["problems"]] == []
    assert max(case["worst"] for case in cases) > 0.3, "the bound is not so wide that all pass"


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("scales", "values are off by more than allowed"),
        ("rows", "values are off by more than allowed"),
        ("nan", "NaN"),
        ("flat", "every value is 1"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_layer_is_detected(
    release: Callable[[str], Release], kind: str, broken: str, words: str
) -> None:
    """Scales or rows in another place, NaN in one column, one value everywhere."""
    cases = of(events(release("0.28.0"), kind, broken), "case")
    random = [case for case in cases if case["name"].startswith("random")]
    assert all(any(words in text for text in case["problems"]) for case in random), random


@pytest.mark.parametrize("version", RELEASES)
def test_released_vllm_loads_the_generated_models(
    release: Callable[[str], Release], version: str, tmp_path: Path
) -> None:
    """Its own configuration, model classes and loader: every parameter is filled."""
    tiny = load("tiny_model")
    folders = [str(tiny.write(tmp_path / name, name)) for name in ("moe", "dense")]
    request = tmp_path / "request.json"
    env = {"VLLM_NVFP4_GEMM_BACKEND": "emulation"} if version < "0.24" else {}
    request.write_text(json.dumps(release(version).simulation(**env)))
    moe, dense = release(version).run("load_tiny.py", str(request), *folders, root=tmp_path)
    assert (moe["architecture"], dense["architecture"]) == (
        "Qwen3MoeForCausalLM",
        "Qwen3ForCausalLM",
    )
    for model in (moe, dense):
        assert model["quantization"] == "modelopt_fp4"
        assert model["ids"] == [5, 6]
        # scales of the KV cache, which the checkpoint does not quantise
        left = [name for name in model["untouched"] if not name.endswith("_scale")]
        assert left == [], left
        assert all(".attn." in name for name in model["untouched"])
    assert any("FusedMoE" in name for name in moe["methods"])
