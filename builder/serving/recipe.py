"""Makes a recipe: a model, a profile and a topology as flags, variables, an image and notes.

Each value comes from the model's file, the profile, the topology or the user, and says from which.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from msgspec import Meta
from packaging.specifiers import SpecifierSet

from builder.applier.judging import flag_values
from builder.common.console import counted
from builder.common.document import Document, Part, Text
from builder.common.hints import in_place_of, instead
from builder.errors import UsageError, did_you_mean
from builder.serving.checkpoint import CONFIG, KV_DTYPES, QUANT_CONFIG, kv_dtype_beside, read_config
from builder.serving.memory import (
    GIB,
    KV_BYTES,
    KV_DTYPE,
    LARGEST_FRACTION,
    TOTAL,
    USUAL_BATCH,
    USUAL_FRACTION,
    UTILIZATION,
    KvCache,
    MemoryFigure,
    estimate_of,
    fraction_refusal,
    next_step,
    verdict,
)
from builder.serving.models import KnownFailure, Measured
from builder.serving.options import MemoryRequest
from builder.serving.release import official_image, refuse_unpatched
from builder.serving.serveflags import PLUGINS, REASONING_FLAG, TOOL_FLAG, canonical, replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from builder.serving.checkpoint import ModelConfig
    from builder.serving.memory import MemoryEstimate
    from builder.serving.models import Model, ParserChoice
    from builder.serving.release import ServedProfile


#: One Spark; two that share a model, without or with Ray; two, each with the whole model.
Topology = Literal["solo", "tp2", "tp2-ray", "pp3", "tp4", "two-solos"]


class Setting(Part, frozen=True, kw_only=True):
    """A flag or a variable, and where its value comes from."""

    name: Text
    value: Annotated[str | None, Meta(description="null: the flag has no value")]
    origin: Annotated[Text, Meta(description="model, profile, topology or --set, with the source")]

    @property
    def words(self) -> tuple[str, ...]:
        """The setting as words of a command line."""
        return (self.name,) if self.value is None else (self.name, self.value)


class LeftOut(Part, frozen=True, kw_only=True):
    """A setting that is not in the recipe, with the reason."""

    name: Text
    value: str | None
    origin: Text
    reason: Text


class RecipeNode(Part, frozen=True, kw_only=True):
    """One Spark, with its own settings."""

    rank: Annotated[int, Meta(ge=0)]
    address: Annotated[str, Meta(description="as the other nodes and clients reach it")] = ""
    flags: tuple[Setting, ...] = ()
    env: tuple[Setting, ...] = ()


class RecipeImage(Part, frozen=True, kw_only=True):
    """The image that containers run."""

    ref: Text
    build: Annotated[str, Meta(description="command that builds it; absent: nothing to build")] = ""
    mod: Annotated[str, Meta(description="mod that has the same effect on the official image")] = ""
    official: Annotated[str, Meta(description="the image that the mod is for")] = ""


class PluginFile(Part, frozen=True, kw_only=True):
    """A file that vLLM needs by its path: of the checkpoint, or one that the user chose."""

    name: Text
    path: Annotated[Text, Meta(description="in the container")]
    host: Annotated[str, Meta(description="on the machine; absent: next to the recipe")] = ""
    chosen: Annotated[bool, Meta(description="with --set; else it comes with the checkpoint")] = (
        False
    )

    @property
    def source(self) -> str:
        """The path on the machine, absolute or from the recipe's folder."""
        return self.host or f"./{self.name}"


class RecipeMemory(Part, frozen=True, kw_only=True):
    """An estimate whether the context fits into the memory that the flags give vLLM."""

    checkpoint: Annotated[
        str, Meta(description="the folder that was read; absent: the model's file alone")
    ] = ""
    utilization: Annotated[float, Meta(description="share of the memory that vLLM takes")]
    source: Annotated[Text, Meta(description="the source of the share")]
    weights: MemoryFigure | None
    kv_cache: KvCache | None
    room: Annotated[
        int | None,
        Meta(description="bytes for the KV cache, below zero: missing; null: unknown"),
    ]
    fits: Literal["yes", "no", "unknown"]


