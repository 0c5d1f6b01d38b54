"""The image of a recipe: the patched one only if a layer changes something for the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.serving.documents import RecipeImage
from builder.serving.kinds import (
    B12X,
    FP8,
    LINEAR_BACKEND,
    MOE_BACKEND,
    SELECTED,
    same_backend,
)
from builder.serving.profile import official_image, refuse_unpatched

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.serving.recipedraft import Draft

_FORCE_FP8 = "VLLM_TEST_FORCE_FP8_MARLIN"


def image_for(draft: Draft) -> RecipeImage:
    """The profile's image, or the official one if the profile's changes do not concern the model.

    ``draft`` has all settings of the recipe.

    Raises:
        UsageError: the image that the user named lacks changes that concern the model.
    """
    served = draft.request.served
    official = official_image(served.vllm)
    concern = [layer for layer in served.changed if _concerns(draft, layer)]
    if served.named_image and not served.unread:
        refuse_unpatched(served.image, served.name, concern)
    if served.build and served.changed and not concern:
        draft.notes.append(
            f"{served.name} changes files on vLLM {served.vllm} ({', '.join(served.changed)}), for "
            "kernels that this recipe does not use: the official image serves the same"
        )
        return RecipeImage(ref=official)
    return RecipeImage(
        ref=served.image, build=served.build, mod=served.mod,
        official=official if served.mod else "",
    )  # fmt: skip


def _concerns(draft: Draft, layer: str) -> bool:
    """Whether a layer changes something for the model with these settings; true if unknown."""
    kinds = draft.request.model.kinds()
    if kinds and not kinds & SELECTED:
        return False
    return _FOR[layer](draft, kinds or set(SELECTED)) if layer in _FOR else True


def _b12x_experts(draft: Draft, _kinds: set[str]) -> bool:
    return MOE_BACKEND in draft.flags and same_backend(draft.flags[MOE_BACKEND].value, B12X)


def _b12x_linear(_draft: Draft, kinds: set[str]) -> bool:
    return "nvfp4-linear" in kinds


def _w4a16_linear(draft: Draft, kinds: set[str]) -> bool:
    """FlashInfer's W4A16 GEMM, which another linear backend than Marlin selects from 0.30.0 on."""
    linear = draft.flags.get(LINEAR_BACKEND)
    return "w4a16-linear" in kinds and linear is not None and linear.value != "marlin"


def _beside_nvfp4(draft: Draft, kinds: set[str]) -> bool:
    return LINEAR_BACKEND in draft.flags and bool(kinds & (FP8 | {"w4a16-linear"}))


def _fp8_marlin(draft: Draft, kinds: set[str]) -> bool:
    return bool(kinds & FP8) and _FORCE_FP8 in draft.env and draft.env[_FORCE_FP8].value != "0"


#: Layers that concern some models only (docs/profiles.md#layers); all others concern every model.
_FOR: dict[str, Callable[[Draft, set[str]], bool]] = {
    "flashinfer-b12x-moe-barrier": _b12x_experts,
    "flashinfer-narrow-experts": _b12x_experts,
    "vllm-b12x-experts-scales": _b12x_experts,
    "flashinfer-b12x-store-wait": _b12x_linear,
    "vllm-b12x-reachable": _b12x_linear,
    "flashinfer-w4a16-store-wait": _w4a16_linear,
    "vllm-linear-fallback": _beside_nvfp4,
    "vllm-marlin-fp8": _fp8_marlin,
}
