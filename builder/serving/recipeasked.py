"""Asks a release about a recipe: what it refuses is not written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from builder.common.console import console
from builder.common.hints import again
from builder.errors import Exit, SparkBuildError
from builder.serving.asked import Question, ask_release
from builder.serving.interface import PLUGINS, REASONING_FLAG, TOOL_FLAG
from builder.serving.preflight import in_short, preflight
from builder.serving.release import release_base

if TYPE_CHECKING:
    from builder.serving.asked import Ask, Asked
    from builder.serving.models import Model
    from builder.serving.recipe import Recipe, RecipeRequest


OTHER = ("--profile", "marlin")
#: They read the tokenizer, which is not here; ``recipe_of`` takes names that the release has.
_PARSERS = {REASONING_FLAG, *PLUGINS, TOOL_FLAG, "--enable-auto-tool-choice"}


class Refusal(SparkBuildError):
    """A release refuses a recipe."""


def asked_recipe(request: RecipeRequest, recipe: Recipe, ask: Ask = preflight) -> Recipe:
    """The recipe, with what its release chose for the model.

    Raises:
        Refusal: the release refuses it (exit 5).
        SparkBuildError: the image or the layers cannot be read.
    """
    asked = ask_release(question_of(request, recipe), _known(request), ask)
    vllm = f"vLLM {recipe.vllm}"
    if asked.refused:
        refuse(recipe, asked)
    for text in asked.left_out:
        console.warn(f"{vllm} was not asked: {text}")
    if not asked.starts or not asked.own or asked.answer is None:
        return recipe
    chosen = in_short(recipe.profile, asked.answer)
    kernels = {
        "linear layers": chosen.linear, "experts": chosen.experts, "attention": chosen.attention,
    }  # fmt: skip
    words = "; ".join(f"{name} {', '.join(one)}" for name, one in kernels.items() if one)
    note = f"{vllm} builds the model with these settings, on a simulated GB10: {words}"
    return replace(recipe, notes=(*recipe.notes, note))


def question_of(request: RecipeRequest, recipe: Recipe) -> Question:
    """The recipe's first node as a question: on its image, or on the release that it is made from.

    A patched image is one with the profile's layers; the official one has none.
    """
    node = recipe.nodes[0]
    named = request.served.named_image and not request.served.unread
    patched = request.served.unread or bool(recipe.image.build or recipe.image.mod)
    return Question(
        model=str(request.checkpoint or recipe.id),
        base=recipe.image.ref if named else release_base(recipe.vllm),
        layers=(recipe.profile,) if patched and not named else (),
        flags=tuple(f.words for f in (*recipe.flags, *node.flags) if f.name not in _PARSERS),
        variables=recipe.variables(node),
    )


def _known(request: RecipeRequest) -> Model | None:
    return None if request.checkpoint is not None else request.model


def refuse(recipe: Recipe, asked: Asked) -> None:
    """Refuse a recipe in the release's words.

    Raises:
        Refusal: always.
    """
    one = asked.refused[0]
    what = " ".join(one.flag) or "the model"
    where = f" ({one.where})" if one.where else ""
    hint = again(*(("--set", f"{one.flag[0].removeprefix('--')}=") if one.flag else OTHER))
    text = f"vLLM {recipe.vllm} refuses {what} for {recipe.model}: {one.sentence}{where}"
    raise Refusal(text, Exit.VERIFY_FAILED, hint=hint)