class Recipe(Document, frozen=True, kw_only=True):
    """What serves a model."""

    model: Text
    id: Annotated[Text, Meta(description="on Hugging Face")]
    revision: str = ""
    vllm: Text
    profile: Text
    made_by: Annotated[Text, Meta(description="command that makes this recipe")]
    topology: Topology
    image: RecipeImage
    port: Annotated[int, Meta(ge=1, le=65535)]
    flags: Annotated[tuple[Setting, ...], Meta(description="of `vllm serve`, on every node")]
    env: Annotated[tuple[Setting, ...], Meta(description="variables, on every node")]
    nodes: Annotated[tuple[RecipeNode, ...], Meta(min_length=1)]
    plugins: tuple[PluginFile, ...] = ()
    memory: Annotated[
        RecipeMemory | None, Meta(description="absent: one model over several nodes")
    ] = None
    left_out: tuple[LeftOut, ...] = ()
    unknown: Annotated[
        tuple[str, ...], Meta(description="values of the model that no source gives")
    ] = ()
    notes: tuple[Text, ...] = ()
    failures: Annotated[
        tuple[KnownFailure, ...], Meta(description="known failures of the model, and their fixes")
    ] = ()
    measured: Annotated[
        tuple[Measured, ...], Meta(description="by others; not with this exact recipe")
    ] = ()

    def command(self, node: RecipeNode) -> list[str]:
        """``vllm serve`` with all flags of one node."""
        revision = ("--revision", self.revision) if self.revision else ()
        flags = (word for flag in (*self.flags, *node.flags) for word in flag.words)
        return ["vllm", "serve", self.id, *revision, *flags]

    def variables(self, node: RecipeNode) -> dict[str, str]:
        """All variables of one node."""
        return {one.name: one.value or "" for one in (*self.env, *node.env)}


class RecipeText(Document, frozen=True, kw_only=True):
    """A recipe in the format of a tool."""

    format: Text
    recipe: Annotated[
        Recipe | None, Meta(description="absent: TensorRT-LLM's, which has no profile")
    ] = None
    files: Annotated[dict[str, str], Meta(description="text by file name, the first is the main")]
    written: Annotated[tuple[Text, ...], Meta(description="files that -o wrote")] = ()


TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)
#: The flag that spreads one model over the nodes of a topology, and their number.
SPREAD: dict[str, tuple[str, int]] = {
    "tp2": ("--tensor-parallel-size", 2), "tp2-ray": ("--tensor-parallel-size", 2),
    "pp3": ("--pipeline-parallel-size", 3), "tp4": ("--tensor-parallel-size", 4),
}  # fmt: skip


def node_count(topology: str) -> int:
    """The machines of a topology."""
    return 2 if topology == "two-solos" else SPREAD.get(topology, ("", 1))[1]


#: The port where the ranks of a model meet.  vLLM's default, written out for firewall rules
#: (vllm/config/parallel.py, master_port).
MASTER_PORT = 29501
#: Ray's own default.
RAY_PORT = 6379
_ORIGIN = "topology {}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The nodes to run on."""

    topology: Topology
    addresses: tuple[str, ...] = ()
    #: the network interface between the nodes
    interface: str = ""
    #: the tool that finds and connects the nodes, if any
    launcher: str = ""


#: In words, for messages.
_NUMBERS = {2: "two", 3: "three", 4: "four"}
#: IPv4, IPv6 and host names (RFC 1123), without the brackets of a URL.
_ADDRESS = re.compile(r"[0-9A-Za-z][0-9A-Za-z.:-]*")
#: Linux allows 15 characters (IFNAMSIZ), but no slash and no space.
_INTERFACE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._:@-]{0,14}")


def topology_named(name: str) -> Topology:
    """A topology by its name.

    Raises:
        UsageError: no topology has this name.
    """
    for known in TOPOLOGIES:
        if known == name:
            return known
    raise UsageError(
        f"unknown topology {name!r}{did_you_mean(name, TOPOLOGIES)} "
        f"(known: {', '.join(TOPOLOGIES)})",
        hint=f"--topology {TOPOLOGIES[0]}",
    )


