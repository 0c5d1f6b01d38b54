"""Makes a recipe from a model, a profile and a topology, checked against one release."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from builder.applier.agreement import flag_values
from builder.errors import UsageError
from builder.serving.documents import PluginFile, Recipe, RecipeImage, RecipeMemory
from builder.serving.interface import PLUGINS, REASONING_FLAG, TOOL_FLAG
from builder.serving.memory import UTILIZATION
from builder.serving.profile import official_image
from builder.serving.recipecheckpoint import checkpoint_config, unlike
from builder.serving.recipechosen import choose, refuse_gpus, refuse_parsers
from builder.serving.recipedraft import Draft
from builder.serving.recipememory import MemoryInputs, judge
from builder.serving.topology import common_flags, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.serving.modelconfig import ModelConfig
    from builder.serving.models import Model, ParserChoice
    from builder.serving.reciperequest import RecipeRequest

#: The folder in the container for plugin files of a checkpoint.
PLUGIN_FOLDER = "/app"
#: Kinds of layers that a profile's flags select kernels for.
_EXPERTS = {"nvfp4-moe", "w4a16-moe"}
_LINEAR = {"nvfp4-linear", "w4a16-linear", "fp8-linear", "fp8-block"}
#: Activations of FlashInfer's b12x experts, by vLLM's release
#: (vllm/model_executor/layers/fused_moe/experts/flashinfer_b12x_moe.py).
_B12X = "flashinfer_b12x"
_B12X_COMPUTES = (
    ("<0.25.0rc0", {"silu"}),
    (">=0.25.0rc0,<0.28.0rc0", {"silu", "relu2"}),
    (">=0.28.0rc0", {"silu", "relu2", "gelu_tanh"}),
)


def selects_for(model: Model) -> bool:
    """Whether a model has layers whose kernels a profile selects; true if unknown."""
    kinds = model.kinds()
    return not kinds or bool(kinds & (_EXPERTS | _LINEAR))


def recipe_of(request: RecipeRequest) -> Recipe:
    """Make a recipe.

    Raises:
        UsageError: the profile does not serve the model, or a chosen value is invalid.
    """
    model, served = request.model, request.served
    _refuse(request)
    draft = Draft(request)
    _from_model(draft)
    _from_profile(draft)
    for setting in common_flags(request.place.topology):
        draft.flag(setting.name, setting.value, setting.origin)
    draft.flag("--host", "0.0.0.0", "topology: reached from outside the container")  # noqa: S104
    draft.flag("--port", str(request.port), "--port")
    for text in request.chosen:
        choose(draft, text)
    refuse_parsers(draft)
    refuse_gpus(draft)
    config = checkpoint_config(draft)
    memory = _memory(draft, config)
    if config is not None:
        read = memory.weights.bytes if memory and memory.weights else None
        draft.notes += unlike(request.model, config, read)
    nodes = nodes_of(request.place, served)
    for node in nodes:
        for flag in node.flags:
            if why := served.interface.refusal(flag.name, flag.value):
                raise UsageError(f"topology {request.place.topology}: {why}")
    return Recipe(
        model=model.name,
        id=model.id.value,
        revision=model.revision.value if model.revision else "",
        vllm=served.vllm,
        profile=served.name,
        topology=request.place.topology,
        image=RecipeImage(
            ref=served.image, build=served.build, mod=served.mod,
            official=official_image(served.vllm) if served.mod else "",
        ),
        port=request.port,
        flags=tuple(draft.flags.values()),
        env=tuple(draft.env.values()),
        nodes=nodes,
        plugins=tuple(draft.plugins),
        memory=memory,
        left_out=tuple(draft.left_out),
        unknown=tuple(model.unknown()),
        notes=(*_notes(draft, fits=memory is not None and memory.fits == "yes"), *draft.notes),
        made_by=request.command,
        failures=tuple(f for f in model.failures if f.holds_for(served.vllm)),
        measured=tuple(m for m in model.measured if m.profile == served.name),
    )  # fmt: skip


def _memory(draft: Draft, config: ModelConfig | None) -> RecipeMemory | None:
    """Estimate whether it fits into one Spark; use a larger share of the memory if that helps."""
    request = draft.request
    if request.place.topology not in ("solo", "two-solos"):
        if request.checkpoint is not None:
            draft.notes.append("memory is estimated for one Spark, and not for one model over two")
        return None
    judged = judge(
        MemoryInputs(request.model, request.checkpoint, request.served.vllm, draft.flags, config)
    )
    if judged.flag is not None:
        draft.flags[UTILIZATION] = judged.flag
    draft.notes += judged.notes
    return judged.memory


def _refuse(request: RecipeRequest) -> None:
    model, served = request.model, request.served
    if model.needs is not None and not model.needs.holds_for(served.vllm):
        raise UsageError(
            f"{model.name} needs vLLM {model.needs.vllm}, and this is {served.vllm} "
            f"({model.needs.source})",
            hint="--release 0.33.0",
        )
    for layers in model.holds:  # the flag for refused experts is left out instead
        if layers.kind in served.refused and layers.kind not in _EXPERTS:
            raise UsageError(
                f"{served.name} on vLLM {served.vllm} does not serve {layers.kind} layers, and "
                f"{model.name} has them ({layers.source}): vLLM stops with "
                f"{served.refused[layers.kind]!r} (0.28.0 and later use another kernel for them)",
                hint="--profile marlin",
            )


# -- the model


def _from_model(draft: Draft) -> None:
    model, vllm = draft.request.model, draft.request.served.vllm

    def add_flag(flag: str, value: object, source: str) -> None:
        draft.flag(flag, None if value is None else str(value), f"model: {source}")

    for known in model.flags:
        if known.holds_for(vllm):
            add_flag(known.flag, known.value, f"{known.why} ({known.source})")
    for variable in model.variables:
        if variable.holds_for(vllm):
            draft.variable(variable.name, variable.value, f"model: {variable.source}")
    figures = {
        "--max-model-len": model.context,
        "--kv-cache-dtype": model.kv_cache_dtype,
        UTILIZATION: model.gpu_memory_utilization,
    }
    for name, figure in figures.items():
        if figure is not None:
            add_flag(name, figure.value, figure.source)
    _parser(draft, REASONING_FLAG, model.reasoning_parsers)
    if _parser(draft, TOOL_FLAG, model.tool_parsers):
        add_flag("--enable-auto-tool-choice", None, f"a model with a tool parser: {TOOL_FLAG}")
    if draft.request.speculate:
        _speculate(draft)


def _parser(draft: Draft, flag: str, choices: Sequence[ParserChoice]) -> bool:
    """Set the first parser that the release or the checkpoint has."""
    served = draft.request.served
    built_in = served.interface.parsers(flag)
    for choice in choices:
        origin = f"model: {choice.source}"
        if not choice.holds_for(served.vllm):
            continue
        if choice.plugin is None and choice.name not in built_in:
            why = f"vLLM {served.vllm} has no parser {choice.name}"
            draft.leave_out(flag, choice.name, origin, why)
            continue
        if choice.plugin is not None:
            path = f"{PLUGIN_FOLDER}/{choice.plugin}"
            draft.plugins.append(PluginFile(name=choice.plugin, path=path))
            draft.flag(PLUGINS[flag], path, origin)
        draft.flag(flag, choice.name, origin)
        return True
    return False


def _speculate(draft: Draft) -> None:
    model, vllm = draft.request.model, draft.request.served.vllm
    draft_tokens = model.speculation
    if draft_tokens is None:
        raise UsageError(f"{model.name} is not known to draft tokens", hint="leave --speculate out")
    if not draft_tokens.holds_for(vllm):
        raise UsageError(
            f"{model.name} drafts tokens with vLLM {draft_tokens.vllm}, and this is {vllm} "
            f"({draft_tokens.source})"
        )
    value = {"method": draft_tokens.method, "num_speculative_tokens": draft_tokens.tokens}
    more = {"moe_backend": draft_tokens.moe_backend} if draft_tokens.moe_backend else {}
    text = json.dumps({**value, **more}, separators=(",", ":"))
    draft.flag("--speculative-config", text, f"model: {draft_tokens.source}")


# -- the profile


def _from_profile(draft: Draft) -> None:
    served, kinds = draft.request.served, draft.request.model.kinds()
    origin = f"profile {served.name} on vLLM {served.vllm}"
    for variable, setting in served.env.items():
        draft.variable(variable, setting, origin)
    for name, value in flag_values(served.flags):
        if kinds and not kinds & _LINEAR:
            draft.leave_out(name, value, origin, "the model has no linear layers of these kinds")
        else:
            draft.flag(name, value, origin)
    for name, value in flag_values(served.moe_flags):
        why = _no_experts(draft, value)
        if why:
            draft.leave_out(name, value, origin, why)
        else:
            draft.flag(name, value, origin)


def _no_experts(draft: Draft, value: str | None) -> str:
    """Why a profile's flag for experts does not suit this model; empty if it does."""
    model, vllm = draft.request.model, draft.request.served.vllm
    kinds = model.kinds()
    if kinds and not kinds & _EXPERTS:
        return "the model has no NVFP4 experts"
    refused = draft.request.served.refused
    for kind in sorted(kinds & _EXPERTS & set(refused)):
        return (
            f"vLLM refuses it for {kind} layers ({refused[kind]!r}), and selects a backend itself"
        )
    if value != _B12X:
        return ""
    if model.experts is None:
        return f"the activation of the experts is unknown, and {_B12X} does not support every one"
    computes: set[str] = set()
    for versions, known in _B12X_COMPUTES:
        if SpecifierSet(versions).contains(vllm, prereleases=True):
            computes = known
    if model.experts.value in computes:
        return ""
    return (
        f"{_B12X} of vLLM {vllm} supports experts with {', '.join(sorted(computes))}, and the "
        f"model's have {model.experts.value}: vLLM selects a backend itself"
    )


def _notes(draft: Draft, *, fits: bool) -> Iterator[str]:
    """Notes for the user who starts it."""
    model = draft.request.model
    if not model.holds:
        yield "the kinds of layers in the checkpoint are unknown: the profile may not fit them"
    if "--max-model-len" not in draft.flags:
        yield "the context is unknown: vLLM uses the model's maximum; limit: --set max-model-len=N"
    if UTILIZATION not in draft.flags and not fits:
        yield "the memory that it needs is unknown: if it runs out, --set gpu-memory-utilization=F"
    if model.revision is None:
        yield "no revision is known: the latest one of the checkpoint is served"
    if draft.request.served.unread:
        served = draft.request.served
        yield f"{served.image} was not checked: it must contain {served.name} on vLLM {served.vllm}"
    if draft.plugins:
        files = ", ".join(plugin.name for plugin in draft.plugins)
        yield f"{files} comes with the checkpoint: put it next to this recipe first"
