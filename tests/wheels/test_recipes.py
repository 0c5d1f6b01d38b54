"""Every recipe's command line parses as its release would parse it, and its variables are read.

With five releases the parser itself does it; with each, one that is made of what we read of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from packaging.version import Version

from builder.__main__ import run
from builder.errors import Exit, NotServed, SparkBuildError, UsageError
from builder.serving.asked import ask_release, question_of
from builder.serving.models import Models
from builder.serving.preflight import in_short
from builder.serving.recipe import Place, RecipeRequest, recipe_of
from builder.serving.recipefiles import PLACES as REGISTERED_PLACES
from builder.serving.recipefiles import PROFILES as REGISTERED
from builder.serving.recipefiles import best_recipe, newest_release
from builder.serving.release import ServedProfile, served_profile
from builder.serving.serveflags import wrong_kind
from tests.documents import validated
from tests.wheels.support import PROFILES

from .sandboxed import release_of
from .test_serveflags import ALL, FULL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from builder.serving.recipe import Recipe
    from builder.serving.serveflags import Flag, ServeInterface

    from .support import Planner

ROOT = Path(__file__).resolve().parents[2]
TWO = ("10.0.0.1", "10.0.0.2")
PLACES = (
    Place(topology="solo"),
    Place(topology="tp2", addresses=TWO, interface="enp1s0f0np0"),
    Place(topology="two-solos", addresses=TWO),
)
#: What no parser takes.
BROKEN = [
    ["--no-such-flag"],
    ["--moe-backend", "no-such-backend"],
    ["--port", "4k"],
    ["--max-num-batched-tokens", "2.5K"],
    ["--speculative-config", "{"],
]
#: Before it these profiles serve no release: it has no b12x, and its wheel's kernels do not run.
FIRST_OF_OTHERS, OTHERS = Version("0.20.0"), ("b12x-full", "cutlass-sm12x")


def recipes(served: ServedProfile) -> Iterator[Recipe | str]:
    """A recipe for each model and topology; else why there is none."""
    models = Models.discover()
    for name in models.files:
        model = models.model(name)
        for place in PLACES:
            for speculate in (False, True):
                try:
                    yield recipe_of(
                        RecipeRequest(model=model, served=served, place=place, speculate=speculate)
                    )
                except UsageError as error:
                    yield str(error)


def test_the_committed_registry_is_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "export", "--check", "--json"]) == 0
    said = validated("recipes-export", json.loads(capsys.readouterr().out))
    assert (said["vllm"], said["written"]) == (newest_release(), False)
    without = {one["model"] for one in said["without"]}
    assert {one["model"] for one in said["recipes"]} == set(Models.discover().files) - without
    assert len(without) < len(said["recipes"])
    assert {one["profile"] for one in said["recipes"]} == {"b12x-full", "marlin"}


def test_a_stale_registry_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (".sparkrun", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name)
    older = ["recipes", "export", "--release", "0.32.0", "--in", str(tmp_path)]
    assert run([*older, "--check"]) == Exit.STALE
    said = capsys.readouterr().err
    assert "recipes/sparkrun/nemotron-3-super.yaml" in said
    assert f"try: spark-build {' '.join(older)}\n" in said
    assert run(older) == 0
    assert run([*older, "--check"]) == 0
    written = len(list((tmp_path / "recipes" / "sparkrun").glob("*.yaml")))
    assert f"{written} recipes up to date" in capsys.readouterr().out


def test_a_profile_that_does_not_support_the_release_is_refused() -> None:
    words = "the release has vllm 0.17.1: no FlashInfer that vLLM before"
    with pytest.raises(NotServed, match=words) as failure:
        served_profile("b12x-full", "0.17.1", None)
    assert failure.value.hint == "--profile marlin"
    assert served_profile("marlin", "0.17.1", None)


def test_a_profile_that_needs_a_compiler_names_the_command_for_its_image() -> None:
    with pytest.raises(SparkBuildError, match="this layer changes compiled code") as failure:
        served_profile("cutlass-sm12x", "0.19.1", None)
    assert failure.value.code == Exit.NEEDS_REBUILD
    assert failure.value.hint.startswith("spark-build image --layers cutlass-sm12x --base ")
    assert " --compile" in failure.value.hint


@pytest.mark.parametrize("release", ["0.24.0", "0.25.1", "0.26.0", "0.27.1"])
def test_b12x_full_serves_a_mixed_checkpoint(release: str) -> None:
    """Its FP8 and W4A16 layers fall back, with the layer ``vllm-linear-fallback``."""
    served = served_profile("b12x-full", release, None)
    assert not served.refused
    for name in ("nemotron-3-super", "nemotron-3-nano", "nemotron-3-nano-w4a16"):
        model = Models.discover().model(name)
        made = recipe_of(RecipeRequest(model=model, served=served, place=PLACES[0]))
        flags = {flag.name: flag.value for flag in made.flags}
        asked = "flashinfer_b12x" if "nvfp4-linear" in model.kinds() else None
        assert flags.get("--linear-backend") == asked


def recipes_of(release: str) -> Iterator[tuple[ServedProfile, Recipe]]:
    """The recipes of every profile that serves a release; why there is none is as expected."""
    for profile in PROFILES:
        if profile in OTHERS and Version(release) < FIRST_OF_OTHERS:
            with pytest.raises(SparkBuildError):  # not served, or only with a compiler
                served_profile(profile, release, None)
            continue
        served = served_profile(profile, release, None)
        for one in recipes(served):
            if isinstance(one, str):
                assert any(w in one for w in ("does not serve", "needs vLLM", "draft")), one
            else:
                yield served, one


def lines_of(recipe: Recipe) -> list[list[str]]:
    """The words after ``vllm serve``, for each node."""
    return [recipe.command(node)[2:] for node in recipe.nodes]


def variables_of(recipe: Recipe) -> set[str]:
    """Those of vLLM."""
    return {one.name for one in recipe.env if one.name.startswith("VLLM_")}


@pytest.mark.parametrize("release", FULL)
def test_every_line_parses_with_the_parser_itself(planned: Planner, release: str) -> None:
    widest = "marlin" if Version(release) < FIRST_OF_OTHERS else "b12x-full"
    # b12x-full adds values of flags to some releases, and takes none away
    running = release_of(planned(f"pypi:vllm=={release}", widest))
    made = [recipe for _, recipe in recipes_of(release)]
    assert len({one.model for one in made}) >= (5 if release == "0.17.1" else 6)
    lines = [line for recipe in made for line in lines_of(recipe)]
    (said,) = running.run("arguments.py", given={**running.simulation(), "lines": lines + BROKEN})
    complaints = dict(zip(map(tuple, lines + BROKEN), said["complaints"], strict=True))
    assert [line for line, why in complaints.items() if why] == [*map(tuple, BROKEN)]
    assert {name for one in made for name in variables_of(one)} <= set(said["variables"])


@pytest.mark.parametrize("release", ALL)
def test_every_line_parses_with_a_parser_as_we_read_it(release: str) -> None:
    """`test_serveflags.py` holds that reading against what each parser said."""
    seen = set()
    parsers: dict[str, argparse.ArgumentParser] = {}
    for served, recipe in recipes_of(release):
        seen.add(recipe.model)
        if served.name not in parsers:
            parsers[served.name] = parser_of(served.interface)
        parser = parsers[served.name]
        for line in lines_of(recipe):
            assert parser.parse_args(line).model_tag == recipe.id
        assert variables_of(recipe) <= served.interface.variables.keys()
    assert len(seen) >= 5
    for parser in parsers.values():
        for line in BROKEN:
            with pytest.raises(argparse.ArgumentError):
                parser.parse_args(line)


def parser_of(interface: ServeInterface) -> argparse.ArgumentParser:
    """A parser with the flags that were read."""
    parser = Raising(add_help=False, allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?")
    for flag in interface.flags:
        if flag.takes == "nothing":
            parser.add_argument(*flag.names, action="store_true")
            continue
        nargs = {"one": None, "optional": "?", "many": "+"}.get(str(flag.takes), flag.takes)
        parser.add_argument(*flag.names, nargs=nargs, type=typed(flag))
    return parser


class Raising(argparse.ArgumentParser):
    """A parser that raises, with arguments that it does not know too."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def typed(flag: Flag) -> Callable[[str], str]:
    """What takes one word of a flag."""

    def take(word: str) -> str:
        if wrong_kind(flag.kind, word, nullable=flag.nullable):
            raise ValueError(word)
        if flag.choices and flag.folded(word) not in flag.choices:
            raise ValueError(word)
        return word

    return take