def nodes_of(place: Place, served: ServedProfile) -> tuple[RecipeNode, ...]:
    """The nodes, each with its settings.

    Raises:
        UsageError: an address or the interface is missing, or the release does not support it.
    """
    nodes = node_count(place.topology)
    if nodes == 1:
        if place.addresses or place.interface:
            raise UsageError(
                f"--address and --interface are for several nodes; {place.topology} has one",
                hint="--topology tp2"
                if len(place.addresses) == 2 and place.interface
                else "leave --address and --interface out",
            )
        return (RecipeNode(rank=0),)
    if place.launcher:
        return _nodes_of_launcher(place, served)
    if len(place.addresses) != nodes:
        missing = ["--address OTHER"] * (nodes - len(place.addresses))
        hint = " ".join(["--address HEAD", *missing[1:]] if not place.addresses else missing)
        raise UsageError(
            f"topology {place.topology} needs the addresses of {_NUMBERS[nodes]} nodes on the "
            f"fast link, as `ip -4 addr` shows them, not {len(place.addresses)}",
            hint=hint or f"set --address {'twice' if nodes == 2 else f'{nodes} times'}",
        )
    _refuse_names(place)
    if len({*place.addresses}) < nodes:
        twice = next(one for one in place.addresses if place.addresses.count(one) > 1)
        raise UsageError(
            f"{'both' if nodes == 2 else 'two'} nodes have the address {twice}",
            hint="set the address of the head first, then that of each other node",
        )
    if place.topology == "two-solos":
        if place.interface:
            raise UsageError(
                "topology two-solos does not use --interface: its servers are not connected",
                hint="leave --interface out",
            )
        return tuple(RecipeNode(rank=n, address=a) for n, a in enumerate(place.addresses))
    if not place.interface:
        raise UsageError(
            f"topology {place.topology} needs the network interface between the nodes, as "
            f"`ip -br link` shows it on both (such as enp1s0f0np0)",
            hint="--interface NAME",
        )
    _refuse_without_ray(place, served)
    return tuple(_rank(place, rank, address) for rank, address in enumerate(place.addresses))


def _nodes_of_launcher(place: Place, served: ServedProfile) -> tuple[RecipeNode, ...]:
    """Nodes whose addresses the launcher finds.

    Raises:
        UsageError: addresses are given, or the release does not support it.
    """
    if place.addresses or place.interface:
        raise UsageError(
            f"{place.launcher} finds the nodes and the interface between them itself",
            hint="leave --address and --interface out",
        )
    _refuse_without_ray(place, served)
    return tuple(RecipeNode(rank=rank) for rank in range(node_count(place.topology)))


def _refuse_without_ray(place: Place, served: ServedProfile) -> None:
    """Refuse Ray if the image does not have it.

    Raises:
        UsageError: the recipe needs Ray, which the image lacks.
    """
    if place.topology == "tp2-ray" and not served.has_ray:
        raise UsageError(
            f"vLLM {served.vllm} does not include Ray, and {served.image} does not have it; build "
            f"one with --layers {served.name},ray, or use tp2, which needs no Ray",
            hint="--topology tp2",
        )


def _refuse_names(place: Place) -> None:
    """Refuse addresses and interfaces that are not a single word in a script.

    Raises:
        UsageError: an address or the interface is malformed.
    """
    for address in place.addresses:
        if not _ADDRESS.fullmatch(address):
            raise UsageError(
                f"{address!r} is not an IP address or host name",
                hint=instead(address, "IP"),
            )
    if place.interface and not _INTERFACE.fullmatch(place.interface):
        raise UsageError(
            f"{place.interface!r} is not the name of a network interface (`ip -br link` lists "
            "them)",
            hint="--interface NAME",
        )


def _rank(place: Place, rank: int, address: str) -> RecipeNode:
    origin = _ORIGIN.format(place.topology)

    def flag(name: str, value: str | None = None) -> Setting:
        return Setting(name=name, value=value, origin=origin)

    variables = {
        "GLOO_SOCKET_IFNAME": place.interface,
        "NCCL_SOCKET_IFNAME": place.interface,
        "VLLM_HOST_IP": address,
    }
    flags: tuple[Setting, ...] = ()
    if place.topology in SPREAD and place.topology != "tp2-ray":
        flags = (
            flag("--nnodes", str(node_count(place.topology))),
            flag("--node-rank", str(rank)),
            flag("--master-addr", place.addresses[0]),
            flag("--master-port", str(MASTER_PORT)),
            *([flag("--headless")] if rank else []),
        )
    env = tuple(Setting(name=n, value=v, origin=origin) for n, v in variables.items())
    return RecipeNode(rank=rank, address=address, flags=flags, env=env)


def common_flags(topology: Topology) -> tuple[Setting, ...]:
    """Flags that every node of a topology has."""
    origin = _ORIGIN.format(topology)
    if topology not in SPREAD:
        return ()
    name, nodes = SPREAD[topology]
    ray = Setting(name="--distributed-executor-backend", value="ray", origin=origin)
    size = Setting(name=name, value=str(nodes), origin=origin)
    return (size, ray) if topology == "tp2-ray" else (size,)


SET = "--set"
#: vLLM's own.
DEFAULT_PORT = 8000


