"""``recipe --ask``: what a release refuses is not written."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from builder.errors import Exit, RemoteError
from builder.proof.wholemodel import LayerRow
from builder.serving import recipefiles
from builder.serving.asked import RecipeRefused, asked_recipe, question_of
from builder.serving.lint import linted_recipe
from builder.serving.options import RecipeOptions
from builder.serving.recipe import Place, RecipeImage, recipe_of

from .served import request, served
from .test_asked import FakeRelease, OneGpu

if TYPE_CHECKING:
    from builder.serving.preflight import Preflight, PreflightRequest
    from builder.serving.recipe import RecipeRequest
    from tests.unit.caller import Call


CLAMPED = request("deepseek-v4-flash-nvfp4", place=Place(topology="tp2", launcher="a launcher"))


@dataclass
class Building(FakeRelease):
    """A release that builds a layer of experts, with another kernel if its files are patched."""

    kernel: str = "FLASHINFER_B12X"
    patched: str = ""

    def __call__(self, request: PreflightRequest) -> Preflight:
        kernel = self.patched if self.patched and request.plan.layers else self.kernel
        row = LayerRow(
            pattern="model.layers.*.experts", layer="FusedMoE", quantisation="NvFp4",
            kernels=(kernel,), attention="", experts=(8, 128), count=1, bytes=1,
            token_bytes=1,
        )  # fmt: skip
        return replace(super().__call__(request), layers=(row,))


def test_what_the_release_chose_is_a_note() -> None:
    release = Building()
    made = request("qwen3-30b-a3b")
    recipe = asked_recipe(made, linted_recipe(made), release)
    assert recipe.notes[-1] == (
        "vLLM 0.33.0 builds the model with these settings, on a simulated GB10: "
        "experts FLASHINFER_B12X"
    )
    (asked,) = release.asked
    assert (asked.plan.base, asked.plan.layers) == ("pypi:vllm==0.33.0", ("b12x-full",))
    assert "flashinfer_b12x" in asked.flags
    assert "--reasoning-parser" not in asked.flags, "it needs a tokenizer"
    assert "CUTE_DSL_ARCH=sm_121a" in asked.variables
    assert not asked.add_flags, "a flag that the recipe leaves out is not asked about"


def test_a_refused_recipe_is_none() -> None:
    release = FakeRelease(refuses={"flashinfer_b12x": ("model", "linear_backend=x: no kernel")})
    made = request("qwen3-30b-a3b")
    with pytest.raises(
        RecipeRefused, match=r"vLLM 0\.33\.0 refuses --linear-backend .*no kernel"
    ) as error:
        asked_recipe(made, linted_recipe(made), release)
    assert error.value.code == Exit.VERIFY_FAILED
    assert "--set linear-backend=" in (error.value.hint or "")


def test_a_near_configuration_refuses_no_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """It is another checkpoint's: what the release says of it is a warning."""
    release = FakeRelease(refuses={"flashinfer_b12x": ("model", "linear_backend=x: no kernel")})
    made = request("qwen3-30b-a3b")
    model = replace(made.model, config=None)

    def offline(asked: PreflightRequest) -> Preflight:
        if not asked.model.startswith("/"):
            raise RemoteError("no network")
        return release(asked)

    made = dataclasses.replace(made, model=model)
    recipe = replace(linted_recipe(made), id="me/Qwen3-30B-A3B-NVFP4")
    assert asked_recipe(made, recipe, offline) == recipe
    said = capsys.readouterr().err
    assert "vLLM 0.33.0 was asked about the configuration of nvidia/Qwen3-30B-A3B-NVFP4" in said
    assert "with that, vLLM 0.33.0 refuses --linear-backend flashinfer_b12x: " in said


def test_what_cannot_be_asked_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    made = request("qwen3-30b-a3b")
    recipe = linted_recipe(made)
    assert asked_recipe(made, recipe, FakeRelease(not_run="no network")) == recipe
    assert "vLLM 0.33.0 was not asked: no network" in capsys.readouterr().err


