"""Kinds of layers, and the kernels that suit those of a model.

A backend is left out of a recipe if vLLM refuses it for the model, if it has no kernel for the
model's layers, or if it computes something else than the checkpoint says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from builder.applier.agreement import flag_values

if TYPE_CHECKING:
    from builder.serving.models import Model
    from builder.serving.reciperequest import RecipeRequest

#: Kinds of experts that a profile's flags select kernels for.
EXPERTS = frozenset({"nvfp4-moe", "w4a16-moe"})
FP8 = frozenset({"fp8-linear", "fp8-block"})
LINEAR = frozenset({"nvfp4-linear", "w4a16-linear"}) | FP8
#: All kinds that a profile selects kernels for.
SELECTED = EXPERTS | LINEAR
MOE_BACKEND, LINEAR_BACKEND = "--moe-backend", "--linear-backend"
B12X = "flashinfer_b12x"
#: Activations of FlashInfer's b12x experts, by vLLM's release
#: (vllm/model_executor/layers/fused_moe/experts/flashinfer_b12x_moe.py).
_B12X_COMPUTES = (
    ("<0.25.0rc0", {"silu"}),
    (">=0.25.0rc0,<0.28.0rc0", {"silu", "relu2"}),
    (">=0.28.0rc0", {"silu", "relu2", "gelu_tanh"}),
)
#: The releases whose b12x experts take W4A16 experts, and do not tell FlashInfer so: the same file
#: of 0.23.0 to 0.33.0, the newest read, does not name quant_mode.  Before, vLLM refuses them.
_ROUNDS = SpecifierSet(">=0.23.0rc0")


def experts_refusal(request: RecipeRequest, value: str | None) -> str:
    """Why a value of ``--moe-backend`` does not suit this model; empty if it may."""
    model, vllm = request.model, request.served.vllm
    kinds = model.kinds()
    if kinds and not kinds & EXPERTS and same_backend(value, B12X):
        return "the model has no NVFP4 experts"
    own = dict(flag_values(request.served.moe_flags)).get(MOE_BACKEND)
    refused = request.served.refused if same_backend(value, own) else {}
    for kind in sorted(kinds & EXPERTS & set(refused)):
        return (
            f"vLLM refuses it for {kind} layers ({refused[kind]!r}), and selects a backend itself"
        )
    if not same_backend(value, B12X):
        return ""
    if model.experts is None:
        return f"the activation of the experts is unknown, and {B12X} does not support every one"
    computes: set[str] = set()
    for versions, known in _B12X_COMPUTES:
        if SpecifierSet(versions).contains(vllm, prereleases=True):
            computes = known
    if model.experts.value in computes:
        return ""
    return (
        f"{B12X} of vLLM {vllm} supports experts with {', '.join(sorted(computes))}, and the "
        f"model's have {model.experts.value}: vLLM selects a backend itself"
    )


def w4a16_as_w4a4(model: Model, vllm: str, value: str | None) -> str:
    """Why a backend rounds the activations of a model's W4A16 experts; empty if it does not."""
    if not same_backend(value, B12X) or "w4a16-moe" not in model.kinds():
        return ""
    if not _ROUNDS.contains(vllm, prereleases=True):
        return ""
    return (
        f"{B12X} of vLLM {vllm} rounds the activations of W4A16 experts to FP4 (vLLM #56535): "
        "without it vLLM selects Marlin, which does not"
    )


def linear_refusal(model: Model, value: str | None) -> str:
    """Why a value of ``--linear-backend`` selects nothing for this model; empty if it may."""
    kinds = model.kinds()
    if kinds and not kinds & LINEAR:
        return "the model has no linear layers of these kinds"
    if kinds and "nvfp4-linear" not in kinds and same_backend(value, B12X):
        return (
            f"{B12X} has linear kernels for NVFP4 activations alone, and the model's linear layers "
            "have none: vLLM selects their kernels itself"
        )
    return ""


def same_backend(value: str | None, other: str | None) -> bool:
    """Whether two values of a backend are the same, as vLLM reads them."""
    return _folded(value) == _folded(other) is not None


def _folded(value: str | None) -> str | None:
    return value.lower().replace("-", "_") if value is not None else None