@dataclass(frozen=True, kw_only=True)
class RecipeRequest:
    """The model to serve, and how."""

    model: Model
    served: ServedProfile
    place: Place
    port: int = DEFAULT_PORT
    #: ``max-model-len=131072``, ``enforce-eager``, ``VLLM_X=1``; an empty value removes it
    chosen: tuple[str, ...] = ()
    #: with speculative decoding, if the model supports it
    speculate: bool = False
    #: the checkpoint, to estimate the memory
    checkpoint: Path | None = None
    #: the user's folders with models and layers
    models: tuple[Path, ...] = ()
    patches: tuple[Path, ...] = ()

    @property
    def command(self) -> str:
        """The command line that makes the recipe, without the format."""
        return shlex.join(self._words())

    def _words(self) -> Iterator[str]:
        served, place = self.served, self.place
        model = self.model.id.value if self.model.generic else self.model.name
        yield from ("spark-build", "recipe", model, "--profile", served.name)
        yield from ("--release", served.vllm)
        if served.named_image:
            yield from ("--image", served.image)
        yield from ("--topology", place.topology)
        for address in place.addresses:
            yield from ("--address", address)
        if place.interface:
            yield from ("--interface", place.interface)
        if self.port != DEFAULT_PORT:
            yield from ("--port", str(self.port))
        for text in self.chosen:
            yield from (SET, text)
        if self.speculate:
            yield "--speculate"
        if self.checkpoint is not None:
            yield from ("--checkpoint", str(self.checkpoint))
        for option, folders in (("--models", self.models), ("--patches", self.patches)):
            for folder in folders:
                yield from (option, str(folder))


@dataclass
class Draft:
    """A draft of a recipe.  Later settings override earlier ones."""

    request: RecipeRequest
    flags: dict[str, Setting] = field(default_factory=dict)
    env: dict[str, Setting] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plugins: list[PluginFile] = field(default_factory=list)

    def flag(self, name: str, value: str | None, origin: str) -> None:
        """Add a flag, if the release knows it."""
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
        """Add a variable, if the release reads it; else the flag that replaced it."""
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
        """Record a setting that is not in the recipe."""
        self.left_out.append(LeftOut(name=name, value=value, origin=origin, reason=reason))


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
    memory = _recipe_memory(draft, config)
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


def _recipe_memory(draft: Draft, config: ModelConfig | None) -> RecipeMemory | None:
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


#: The folder in the container for files that a recipe mounts.
PLUGIN_FOLDER = "/app"
#: Flags that name a file (vllm/entrypoints/openai/cli_args.py).
FILES = (*PLUGINS.values(), "--chat-template")
#: Characters of a chat template itself, which is no name of a file then.
_INLINE = set("{}\n")
#: Flags whose values a recipe repeats elsewhere: in ports, probes and the router's file.
_OWN_OPTIONS = {
    "--host": "edit the file: containers publish the port of 0.0.0.0",
    "--model": "spark-build models list",
    "--served-model-name": "edit the file, also where clients and LiteLLM name the model",
}
_PORT = "--port"
_PORTS = re.compile(r"[1-9][0-9]{0,3}|[1-5][0-9]{4}")
#: Flags whose product is the number of GPUs (vllm/config/parallel.py), and the topology with two.
_SIZES = {
    "--tensor-parallel-size": "tp2", "--pipeline-parallel-size": "tp2",
    "--data-parallel-size": "two-solos",
}  # fmt: skip


def choose(draft: Draft, text: str) -> None:
    """Apply one ``--set``: a flag, a variable, or an empty value to remove one.

    Raises:
        UsageError: the release does not know it and has no replacement.
    """
    name = text.partition("=")[0]
    if name.isupper() or name.startswith("VLLM_"):
        _choose_variable(draft, text)
    else:
        _choose_flag(draft, text)


def _choose_variable(draft: Draft, text: str) -> None:
    name, equals, value = text.partition("=")
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


