"""Makes a recipe: a model, a profile and a topology on one release, with every word checked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from builder.applier.agreement import flag_values
from builder.errors import UsageError
from builder.serving.documents import (
    LeftOut,
    PluginFile,
    Recipe,
    RecipeImage,
    RecipeMemory,
    Setting,
)
from builder.serving.interface import PLUGINS, REASONING_FLAG, TOOL_FLAG, canonical
from builder.serving.memory import UTILIZATION
from builder.serving.profile import official_image
from builder.serving.recipememory import MemoryAsked, judge
from builder.serving.reciperequest import SET, RecipeRequest
from builder.serving.replaced import replaced
from builder.serving.topology import common_flags, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.serving.models import Model, ParserChoice

#: Where plugin files of a checkpoint are in the container.
PLUGIN_FOLDER = "/app"
#: Kinds of layers that a profile's flags are about.
_EXPERTS = {"nvfp4-moe", "w4a16-moe"}
_LINEAR = {"nvfp4-linear", "w4a16-linear", "fp8-linear", "fp8-block"}
#: What FlashInfer's b12x experts compute, by vLLM's release
#: (vllm/model_executor/layers/fused_moe/experts/flashinfer_b12x_moe.py).
_B12X = "flashinfer_b12x"
_B12X_COMPUTES = (
    ("<0.25.0rc0", {"silu"}),
    (">=0.25.0rc0,<0.28.0rc0", {"silu", "relu2"}),
    (">=0.28.0rc0", {"silu", "relu2", "gelu_tanh"}),
)
#: Flags that a recipe repeats outside of the command, in ports, probes and the router's file.
_OWN_OPTIONS = {
    "--port": "--port N",
    "--host": "edit the file: containers publish the port of 0.0.0.0",
    "--served-model-name": "edit the file, also where clients and LiteLLM name the model",
}


@dataclass
class _Draft:
    """A recipe in the making.  What comes later goes before what is there."""

    request: RecipeRequest
    flags: dict[str, Setting] = field(default_factory=dict)
    env: dict[str, Setting] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plugins: list[PluginFile] = field(default_factory=list)

    def flag(self, name: str, value: str | None, origin: str) -> None:
        """Take a flag, if the release knows it."""
        interface = self.request.served.interface
        why = interface.refusal(name, value)
        known = interface.flag(canonical(name))
        if why:
            self.leave_out(name, value, origin, why)
        else:
            self.flags[known.names[0] if known else name] = Setting(
                name=name, value=value, origin=origin
            )

    def variable(self, name: str, value: str, origin: str) -> None:
        """Take a variable, if the release reads it; else the flag that replaced it."""
        why = self.request.served.interface.variable_refusal(name, value)
        if not why:
            self.env[name] = Setting(name=name, value=value, origin=origin)
            return
        other = replaced().get(name)
        if other is not None and (flag_value := other.value(value)):
            why = f"{why}; {other.flag} {flag_value} replaces it"
            self.flag(other.flag, flag_value, f"{origin}: {name}={value}")
        self.leave_out(name, value, origin, why)

    def leave_out(self, name: str, value: str | None, origin: str, reason: str) -> None:
        """Note what is not in the recipe."""
        self.left_out.append(LeftOut(name=name, value=value, origin=origin, reason=reason))


def selects_for(model: Model) -> bool:
    """Whether a model has layers whose kernels a profile selects; it may, if they are unknown."""
    kinds = model.kinds()
    return not kinds or bool(kinds & (_EXPERTS | _LINEAR))


def recipe_of(request: RecipeRequest) -> Recipe:
    """Make a recipe.

    Raises:
        UsageError: the profile does not serve the model, or a chosen value is not possible.
    """
    model, served = request.model, request.served
    _refuse(request)
    draft = _Draft(request)
    _from_model(draft)
    _from_profile(draft)
    for setting in common_flags(request.place.topology):
        draft.flag(setting.name, setting.value, setting.origin)
    draft.flag("--host", "0.0.0.0", "topology: reached from outside the container")  # noqa: S104
    draft.flag("--port", str(request.port), "--port")
    for text in request.chosen:
        _choose(draft, text)
    _refuse_parsers(draft)
    memory = _memory(draft)
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


def _memory(draft: _Draft) -> RecipeMemory | None:
    """Whether it fits into one Spark; takes a larger share of the memory if that helps."""
    request = draft.request
    if request.place.topology not in ("solo", "two-solos"):
        if request.checkpoint is not None:
            draft.notes.append("memory is estimated for one Spark, and not for one model over two")
        return None
    judged = judge(
        MemoryAsked(
            request.model, request.checkpoint, request.served.vllm, draft.flags, draft.env, SET
        )
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
            hint="--release 0.33.0, or another newer one",
        )
    for held in model.holds:  # what is said of experts depends on a flag, which is left out then
        if held.kind in served.refused and held.kind not in _EXPERTS:
            raise UsageError(
                f"{served.name} on vLLM {served.vllm} does not serve {held.kind} layers, and "
                f"{model.name} has them ({held.source}): vLLM stops with "
                f"{served.refused[held.kind]!r}",
                hint="--profile marlin, or another --release (0.28.0 and later fall back for such "
                "layers)",
            )


# -- the model


def _from_model(draft: _Draft) -> None:
    model, vllm = draft.request.model, draft.request.served.vllm

    def wish(flag: str, value: object, source: str) -> None:
        draft.flag(flag, None if value is None else str(value), f"model: {source}")

    for known in model.flags:
        if known.holds_for(vllm):
            wish(known.flag, known.value, f"{known.why} ({known.source})")
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
            wish(name, figure.value, figure.source)
    _parser(draft, REASONING_FLAG, model.reasoning_parsers)
    if _parser(draft, TOOL_FLAG, model.tool_parsers):
        wish("--enable-auto-tool-choice", None, f"a model with a tool parser: {TOOL_FLAG}")
    if draft.request.speculate:
        _speculate(draft)


def _parser(draft: _Draft, flag: str, choices: Sequence[ParserChoice]) -> bool:
    """The first parser that the release has, or that comes with the checkpoint."""
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


def _speculate(draft: _Draft) -> None:
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


def _from_profile(draft: _Draft) -> None:
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


def _no_experts(draft: _Draft, value: str | None) -> str:
    """Why a profile's flag for experts is not for this model; empty where it is."""
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


