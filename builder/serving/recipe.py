"""Makes a recipe from a model, a profile and a topology, checked against one release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from builder.applier.agreement import flag_values
from builder.errors import UsageError
from builder.serving.documents import PluginFile, Recipe, RecipeMemory
from builder.serving.interface import PLUGINS, REASONING_FLAG, TOOL_FLAG
from builder.serving.kinds import (
    EXPERTS,
    FP8,
    LINEAR_BACKEND,
    MOE_BACKEND,
    SELECTED,
    experts_refusal,
    linear_refusal,
    w4a16_as_w4a4,
)
from builder.serving.memory import UTILIZATION
from builder.serving.memorydocuments import USUAL_FRACTION
from builder.serving.recipecheckpoint import checkpoint_config, unlike
from builder.serving.recipechosen import PLUGIN_FOLDER, choose, refuse_gpus, refuse_parsers
from builder.serving.recipedraft import Draft
from builder.serving.recipeimage import image_for
from builder.serving.recipememory import MemoryInputs, judge
from builder.serving.topology import common_flags, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.serving.modelconfig import ModelConfig
    from builder.serving.models import Measured, Model, ParserChoice
    from builder.serving.reciperequest import RecipeRequest

#: Makes FP8 layers Marlin; the releases with it in which --moe-backend alone makes experts Marlin,
#: and FP8 layers have another kernel without it.  From 0.24.0 to 0.27.1 --linear-backend marlin
#: leaves them none (docs/profiles.md, "Two variables of Marlin").
_FORCE_FP8 = "VLLM_TEST_FORCE_FP8_MARLIN"
_FP8_BESIDE_MARLIN = ("<0.24.0rc0", ">=0.28.0rc0,<0.29.0rc0")


def selects_for(model: Model) -> bool:
    """Whether a model has layers whose kernels a profile selects; true if unknown."""
    kinds = model.kinds()
    return not kinds or bool(kinds & SELECTED)


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
    _share_of_a_spark(draft)
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
        image=image_for(draft),
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
        measured=tuple(_measured(draft)),
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
        if layers.kind in served.refused and layers.kind not in EXPERTS:
            raise UsageError(
                f"{served.name} on vLLM {served.vllm} does not serve {layers.kind} layers, and "
                f"{model.name} has them ({layers.source}): vLLM stops with "
                f"{served.refused[layers.kind]!r} (0.28.0 and later use another kernel for them)",
                hint="--profile marlin",
            )


def _measured(draft: Draft) -> Iterator[Measured]:
    """Measurements with the kernels that the recipe selects, or with vLLM's own choice."""
    backends = [draft.flags[name] for name in (LINEAR_BACKEND, MOE_BACKEND) if name in draft.flags]
    selects = backends or any(name.startswith("VLLM_") for name in draft.env)
    own = draft.request.served.name if selects else None
    yield from (one for one in draft.request.model.measured if one.profile == own)


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
    served, model = draft.request.served, draft.request.model
    origin = f"profile {served.name} on vLLM {served.vllm}"
    for variable, setting in served.env.items():
        if not selects_for(model):
            draft.leave_out(variable, setting, origin, "the model has no layers of these kinds")
        elif variable == _FORCE_FP8 and _fp8_stays(draft):
            why = f"{origin}, which has 1: the model's FP8 layers keep vLLM's own choice (docs)"
            draft.variable(variable, "0", why.replace("(docs)", "(docs/profiles.md)"))
        else:
            draft.variable(variable, setting, origin)
    for name, value in flag_values(served.flags):
        why = linear_refusal(model, value)
        if why:
            draft.leave_out(name, value, origin, why)
        else:
            draft.flag(name, value, origin)
    for name, value in flag_values(served.moe_flags):
        why = experts_refusal(draft.request, value) or w4a16_as_w4a4(model, served.vllm, value)
        if model.kinds() and not model.kinds() & EXPERTS:
            why = "the model has no NVFP4 experts"
        if why:
            draft.leave_out(name, value, origin, why)
        else:
            draft.flag(name, value, origin)


def _fp8_stays(draft: Draft) -> bool:
    """Whether the model's FP8 layers have another kernel than Marlin in this release."""
    model, vllm = draft.request.model, draft.request.served.vllm
    return bool(model.kinds() & FP8) and any(
        SpecifierSet(versions).contains(vllm, prereleases=True) for versions in _FP8_BESIDE_MARLIN
    )


def _share_of_a_spark(draft: Draft) -> None:
    """Set the share of the memory if the model's file has none: a GB10 cannot give vLLM's own."""
    if UTILIZATION not in draft.flags:
        source = "vLLM's default, 0.92, runs out at startup (vllm-project/recipes #632)"
        draft.flag(UTILIZATION, f"{USUAL_FRACTION:g}", f"memory of a GB10: {source}")


def _notes(draft: Draft, *, fits: bool) -> Iterator[str]:
    """Notes for the user who starts it."""
    model = draft.request.model
    if model.generic:
        yield (
            f"{model.summary.rstrip('?')}: flags, parsers and whether its layers suit the profile "
            "are not known; a file NAME.toml with what you know makes it a model of yours: "
            "recipe NAME --models DIR (docs/serving.md, Models)"
        )
    elif not model.holds:
        yield "the kinds of layers in the checkpoint are unknown: the profile may not fit them"
    if "--max-model-len" not in draft.flags:
        yield "the context is unknown: vLLM uses the model's maximum; limit: --set max-model-len=N"
    known = model.weight_bytes or model.parameters
    if not fits and (UTILIZATION not in draft.flags or known is None):
        yield "the memory that it needs is unknown: if it runs out, --set gpu-memory-utilization=F"
    if model.revision is None:
        yield "no revision is known: the latest one of the checkpoint is served"
    if draft.request.served.unread:
        served = draft.request.served
        yield f"{served.image} was not checked: it must contain {served.name} on vLLM {served.vllm}"
    for plugin in draft.plugins:
        if not plugin.chosen:
            yield f"{plugin.name} comes with the checkpoint: put it next to this recipe first"
        elif not Path(plugin.source).is_file():
            yield f"{plugin.source} is not here: put it there before the server starts"