def _choose_flag(draft: Draft, text: str) -> None:
    name, equals, value = text.partition("=")
    flag = _flag(text)
    if flag in _OWN_OPTIONS or flag == _PORT:
        port = value if _PORTS.fullmatch(value) else str(draft.request.port)
        raise UsageError(
            f"--set {text}: it cannot be set here, because other parts of the recipe repeat it",
            hint=_OWN_OPTIONS.get(flag) or in_place_of(SET, text, _PORT, port),
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
    if key == UTILIZATION and (why := fraction_refusal(value)):
        raise UsageError(f"--set {text}: {why}", hint=instead(text, f"{name}=0.85"))
    _refuse_backend(draft, text, key, value)
    if value and key in FILES:
        value = _mounted(draft, text, key, value)
    draft.left_out = [one for one in draft.left_out if one.name != key]
    draft.flags[key] = Setting(name=flag, value=value if equals else None, origin=SET)


def _refuse_backend(draft: Draft, text: str, key: str, value: str) -> None:
    """Refuse a backend that does not suit the model.

    Raises:
        UsageError: vLLM refuses it for the model's layers, or has no kernel for them.
    """
    model = draft.request.model
    why = ""
    # an unknown activation is no reason to refuse what the user knows
    if key == MOE_BACKEND and (model.experts is not None or not model.kinds() & EXPERTS):
        why = experts_refusal(draft.request, value) if model.kinds() else ""
    # with another backend, vLLM may select another kernel for FP8 and W4A16 layers too
    if key == LINEAR_BACKEND and model.kinds() and not model.kinds() & LINEAR:
        why = linear_refusal(model, value)
    if why:
        raise UsageError(f"{SET} {text}: {why}", hint=f"leave {SET} {text} out")


def _mounted(draft: Draft, text: str, key: str, value: str) -> str:
    """The path of a file in the container; mounts it there if it is one of this machine.

    Raises:
        UsageError: the path is a folder.
    """
    there = Path(value)
    if there.is_dir():
        raise UsageError(f"{SET} {text}: {value} is a folder", hint=f"{SET} {key[2:]}=FILE")
    here = there.is_file()
    if not here and (there.is_absolute() or key not in PLUGINS.values()):
        if not set(value) & _INLINE:
            draft.notes.append(f"{value} is not on this machine: the image must have it")
        return value
    host = value if there.is_absolute() else f"./{there.as_posix()}"
    path = f"{PLUGIN_FOLDER}/{there.name}"
    draft.plugins = [plugin for plugin in draft.plugins if plugin.path != path]
    draft.plugins.append(PluginFile(name=there.name, path=path, host=host, chosen=True))
    return path


def _flag(text: str) -> str:
    name = text.partition("=")[0]
    return canonical(name if name.startswith("-") else f"--{name}")


def chosen_as(draft: Draft, setting: Setting) -> str:
    """The word of ``--set`` that a setting comes from."""
    return next(c for c in reversed(draft.request.chosen) if _flag(c) == setting.name)


def refuse_gpus(draft: Draft) -> None:
    """Refuse chosen sizes that need more GPUs than one server of the topology has.

    Raises:
        UsageError: the sizes need more GPUs; vLLM would not start.
    """
    sizes = {n: draft.flags[n] for n in _SIZES if n in draft.flags}
    numbers = [int(one.value or "") for one in sizes.values() if (one.value or "").isdecimal()]
    needed = math.prod(numbers)
    there = SPREAD.get(draft.request.place.topology, ("", 1))[1]
    for name, one in sizes.items():
        if one.origin != SET or one.value == "1" or needed <= there:
            continue
        text = chosen_as(draft, one)
        more = () if there > 1 else ("--topology", _SIZES[name])
        raise UsageError(
            f"--set {text}: that needs {needed} GPUs, and topology "
            f"{draft.request.place.topology} has {counted(there, 'GPU')} for a server",
            hint=in_place_of(SET, text, *more),
        )


def refuse_parsers(draft: Draft) -> None:
    """Refuse a chosen parser that the release lacks, unless its plugin was chosen too.

    Raises:
        UsageError: a chosen parser is not in the release.
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
                f"--set {flag.removeprefix('--')}={value}: {why}; built in: "
                f"{', '.join(interface.parsers(flag))}; {plugin} names a file with your own",
                hint=f"--set {plugin.removeprefix('--')}=FILE",
            )


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
    if model.clamped or model.experts is None:
        # 0.33.0 refuses a clamp in these words; before, the values would be wrong
        clamp = f"{B12X} does not apply the clamp of the experts' SwiGLU (swiglu_limit)"
        unknown = "the activation of the experts is unknown"
        return clamp if model.clamped else f"{unknown}, and {B12X} does not support every one"
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


#: Lets vLLM take a context beyond the model's own.
_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
#: Lower and upper limit of the bytes of a parameter, over all formats that vLLM reads.
_LEAST, _MOST = 0.25, 4.5


def checkpoint_config(draft: Draft) -> ModelConfig | None:
    """The checkpoint's config, if there is a checkpoint; limits the context to its maximum.

    Raises:
        UsageError: it cannot be read, or the user set a context that vLLM refuses.
    """
    folder = draft.request.checkpoint
    if folder is None:
        return None
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="--checkpoint DIR")
    config = read_config(folder)
    if config is not None:
        _shorten(draft, config)
        if KV_DTYPE not in draft.flags and (dtype := kv_dtype_beside(config)):
            draft.flag(KV_DTYPE, dtype, f"checkpoint: kv_cache_quant_algo in {QUANT_CONFIG}")
    return config


def _shorten(draft: Draft, config: ModelConfig) -> None:
    """Shorten a longer context to the checkpoint's maximum.

    Raises:
        UsageError: the user set the longer one.
    """
    context, longest = number_of(draft.flags, CONTEXT), config.longest
    allowed = _LONG in draft.env and draft.env[_LONG].value in ("1", "true")
    if not context or not longest or context <= longest or allowed:
        return
    given = draft.flags[CONTEXT]
    why = f"is more than the model's own maximum, {longest}: vLLM refuses it without {_LONG}=1"
    if given.origin == SET:
        text = chosen_as(draft, given)
        raise UsageError(
            f"{SET} {text}: that {why}", hint=instead(text, f"{CONTEXT[2:]}={longest}")
        )
    draft.flags[CONTEXT] = Setting(
        name=CONTEXT,
        value=str(longest),
        origin=f"checkpoint: max_position_embeddings in {CONFIG}; {given.value} ({given.origin}) "
        f"{why}",
    )
    draft.notes.append(f"{CONTEXT} is {longest}, the checkpoint's own maximum: {given.value} {why}")


def unlike(model: Model, config: ModelConfig, weights: int | None) -> Iterator[str]:
    """Notes if a checkpoint does not look like the model; ``weights`` are its bytes, if known."""
    differences = [*_layers(model, config), *_weights(model, weights)]
    if differences:
        named = (config.architectures or config.text.architectures or ["unknown"])[0]
        yield (
            f"the checkpoint does not look like {model.name}: {'; '.join(differences)} "
            f"(its {CONFIG}: architecture {named[:60]!r}, {config.text.num_hidden_layers} layers)"
        )


def _layers(model: Model, config: ModelConfig) -> Iterator[str]:
    if model.experts is not None and not config.experts:
        yield f"it has no routed experts, and the model has ({model.experts.source})"
    total, active = model.parameters, model.active_parameters
    if total and active and total.value == active.value and config.experts:
        yield f"it has {config.experts} routed experts, and the model has none ({active.source})"
    if model.block_size is not None and config.recurrent is False:
        yield "all its layers are attention, and the model is a hybrid of Mamba and attention"


def _weights(model: Model, weights: int | None) -> Iterator[str]:
    if model.parameters is None or weights is None:
        return
    parameters = model.parameters.value
    if not _LEAST * parameters <= weights <= _MOST * parameters:
        yield f"its weights have {weights} bytes, and the model has {parameters} parameters"


CONTEXT, SEQUENCES, BATCHED = "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"
#: vLLM's default share of the memory, by release (vllm/config/cache.py).
_DEFAULTS = ((">=0.20.0rc0", 0.92), ("<0.20.0rc0", 0.9))
#: Suffixes of numbers as vLLM reads them (vllm/utils/argparse_utils.py, human_readable_int).
_UNITS = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
#: Options of `memory` as flags of a recipe.
_OPTIONS = {"--context": CONTEXT, "--sequences": SEQUENCES, KV_DTYPE: KV_DTYPE}


@dataclass(frozen=True)
class MemoryInputs:
    """The inputs of the estimate for one Spark."""

    model: Model
    checkpoint: Path | None
    vllm: str
    flags: Mapping[str, Setting]
    config: ModelConfig | None


@dataclass(frozen=True)
class MemoryJudged:
    """The result of the estimate."""

    memory: RecipeMemory
    #: replaces the recipe's own
    flag: Setting | None = None
    notes: tuple[str, ...] = ()


def judge(inputs: MemoryInputs) -> MemoryJudged:
    """Estimate whether it fits; with a larger share of the memory if only that is missing.

    Raises:
        UsageError: the checkpoint cannot be read.
    """
    estimate = _estimate(inputs)
    share, source = _share(inputs)
    least, room = estimate.utilization.least, _room(inputs, estimate, share)
    flag = None
    mine = inputs.flags.get(UTILIZATION)
    free = (mine is None or mine.origin != SET) and KV_BYTES not in inputs.flags
    given = number_of(inputs.flags, KV_BYTES)
    fits = verdict(estimate.weights, estimate.kv_cache, room, given)
    if fits != "yes" and free and least is not None and share < least <= LARGEST_FRACTION:
        source = f"memory: {_need(estimate)} may not fit at {share:g} ({source})"
        flag = Setting(name=UTILIZATION, value=f"{least:.2f}", origin=source)
        share, room = least, _room(inputs, estimate, least)
        fits = verdict(estimate.weights, estimate.kv_cache, room)
    room = room if given is None or room is None else min(given, room)
    memory = RecipeMemory(
        checkpoint=str(inputs.checkpoint or ""), utilization=share, source=source,
        weights=estimate.weights, kv_cache=estimate.kv_cache, room=room, fits=fits,
    )  # fmt: skip
    return MemoryJudged(memory, flag, (_why(inputs, estimate, memory),) if fits == "no" else ())


def _estimate(inputs: MemoryInputs) -> MemoryEstimate:
    context = number_of(inputs.flags, CONTEXT)
    longest = inputs.config.text.max_position_embeddings if inputs.config else None
    if context and longest:
        context = min(context, longest)
    dtype = inputs.flags[KV_DTYPE].value if KV_DTYPE in inputs.flags else "auto"
    known = dtype == "auto" or dtype in KV_DTYPES
    request = MemoryRequest(
        subject=str(inputs.checkpoint or inputs.model.name),
        context=context,
        sequences=number_of(inputs.flags, SEQUENCES) or 1,
        kv_cache_dtype=dtype if known and dtype else "auto",
        batched_tokens=number_of(inputs.flags, BATCHED) or USUAL_BATCH,
    )
    return estimate_of(inputs.model, inputs.checkpoint if known else None, request)


def number_of(flags: Mapping[str, Setting], name: str) -> int | None:
    """A number as vLLM reads it; None if the flag is absent or lets vLLM choose."""
    text = (flags[name].value or "").strip() if name in flags else ""
    unit = _UNITS.get(text[-1:], 0)
    try:
        number = int(float(text[:-1]) * unit) if unit else int(text)
    except (ValueError, OverflowError):
        return None
    return number if number > 0 else None


def _share(inputs: MemoryInputs) -> tuple[float, str]:
    """The share of the memory that vLLM uses, and the source."""
    default = next(v for versions, v in _DEFAULTS if SpecifierSet(versions).contains(
        inputs.vllm, prereleases=True
    ))  # fmt: skip
    given = inputs.flags.get(UTILIZATION)
    if given is None:
        return default, f"vLLM {inputs.vllm} by itself"
    return float(given.value or default), given.origin


def _room(inputs: MemoryInputs, estimate: MemoryEstimate, share: float) -> int | None:
    """The bytes that are expected to be left for the KV cache; None: unknown."""
    if estimate.weights is None:
        return None
    if KV_BYTES in inputs.flags:  # vLLM then does not look at the share
        share = LARGEST_FRACTION
    return int(share * TOTAL.bytes) - estimate.weights.bytes - estimate.overhead.bytes


def _need(estimate: MemoryEstimate) -> str:
    parts = [f"weights of {_gib(estimate.weights.bytes)}"] if estimate.weights else []
    if cache := estimate.kv_cache:
        parts.append(
            f"{cache.sequences} x {cache.context} tokens of KV cache ({_gib(cache.reserved)})"
        )
    return " and ".join(parts)


def _why(inputs: MemoryInputs, estimate: MemoryEstimate, memory: RecipeMemory) -> str:
    room = _gib(memory.room) if memory.room and memory.room > 0 else "nothing"
    given = f"{UTILIZATION} {memory.utilization:g}"
    if KV_BYTES in inputs.flags:
        given = f"{KV_BYTES} {inputs.flags[KV_BYTES].value}"
    least = estimate.utilization.least
    if least is not None and least <= LARGEST_FRACTION:
        step = f"--set {UTILIZATION[2:]}={least:.2f}"
        if KV_BYTES in inputs.flags and estimate.kv_cache:
            step = f"--set {KV_BYTES[2:]}={estimate.kv_cache.reserved}"
    else:
        step = _step(next_step(estimate))
    return (
        f"it does not fit: {_need(estimate)}, and {given} leaves {room} for the KV cache, besides "
        f"about {_gib(estimate.overhead.bytes)} for activations and CUDA graphs; {step}"
    )


def _step(step: str) -> str:
    name, _, value = step.partition(" ")
    if name in _OPTIONS:
        return f"--set {_OPTIONS[name][2:]}={value}"
    return "use a smaller checkpoint (spark-build audit DIR names its layers in 16 bits)"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


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
    concern = CONCERNS.get(layer)
    return concern is None or concern.holds(draft, kinds or set(SELECTED))


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


def _fp4_experts(_draft: Draft, kinds: set[str]) -> bool:
    return bool(kinds & {"nvfp4-moe", "w4a16-moe"})


@dataclass(frozen=True)
class Concern:
    """What a layer is for: which recipes it concerns, and the kernels whose code it changes.

    ``kernels`` is the kind of layers and a pattern of their kernels' names; None if only the choice
    of a kernel changes.
    """

    holds: Callable[[Draft, set[str]], bool]
    kernels: tuple[str, str] | None = None


_OF_B12X_EXPERTS = Concern(_b12x_experts, ("experts", r"(?i)b12x"))
_OF_B12X_LINEAR = Concern(_b12x_linear, ("linear layers", r"(?i)b12x"))
#: Layers that concern some models only (docs/profiles.md#layers); all others concern every model,
#: and may change any kernel.
CONCERNS: dict[str, Concern] = {
    "flashinfer-b12x-moe-barrier": _OF_B12X_EXPERTS,
    "flashinfer-narrow-experts": _OF_B12X_EXPERTS,
    "flashinfer-b12x-moe-rows": _OF_B12X_EXPERTS,
    "vllm-b12x-experts-scales": _OF_B12X_EXPERTS,
    "vllm-b12x-padding": _OF_B12X_EXPERTS,
    "flashinfer-b12x-store-wait": _OF_B12X_LINEAR,
    "vllm-b12x-reachable": _OF_B12X_LINEAR,
    "flashinfer-w4a16-store-wait": Concern(
        _w4a16_linear, ("linear layers", r"(?i)flashinfer.*w4a16")
    ),
    "vllm-linear-fallback": Concern(_beside_nvfp4),
    "vllm-marlin-fp8": Concern(_fp8_marlin),
    "vllm-marlin-scales": Concern(_fp4_experts, ("experts", r"(?i)marlin")),
}


def explanation(recipe: Recipe) -> str:
    """The recipe as text, each value with its origin; lines are as wide as the terminal, or 100.

    Commands and settings are not wrapped.
    """
    width = max(40, min(100, shutil.get_terminal_size((100, 24)).columns))
    return "".join(f"{line}\n" for long in _lines(recipe) for line in _wrapped(long, width))


def _wrapped(line: str, width: int) -> list[str]:
    words = line.lstrip(" ")
    indent = " " * (len(line) - len(words))
    if words.startswith(("--", "spark-build ")) or len(line) <= width:
        return [line]
    return textwrap.wrap(
        words, width, initial_indent=indent, subsequent_indent=indent or "  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _lines(recipe: Recipe) -> Iterator[str]:
    yield f"{recipe.id} on vLLM {recipe.vllm}, profile {recipe.profile}, {recipe.topology}"
    yield f"image {recipe.image.ref}"
    if recipe.image.build:
        yield f"  {recipe.image.build}"
    yield from _settings("flags", recipe.flags)
    yield from _settings("variables", recipe.env)
    yield from _nodes(recipe)
    if recipe.memory:
        yield from _explained_memory(recipe.memory)
    yield from _left_out(recipe)
    if recipe.unknown:
        yield f"unknown about the model: {', '.join(recipe.unknown)}"
    for note in recipe.notes:
        yield f"note: {note}"
    for failure in recipe.failures:
        yield f"known failure: {failure.what}"
        yield f"      helps: {failure.helps} ({failure.source})"
    yield "measured by others with the selected kernels, not with this exact recipe:"
    for figure in recipe.measured:
        yield f"  {figure.tokens_per_second:g} tokens/s at {figure.concurrency}: {figure.setup}"
        yield f"      {figure.source}"
    if not recipe.measured:
        yield "  no measurement is known"


def _nodes(recipe: Recipe) -> Iterator[str]:
    for node in recipe.nodes if len(recipe.nodes) > 1 else ():
        yield from _settings(f"node {node.rank}, {node.address}", (*node.flags, *node.env))


def _left_out(recipe: Recipe) -> Iterator[str]:
    if recipe.left_out:
        yield "left out"
    for one in recipe.left_out:
        yield f"  {' '.join(filter(None, (one.name, one.value)))}"
        yield f"      {one.origin}"
        yield f"      {one.reason}"


def _settings(title: str, settings: tuple[Setting, ...]) -> Iterator[str]:
    if settings:
        yield title
    for one in settings:
        yield f"  {' '.join(one.words)}"
        yield f"      {one.origin}"


def _explained_memory(memory: RecipeMemory) -> Iterator[str]:
    yield f"memory of one Spark, estimated: fits {memory.fits}"
    if memory.weights:
        least = "at least " if memory.weights.at_least else ""
        yield f"  weights {least}{memory.weights.bytes / GIB:.2f} GiB"
        yield f"      {memory.weights.source}"
    if cache := memory.kv_cache:
        yield f"  KV cache {cache.bytes / GIB:.2f} GiB"
        yield f"      {cache.sequences} x {cache.context} tokens, {cache.dtype} ({cache.source})"
    if memory.room is not None:
        yield f"  room for it {memory.room / GIB:.2f} GiB, at {memory.utilization:g} of the memory"
        yield f"      {memory.source}"