# -- what the user chose


def _choose(draft: _Draft, text: str) -> None:
    """``--set``: a flag with or without a value, a variable, or an empty value to take it out.

    Raises:
        UsageError: the release does not know it, and nothing replaced it.
    """
    name, equals, value = text.partition("=")
    if name.isupper() or name.startswith("VLLM_"):
        if equals and not value:
            draft.env.pop(name, None)
            return
        if not equals:
            raise UsageError(f"--set {text}: a variable needs a value", hint=f"--set {name}=1")
        other = replaced().get(name)
        why = draft.request.served.interface.variable_refusal(name, value)
        if why and (other is None or other.flag_refusal(draft.request.served.interface, value)):
            hint = f"--set {other.flag.removeprefix('--')}=VALUE" if other else ""
            raise UsageError(f"--set {text}: {why}", hint=hint)
        draft.variable(name, value, SET)
        return
    flag = canonical(name if name.startswith("-") else f"--{name}")
    if flag in _OWN_OPTIONS:
        raise UsageError(
            f"--set {text}: it cannot be set here, because other parts of the recipe repeat it",
            hint=_OWN_OPTIONS[flag],
        )
    known = draft.request.served.interface.flag(flag.partition(".")[0])
    key = known.names[0] if known is not None and "." not in flag else flag
    if equals and not value:
        if draft.flags.pop(key, None) is None:
            raise UsageError(f"--set {text}: the recipe has no {flag} to remove")
        return
    why = draft.request.served.interface.refusal(flag, value if equals else None)
    if why:
        raise UsageError(f"--set {text}: {why}")
    draft.flags[key] = Setting(name=flag, value=value if equals else None, origin=SET)


def _refuse_parsers(draft: _Draft) -> None:
    """Refuse a chosen parser that the release lacks, unless its plugin was chosen too.

    Raises:
        UsageError: there is one.
    """
    model, interface = draft.request.model, draft.request.served.interface
    brought = {c.name for c in (*model.reasoning_parsers, *model.tool_parsers) if c.plugin}
    for flag, plugin in PLUGINS.items():
        chosen, with_plugin = draft.flags.get(flag), draft.flags.get(plugin)
        value = chosen.value if chosen is not None and chosen.origin == SET else None
        if value is None or (with_plugin is not None and (
            with_plugin.origin == SET or value in brought
        )):  # fmt: skip
            continue
        if why := interface.parser_refusal(flag, value):
            raise UsageError(
                f"--set {flag.removeprefix('--')}={value}: {why}",
                hint=f"--set {plugin.removeprefix('--')}=FILE has one of your own; built in: "
                f"{', '.join(interface.parsers(flag))}",
            )


def _notes(draft: _Draft, *, fits: bool) -> Iterator[str]:
    """What somebody who starts this should know."""
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
        yield f"{files} comes with the checkpoint: put it beside this recipe first"