def test_the_first_of_two_sparks_is_asked_about_as_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A launcher joins the Sparks, so the flags do not tell how many there are."""
    asked_recipe(CLAMPED, linted_recipe(CLAMPED), OneGpu())
    assert capsys.readouterr().err == ""


def test_the_question_is_about_the_files_that_the_recipe_runs() -> None:
    """The official image without layers, where the profile's changes do not concern the model."""
    made = request("gpt-oss-120b", served=served(changed=("vllm-b12x-experts-scales",)))
    recipe = linted_recipe(made)
    assert question_of(made, recipe).layers == ()
    named = request(served=served(named_image=True, image="me/vllm:1"), checkpoint=None)
    question = question_of(named, linted_recipe(named))
    assert (question.base, question.layers) == ("me/vllm:1", ())


def test_another_profile_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def served_by(profile: str, *_: object) -> Any:
        backend = {"b12x-full": "flashinfer_b12x"}.get(profile, profile)
        return served(name=profile, flags=("--linear-backend", backend), moe_flags=())

    def asked(one: RecipeRequest, recipe: Any) -> Any:
        release = FakeRelease(refuses={"flashinfer_b12x": ("model", "linear_backend=x")})
        return asked_recipe(one, recipe, release)

    monkeypatch.setattr(recipefiles, "served_profile", served_by)
    monkeypatch.setattr(recipefiles, "asked_recipe", asked)
    monkeypatch.setattr(recipefiles, "linted_recipe", recipe_of)
    options = RecipeOptions(model="qwen3-30b-a3b", release="0.33.0", ask=True)
    made = recipefiles.recipe_text(options)
    assert made.recipe is not None
    assert made.recipe.profile == "marlin"
    assert "b12x-full is refused; this recipe has the profile marlin" in capsys.readouterr().err
    with pytest.raises(RecipeRefused):
        recipefiles.recipe_text(
            RecipeOptions(model="qwen3-30b-a3b", release="0.33.0", ask=True, profile="b12x-full")
        )


def test_a_recipe_that_was_not_asked_about_says_so(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipefiles, "served_profile", lambda *_: served())
    monkeypatch.setattr(recipefiles, "_taken", lambda _, request: linted_recipe(request))
    words = ("recipe", "qwen3-30b-a3b", "--release", "0.33.0")
    note = f"only vLLM 0.33.0's source was read; to ask vLLM: spark-build {' '.join(words)} --ask"
    assert note in call(*words).err
    assert "note: only" not in call(*words, "--ask").err


def test_experts_with_a_clamp_do_not_get_b12x() -> None:
    """vLLM 0.33.0 refuses it: its kernels do not apply ``swiglu_limit``."""
    left_out = {one.name: one.reason for one in linted_recipe(CLAMPED).left_out}
    assert "does not apply the clamp" in left_out["--moe-backend"]


EXPERTS, LINEAR, FALLBACK = (
    "vllm-b12x-experts-scales", "flashinfer-b12x-store-wait", "vllm-linear-fallback"
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "release", "official"),
    [
        # the code of its kernel is changed
        ((EXPERTS,), Building(), False),
        # none of its kernels is, and the release selects the same
        ((EXPERTS, LINEAR), Building(kernel="MARLIN"), True),
        ((LINEAR, FALLBACK), Building(), True),
        # the release as it is selects another one, or refuses
        ((FALLBACK,), Building(kernel="CUTLASS", patched="MARLIN"), False),
        # a layer of which nothing is known may change anything
        (("mine", FALLBACK), Building(kernel="MARLIN"), False),
        ((), Building(kernel="MARLIN"), False),
    ],
)
def test_no_patched_image_where_it_changes_nothing(
    changed: tuple[str, ...], release: Building, official: bool
) -> None:
    made = request("qwen3-30b-a3b", served=served(changed=changed))
    recipe = replace(linted_recipe(made), image=RecipeImage(ref="own", build="x", mod="m"))
    asked = asked_recipe(made, recipe, release)
    assert (asked.image.ref == "vllm/vllm-openai:v0.33.0") == official
    assert bool(asked.image.build) != official
    assert any("gets the same kernels" in note for note in asked.notes) == official


def test_an_image_that_the_user_names_stays() -> None:
    named = request(
        "qwen3-30b-a3b",
        served=served(changed=(FALLBACK,), named_image=True, unread=True, image="me/vllm:1"),
    )
    recipe = linted_recipe(named)
    assert asked_recipe(named, recipe, Building(kernel="MARLIN")).image == recipe.image
