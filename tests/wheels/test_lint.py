"""``lint`` on real releases: commands as five public write-ups have them, and our own recipes."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from builder.__main__ import run
from builder.errors import SparkBuildError, UsageError
from builder.serving.lint import Linter, lint, linted_recipe
from builder.serving.models import Models
from builder.serving.recipe import Place, RecipeRequest
from builder.serving.recipeformats import rendered
from builder.serving.release import served_profile

from .test_serveflags import ALL

if TYPE_CHECKING:
    from collections.abc import Iterator

SUPER = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"
#: The commands of the write-ups, in our own words, with what is wrong with each.
NOTES = {
    "note 0, with its pitfalls": (
        "0.17.1",
        ("VLLM_NVFP4_GEMM_BACKEND=marlin VLLM_MARLIN_USE_ATOMIC_ADD=1 "
        "VLLM_USE_FLASHINFER_MOE_FP4=0 VLLM_NVFP4_MOE_BACKEND=marlin VLLM_MXFP4_BACKEND=marlin "
        f"vllm serve {SUPER} --dtype auto --kv-cache-dtype fp8 --moe-backend marlin "
        "--gpu-memory-utilization 0.85 --max-model-len 32768 --max-num-batched-tokens 2048 "
        "--reasoning-parser nemotron_super --enable-auto-tool-choice "
        "--tool-call-parser qwen3_coder --enforce-eager"),
        {"unknown-variable": 2, "unknown-parser": 1, "batched-tokens": 1, "eager-autotune": 1,
         "short-context": 1},
    ),
    "note 0, as it works": (
        "0.17.1",
        ("VLLM_NVFP4_GEMM_BACKEND=marlin VLLM_MARLIN_USE_ATOMIC_ADD=1 "
        f"VLLM_USE_FLASHINFER_MOE_FP4=0 vllm serve {SUPER} --dtype auto --kv-cache-dtype fp8 "
        "--moe-backend marlin --tensor-parallel-size 1 --trust-remote-code "
        "--gpu-memory-utilization 0.85 --max-model-len 200000 --max-num-batched-tokens 4096 "
        "--reasoning-parser nemotron_v3 --enable-auto-tool-choice --tool-call-parser qwen3_coder "
        "--enable-prefix-caching"),
        {},
    ),
    "note 1, without its plugin": (
        "0.19.1",
        (f"vllm serve {SUPER} --async-scheduling --max-num-seqs 4 --mamba_ssm_cache_dtype float32 "
        "--reasoning-parser super_v3 --speculative_config "
        """'{"method":"mtp","num_speculative_tokens":3,"moe_backend":"triton"}'"""),
        {"unknown-parser": 1},
    ),
    "note 2, on the release that it names": (
        "0.20.1",
        ("CUTE_DSL_ARCH=sm_121a VLLM_NVFP4_GEMM_BACKEND=flashinfer-b12x "
        "VLLM_FLASHINFER_MOE_BACKEND=latency vllm serve m"),
        {"variable-value": 1, "no-effect": 1, "memory-unset": 1},
    ),
    "note 2, today": (
        "0.33.0",
        ("CUTE_DSL_ARCH=sm_121a VLLM_NVFP4_GEMM_BACKEND=flashinfer-b12x "
        "VLLM_FLASHINFER_MOE_BACKEND=latency vllm serve m"),
        {"unknown-variable": 2, "memory-unset": 1},
    ),
    "note 3, two nodes": (
        "0.19.1",
        ("VLLM_NVFP4_GEMM_BACKEND=cutlass NCCL_SOCKET_IFNAME=enp1s0f0np0 vllm serve m "
        "--tensor-parallel-size 2 --distributed-executor-backend ray"),
        {"ray-needed": 1, "gloo-interface": 1},
    ),
    "values that only the configuration checks": (
        "0.33.0",
        ("vllm serve m --kv-cache-dtype banana --quantization modelop --attention-backend flash "
        "--reasoning-parser qwen33 --port 8k"),
        {"bad-value": 3, "quantization-name": 1, "unknown-parser": 1},
    ),
    "note 4, today": (
        "0.33.0",
        ("VLLM_USE_FLASHINFER_MOE_FP4=0 VLLM_NVFP4_GEMM_BACKEND=marlin "
        "VLLM_TEST_FORCE_FP8_MARLIN=1 vllm serve m"),
        {"unknown-variable": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("release", "text", "wrong"), NOTES.values(), ids=NOTES)
def test_commands_of_the_write_ups(release: str, text: str, wrong: dict[str, int]) -> None:
    report = lint([("x.sh", text)], Linter(release=release), Models.discover())
    found: dict[str, int] = {}
    for finding in report.findings:
        found[finding.rule] = found.get(finding.rule, 0) + 1
    assert found == wrong, report.findings


@pytest.mark.parametrize("form", ["docker", "compose", "shell"])
@pytest.mark.parametrize(
    ("model", "profile", "release"),
    [
        ("nemotron-3-super", "marlin", "0.17.1"),
        ("nemotron-3-super", "marlin", "0.33.0"),
        ("nemotron-3-nano", "b12x-full", "0.22.1"),
        ("gpt-oss-120b", "marlin", "0.33.0"),
    ],
)
def test_nothing_is_found_in_our_recipes(
    capsys: pytest.CaptureFixture[str], form: str, model: str, profile: str, release: str
) -> None:
    words = ["recipe", model, "--profile", profile, "--release", release, "--format", form]
    assert run(words) == 0
    name = "compose.yaml" if form == "compose" else "serve.sh"
    text = capsys.readouterr().out
    report = lint([(name, text)], Linter(release=release), Models.discover())
    assert (report.commands, report.findings) == (1, ())


FORMS = ("docker", "compose", "shell", "kubernetes", "sparkrun", "eugr")


def own_files(release: str, profile: str) -> Iterator[tuple[str, str]]:
    """Every recipe of a profile on a release, in every format, with the file's name."""
    try:
        served = served_profile(profile, release, None)
    except SparkBuildError:  # it does not serve this release
        return
    models = Models.discover()
    place = Place(topology="solo")
    for name in models.files:
        try:
            recipe = linted_recipe(
                RecipeRequest(model=models.model(name), served=served, place=place)
            )
        except UsageError:  # nor this model
            continue
        for form in FORMS:
            with suppress(UsageError):  # a file of the checkpoint that it cannot mount
                yield from rendered(recipe, form).items()


@pytest.mark.parametrize("release", ALL)
def test_our_files_alone_pass_on_every_release(release: str) -> None:
    """With no option: the release is the file's, and its mod or its image has the changes."""
    linter, models = Linter(), Models.discover()
    files = [one for profile in ("b12x-full", "marlin") for one in own_files(release, profile)]
    assert len(files) > 20
    for name, text in files:
        report = lint([(name, text)], linter, models)
        assert (report.commands, report.vllm, report.findings) == (1, release, ()), text


def test_without_its_mod_a_recipe_is_refused() -> None:
    (text,) = (t for n, t in own_files("0.24.0", "b12x-full") if "recipe_version: \"2\"" in t
               and "model: \"nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4\"" in t)  # fmt: skip
    assert "mods:" in text
    without = re.sub(r"(?m)^mods:\n.*\n", "mods: []\n", text)
    without = without.replace("profile b12x-full, solo", "profile other, solo")
    report = lint([("x.yaml", without)], Linter(), Models.discover())
    assert "b12x-unreachable" in {one.rule for one in report.findings}