#: Plain and clamped gated SiLU, other activations, and formats that a profile does not concern.
REPRESENTATIVE = (
    "deepseek-v4-flash-nvfp4", "gpt-oss-120b", "nemotron-3-nano", "nemotron-3-nano-w4a16",
    "nemotron-3-super", "qwen3-30b-a3b",
)  # fmt: skip


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_release_takes_the_committed_recipes(name: str) -> None:
    """Whole models with the recipe's flags, on one Spark and as rank 0 of two.

    Where the official image serves, the profile's layers give the model no other kernel.
    """
    vllm, model = newest_release(), Models.discover().model(name)
    profiles = [served_profile(profile, vllm, None) for profile in REGISTERED]
    for place in REGISTERED_PLACES:
        recipe = best_recipe(model, profiles, place)
        served = next(one for one in profiles if one.name == recipe.profile)
        question = question_of(RecipeRequest(model=model, served=served, place=place), recipe)
        asked = ask_release(question, model)
        memory = asked.answer.memory if asked.answer else None
        if memory is not None and memory.sparks and not question.joined:
            assert "No available memory" in asked.refused[0].sentence
            continue
        assert (asked.refused, asked.starts, asked.own) == ((), True, True), asked.left_out
        if question.layers or asked.answer is None:
            continue
        patched = ask_release(dataclasses.replace(question, layers=(recipe.profile,)), model)
        assert patched.answer is not None
        official, other = in_short("", asked.answer), in_short("", patched.answer)
        assert (official.linear, official.experts) == (other.linear, other.experts)


def test_no_recipe_is_written_that_the_release_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe", "qwen3-30b-a3b", "--release", "0.33.0", "--ask", "-o", str(tmp_path / "x")]
    wrong = [*words, "--profile", "b12x-full", "--set", "moe-backend=triton"]
    assert run(wrong) == Exit.VERIFY_FAILED
    assert "refuses --moe-backend triton" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert run(words) == 0
    assert "experts FLASHINFER_B12X" in (tmp_path / "x").read_text()
