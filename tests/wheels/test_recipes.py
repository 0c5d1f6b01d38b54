"""Every recipe's command line parses with its release's own parser, and its variables are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.__main__ import run
from builder.errors import Exit, NotServed, UsageError
from builder.serving.models import Models
from builder.serving.profile import ServedProfile, served_profile
from builder.serving.recipe import recipe_of
from builder.serving.reciperequest import RecipeRequest
from builder.serving.registry import newest_release
from builder.serving.topology import Place
from tests.documents import validated
from tests.wheels.support import PROFILES

from .sandboxed import release_of
from .test_interface import RELEASES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.serving.documents import Recipe

    from .support import Planner

ROOT = Path(__file__).resolve().parents[2]
TWO = ("10.0.0.1", "10.0.0.2")
PLACES = (
    Place(topology="solo"),
    Place(topology="tp2", addresses=TWO, interface="enp1s0f0np0"),
    Place(topology="two-solos", addresses=TWO),
)
#: What no profile serves, by design: the release has no b12x, or its wheel's kernels do not run.
NOT_SERVED = {("0.17.1", "b12x-full"), ("0.17.1", "cutlass-sm12x")}


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
    assert {one["model"] for one in said["recipes"]} == set(Models.discover().files)
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
    assert "6 recipes up to date" in capsys.readouterr().out


def test_a_profile_that_does_not_support_the_release_is_refused() -> None:
    with pytest.raises(NotServed, match="no FlashInfer that vLLM before"):
        served_profile("b12x-full", "0.17.1", None)


@pytest.mark.parametrize("release", ["0.24.0", "0.25.1", "0.26.0", "0.27.1"])
def test_b12x_full_serves_a_mixed_checkpoint(release: str) -> None:
    """Its FP8 and W4A16 layers fall back, with the layer ``vllm-linear-fallback``."""
    served = served_profile("b12x-full", release, None)
    assert not served.refused
    for name in ("nemotron-3-super", "nemotron-3-nano", "nemotron-3-nano-w4a16"):
        model = Models.discover().model(name)
        made = recipe_of(RecipeRequest(model=model, served=served, place=PLACES[0]))
        flags = {flag.name: flag.value for flag in made.flags}
        assert flags["--linear-backend"] == "flashinfer_b12x"


@pytest.mark.parametrize("release", RELEASES)
def test_every_line_parses(planned: Planner, release: str) -> None:
    widest = "marlin" if (release, "b12x-full") in NOT_SERVED else "b12x-full"
    # b12x-full adds values of flags to some releases, and takes none away
    running = release_of(planned(f"pypi:vllm=={release}", widest))
    made: list[Recipe] = []
    for profile in PROFILES:
        if (release, profile) not in NOT_SERVED:
            found = list(recipes(served_profile(profile, release, None)))
            made += [one for one in found if not isinstance(one, str)]
            for why in (one for one in found if isinstance(one, str)):
                assert any(words in why for words in ("does not serve", "needs vLLM", "draft")), why
    assert len({one.model for one in made}) >= (5 if release == "0.17.1" else 6)
    lines = [recipe.command(node)[2:] for recipe in made for node in recipe.nodes]
    broken = [["--no-such-flag"], ["--moe-backend", "no-such-backend"]]
    (said,) = running.run("arguments.py", given={**running.simulation(), "lines": lines + broken})
    complaints = dict(zip(map(tuple, lines + broken), said["complaints"], strict=True))
    assert [line for line, why in complaints.items() if why] == [tuple(line) for line in broken]
    named = {one.name for recipe in made for one in recipe.env if one.name.startswith("VLLM_")}
    assert named <= set(said["variables"])
