"""Asks a vLLM release to build a user's whole model on a simulated GB10: no GPU, no weights.

The release's own code parses the flags, checks the configuration, and builds the model's class
from ``config.json`` on torch's meta device.  So it says itself whether the model starts, which
kernel each layer gets, and how many bytes its weights and caches need.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from builder.applier.files import read_regular
from builder.applier.values import canonical_json
from builder.common.document import Count, Document, Part, Text, always
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError
from builder.layers.catalog import Catalog, Selection
from builder.layers.planner import refuse_plan
from builder.pipeline.bases import identify_base
from builder.pipeline.inputs import inputs_of
from builder.proof.flags import flag_groups
from builder.proof.hub import MOST_BYTES
from builder.proof.isolation import SandboxUnavailable
from builder.proof.target import ModelToBuild
from builder.proof.trust import TrustedSources
from builder.proof.variables import LEFT_OUT
from builder.proof.weightheaders import weight_headers
from builder.proof.wholemodel import (
    CacheGroup,
    CacheRow,
    DeviceMemory,
    LayerRow,
    Loading,
    ModelAnswer,
    Refusal,
    Release,
    Target,
    configuration_of,
    is_path,
    own_folder,
    sentence,
)
from builder.serving.assumed import is_general, near_folder
from builder.serving.checkpoint import read_config
from builder.serving.loading import loadings, refusal_to_load
from builder.serving.memory import (
    GIB,
    KV_BYTES,
    MOST_FREE,
    OVERHEAD,
    OVERHEAD_BETWEEN_NODES,
    OVERHEAD_ERROR,
    OVERHEAD_PER_TOKEN,
    TOTAL,
    USUAL_FRACTION,
    USUAL_FREE,
    UTILIZATION,
    ceiling,
)
from builder.serving.models import Models, read_model
from builder.serving.released import release_base

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from builder.pipeline.options import PlanOptions
    from builder.serving.configurations import Nearest
    from builder.serving.models import Model

#: Whether a model starts.
Starts = Literal["yes", "no", "not known", "not run"]
#: The profile whose layers may cure a refusal.
MAIN_PROFILE = "b12x-full"
#: Requests at the same time for which the longest context is given.
_USERS = (1, 4, 16)


class Room(Part, frozen=True, kw_only=True):
    """Memory of the model on one GB10; the KV cache is sized by the release."""

    total_bytes: Count
    free_bytes: Annotated[int, Meta(description="taken as free when the server starts")]
    fraction: float
    weight_bytes: Count
    overhead_bytes: Annotated[int, Meta(description="activations and CUDA graphs, an estimate")]
    overhead_error: Annotated[int, Meta(description="largest error of the estimate on server logs")]
    cache_bytes: Annotated[int, Meta(description="what is left for caches; below 0: does not fit")]
    longest: Annotated[
        dict[str, int], Meta(description="requests at the same time -> tokens of each, at most")
    ]
    context: Annotated[int, Meta(description="tokens of one request at most; 0: not asked")] = 0
    request_bytes: Annotated[int, Meta(description="of one request of that context")] = 0
    concurrency: Annotated[float, Meta(description="how many of them fit")] = 0.0
    block_tokens: Count = 0
    groups: tuple[CacheGroup, ...] = ()
    refusal: Annotated[str, Meta(description="the release's words: too little memory")] = ""
    not_asked: Annotated[str, Meta(description="why the release did not size its cache")] = ""
    sparks: Annotated[
        int | None, Meta(description="GB10s that the weights alone need; null: one")
    ] = None
    ceiling: Annotated[
        float | None, Meta(description="tokens/s of one request at most: 273 GB/s over its bytes")
    ]
    expected: Annotated[
        tuple[float, float] | None,
        Meta(description="tokens/s of one request as measured speeds relate to ceilings"),
    ] = None


def surely_too_large(memory: Room) -> bool:
    """Whether a model does not fit, also if the estimate is wrong by as much as it ever was."""
    return memory.cache_bytes + memory.overhead_error < memory.request_bytes


class Trouble(Part, frozen=True, kw_only=True):
    """A kernel that the release selects, and that failed on GB10s in the field."""

    kernel: Text
    text: Text
    source: Text


#: What no release checks: kernels that it selects on SM12x and that fail there.
_TROUBLES = {
    r"DeepGemm|DEEPGEMM": Trouble(
        kernel="DeepGEMM",
        text='servers on SM12x ended with "Unknown recipe", "Unknown SF transformation" or '
        '"Unsupported architecture" (vLLM 0.24.0 to 0.27.1); --env VLLM_USE_DEEP_GEMM=0 shows what '
        "the release takes instead",
        source="vllm-project/vllm#51884, deepseek-ai/DeepGEMM#236",
    ),
}


class Cure(Part, frozen=True, kw_only=True):
    """A change with which the release takes the model."""

    change: Text
    flags: tuple[str, ...]
    layers: tuple[str, ...] = ()


class Choice(Part, frozen=True, kw_only=True):
    """What the model gets with other layers and flags, or on another release."""

    name: Text
    vllm: Text
    #: layers that change files of this release
    patched: tuple[str, ...] = ()
    flags: tuple[str, ...]
    starts: Starts
    why: Annotated[str, Meta(description="why not, in a sentence")] = ""
    linear: Annotated[tuple[str, ...], Meta(description="kernels of its linear layers")] = ()
    experts: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    cache: Annotated[str, Meta(description="type of the KV cache")] = ""
    weight_bytes: int = 0
    ceiling: float | None = None
    troubles: tuple[str, ...] = ()
    assumed: Annotated[str, Meta(description="what stands in for the model's configuration")] = ""


class Preflight(Document, frozen=True, kw_only=True):
    """Whether a model starts on a release, and with which kernels."""

    model: Text
    #: what ``vllm serve`` takes: of a model of ours its id on Hugging Face
    served: Text
    base: Text
    packages: dict[str, str]
    #: layers that change files of this base
    patched: tuple[str, ...]
    flags: tuple[str, ...]
    environment: dict[str, str]
    #: not known: the model's configuration is not here, and that of another was asked about
    starts: Starts
    reason: Annotated[str, Meta(description="why it was not run, or is not known")] = always("")
    configuration: Annotated[
        str, Meta(description="of a known checkpoint; absent: the model's own was read")
    ] = ""
    assumed: Annotated[
        str, Meta(description="what stands in for the model's configuration, and what differs")
    ] = ""
    refusal: Refusal | None
    warnings: tuple[str, ...]
    lines: tuple[str, ...]
    settings: dict[str, str | int | float | bool | None]
    layers: tuple[LayerRow, ...]
    caches: tuple[CacheRow, ...]
    memory: Room | None
    #: of a model that was built, and of its draft: loading by name
    loading: tuple[Loading, ...] = always(())
    troubles: tuple[Trouble, ...] = always(())
    cures: tuple[Cure, ...] = always(())
    #: with ``--profiles``: without flags, and with each profile
    choices: tuple[Choice, ...] = always(())
    #: why the release did not take an attention backend
    passed_over: tuple[str, ...] = always(())
    simulated: tuple[str, ...]
    cached: bool = False


class ModelMatrix(Document, frozen=True, kw_only=True):
    """One model on several releases."""

    model: Text
    flags: tuple[str, ...]
    layers: tuple[str, ...]
    rows: tuple[Choice, ...]

    @property
    def assumed(self) -> str:
        """What stands in for the model's configuration; empty: nothing."""
        return next((row.assumed for row in self.rows if row.assumed), "")

    @property
    def starting(self) -> list[str]:
        """The releases on which it starts."""
        return [row.vllm for row in self.rows if row.starts == "yes"]


@dataclass(frozen=True, kw_only=True)
class PreflightRequest:
    """What to ask: a model, the vLLM, and what would follow ``vllm serve``.

    ``preflight`` answers it.  Questions to the same vLLM share a process that imported it, so ask
    them one after the other; at most two such processes are kept.
    """

    #: a folder, a name of ours, or an id on Hugging Face
    model: str
    plan: PlanOptions
    flags: tuple[str, ...] = ()
    #: ``NAME=VALUE``; those of a serve file may be a stranger's
    variables: Sequence[str] = ()
    #: those of them that the user typed
    typed: Sequence[str] = ()
    #: flags of a serve file that are not asked about, and why
    left_out: Sequence[str] = ()
    models: Sequence[Path] = ()
    trust_image: bool = False
    #: whether a profile's flags are added that these do not set
    add_flags: bool = True
    #: whether a share of the memory is added where these set none: vLLM's own default is too large
    add_share: bool = False
    #: bytes of the device's memory; None: those of a GB10
    memory: int | None = None
    #: whether the release sizes its KV cache, and a model that does not fit does not start
    fits: bool = True
    #: whether to look for changes with which a model starts that is refused
    cures: bool = True
    #: whether to ask without the flags and with each profile, too
    profiles: bool = False
    #: whether the nearest known configuration stands in for one that cannot be downloaded
    assume: bool = False


def preflight(request: PreflightRequest) -> Preflight:
    """Ask the release of a base, with the layers that were named.

    Raises:
        SparkBuildError: the model's configuration or the base cannot be read.
    """
    given, typed = variables_of(request.variables), variables_of(request.typed)
    with _target(request.plan) as opened:
        target = dataclasses.replace(opened, env={**opened.env, **given})
        trust = TrustedSources(patches=request.plan.patches, everything=request.trust_image)
        trust = trust.with_plan(target.plan) if target.plan else trust
        release = Release(target, trust.with_variables(typed))
        folder, near, error = _model_or_near(release, request)
        if near is not None and not near.sized:  # another size fits elsewhere
            request = dataclasses.replace(request, fits=False)
        document = _asked(release, folder, request)
        if near is not None and error is not None:
            document = _as_assumed(document, near, error)
        parts = tuple(f"{LEFT_OUT}{text}" for text in request.left_out)
        document = replace(document, simulated=(*document.simulated, *parts))
        if document.starts == "no" and request.cures and not was_built(document):
            document = replace(document, cures=tuple(_cures(release, folder, document, request)))
    if request.profiles:
        document = replace(document, choices=tuple(_choices(request)))
    return document


def _model_or_near(
    release: Release, request: PreflightRequest
) -> tuple[Path, Nearest | None, RemoteError | None]:
    """The folder of a model's configuration, or of the nearest one and why it stands in."""
    try:
        return model_folder(release, request.model, request.models), None, None
    except RemoteError as error:
        if not request.assume:
            raise
        name = served_name(request.model, request.models)
        near, folder = near_folder(name, Models.discover(request.models), error)
        return folder, near, error


def _as_assumed(document: Preflight, near: Nearest, error: RemoteError) -> Preflight:
    """An answer of a near configuration, as what it says of the model itself."""
    document = replace(document, configuration=near.of)
    if near.own:
        return document
    if not near.sized:  # bytes of another size
        rows = tuple(replace(row, bytes=0) for row in document.layers)
        document = replace(document, layers=rows, memory=None)
    refusal = document.refusal
    if document.starts != "not run" and (refusal is None or not is_general(refusal)):
        document = replace(document, starts="not known", reason=str(error))
    return replace(document, assumed=near.assumed)


def was_built(document: Preflight) -> bool:
    """Whether a refused model was built: an answer without an error is then no cure."""
    return document.refusal is not None and document.refusal.stage in ("memory", "loading")


def preflight_on(request: PreflightRequest, releases: Sequence[str]) -> ModelMatrix:
    """Ask several releases about one model, with the same layers, flags and variables.

    Raises:
        SparkBuildError: the model's configuration cannot be read.
    """
    rows = []
    for vllm in releases:
        plan = dataclasses.replace(request.plan, base=release_base(vllm))
        rows.append(_choice(f"vLLM {vllm}", vllm, dataclasses.replace(request, plan=plan)))
    return ModelMatrix(
        model=request.model, flags=request.flags, layers=request.plan.names, rows=tuple(rows)
    )


def _choices(request: PreflightRequest) -> Iterator[Choice]:
    """The same model and release without flags, and with each profile."""
    plain = dataclasses.replace(request, flags=(), variables=(), typed=())
    names = sorted(Catalog.discover(request.plan.patches).profile_files)
    for name in ("", *names):
        plan = dataclasses.replace(request.plan, layers=(name,) if name else ())
        asked = dataclasses.replace(plain, plan=plan)
        yield _choice(name or "as released, no flags", "", asked)


def _choice(name: str, vllm: str, request: PreflightRequest) -> Choice:
    """One answer in short; a release that has no such layers or files says why."""
    small = dataclasses.replace(request, cures=False, profiles=False)
    try:
        return in_short(name, preflight(small))
    except (UsageError, RemoteError):
        raise  # of the model, for every release alike
    except SparkBuildError as error:
        return Choice(name=name, vllm=vllm, flags=request.flags, starts="not run", why=str(error))


def in_short(name: str, document: Preflight) -> Choice:
    """The kernels of an answer."""
    refusal = document.refusal
    reason = "" if document.assumed else document.reason
    why = reason or (sentence(refusal) if refusal is not None else "")
    memory = document.memory
    return Choice(
        name=name, vllm=document.packages.get("vllm", ""), patched=document.patched,
        flags=document.flags, starts=document.starts, why=why,
        linear=kernels_of(document.layers, "linear"),
        experts=kernels_of(document.layers, "experts"),
        attention=kernels_of(document.layers, "attention"),
        cache=str(document.settings.get("kv_cache_dtype") or ""),
        weight_bytes=memory.weight_bytes if memory else 0,
        ceiling=memory.ceiling if memory else None,
        troubles=tuple(trouble.kernel for trouble in document.troubles), assumed=document.assumed,
    )  # fmt: skip


def kernels_of(rows: Sequence[LayerRow], kind: str) -> tuple[str, ...]:
    """The kernels of a model's ``linear`` layers, ``experts`` or ``attention``, largest first."""
    chosen: dict[str, None] = {}
    for row in sorted(rows, key=lambda row: -row.bytes):
        own = "attention" if row.attention else "experts" if row.experts else "linear"
        if own == kind and row.part == "model":
            chosen.update(dict.fromkeys([row.attention] if row.attention else row.kernels))
    return tuple(chosen)


def layers_to_show(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Layers that have a kernel to choose, or more than a hundredth of the weights."""
    total = sum(row.bytes for row in rows)
    return [row for row in rows if row.kernels or row.attention or row.bytes * 100 > total]


def _cures(
    release: Release, folder: Path, document: Preflight, request: PreflightRequest
) -> Iterator[Cure]:
    """Single flags without which the release takes the model, and the layers with which it does."""
    groups = flag_groups(document.flags)
    choices = [tuple(w for g in groups if g is not out for w in g) for out in groups]
    answers = release.ask(folder, choices) if choices else []
    for out, choice, answer in zip(groups, choices, answers, strict=True):
        if answer.error is None:
            yield Cure(change=f"without {shlex.join(out)}", flags=choice)
    if request.plan.names or document.refusal is None or document.refusal.stage != "model":
        return
    patched = dataclasses.replace(request.plan, layers=(MAIN_PROFILE,))
    answer_ = _choice(MAIN_PROFILE, "", dataclasses.replace(request, plan=patched))
    if answer_.starts == "yes" and answer_.patched:
        yield Cure(
            change=f"with --layers {MAIN_PROFILE}", flags=request.flags, layers=(MAIN_PROFILE,)
        )


def model_folder(release: Release, model: str, folders: Sequence[Path]) -> Path:
    """The folder with a model's ``config.json``: of a name of ours what its file says.

    That of an id on Hugging Face is downloaded.

    Raises:
        UsageError: nothing has this model's ``config.json``.
        RemoteError: ``config.json`` cannot be downloaded.
    """
    if is_path(model):
        return own_folder(Path(model))
    if "/" in model:
        return release.downloaded(model)
    known = Models.discover(folders).model(model, or_folder=True)
    if known.config is not None:
        return configuration_of({"config.json": canonical_json(known.config.value)})
    return release.downloaded(known.id.value)


def served_name(model: str, folders: Sequence[Path]) -> str:
    """The model as ``vllm serve`` takes it.

    Raises:
        UsageError: a file of a model is malformed.
    """
    if is_path(model) or "/" in model:
        return model
    return Models.discover(folders).model(model, or_folder=True).id.value


def models_to_build(
    named: str | None, folders: Iterable[Path], kinds: Collection[str], vllm: str
) -> tuple[ModelToBuild, ...]:
    """The model that level ``model`` builds; by default known ones that have layers of some kinds.

    Raises:
        UsageError: the model is unknown, or a file is malformed.
    """
    models = Models.discover(folders)
    if named is not None and is_path(named):
        return (ModelToBuild(name=named, folder=Path(named)),)
    if named is not None:
        known = models.model_or_generic(named) if "/" in named else models.model(named)
        return (_to_build(known, known.name if known.config else known.id.value, named=True),)
    # gated SiLU first, for which profiles promise kernels; of equal kinds one model is enough
    known_ones = sorted(
        map(read_model, models.files.values()),
        key=lambda model: model.experts is not None and model.experts.value != "silu",
    )
    chosen: dict[frozenset[str], Model] = {}
    for model in known_ones:
        model_kinds = frozenset(model.kinds())
        served = model.needs is None or model.needs.holds_for(vllm)
        if model.config is not None and served and (not kinds or model_kinds & set(kinds)):
            chosen.setdefault(model_kinds, model)
    return tuple(_to_build(model, model.name, named=False) for model in chosen.values())


def _to_build(model: Model, name: str, *, named: bool) -> ModelToBuild:
    config = None if model.config is None else model.config.value
    activation = "silu" if model.experts is None else model.experts.value
    return ModelToBuild(
        name=name, kinds=frozenset(model.kinds()), config=config, named=named,
        activation="clamped SwiGLU" if model.clamped else activation,
    )  # fmt: skip


def variables_of(texts: Sequence[str]) -> dict[str, str]:
    """Variables from ``NAME=VALUE``.

    Raises:
        UsageError: a text has another form.
    """
    wrong = [text for text in texts if not re.match(r"[A-Za-z_]\w*=", text)]
    if wrong:
        raise UsageError(f"--env {wrong[0]!r} is not NAME=VALUE", hint="--env VLLM_USE_DEEP_GEMM=0")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


@contextmanager
def _target(options: PlanOptions) -> Iterator[Target]:
    """The base as it is, or with the selected layers applied.

    Raises:
        SparkBuildError: it cannot be read, or the layers do not apply to it.
    """
    ref = Ref(str(options.base))
    if not options.names:
        nothing = Selection((), ())
        base = identify_base(ref, nothing, PackageIndex(), platform=options.platform)
        with closing(base):
            yield Target.of(base)
        return
    with closing(inputs_of(options).identify(ref)) as planning:
        base, plan = planning.base, planning.plan()
        refuse_plan(plan, planning.rebuild_command("image"))
        yield Target.of(base).with_plan(plan)


def _asked(release: Release, folder: Path, request: PreflightRequest) -> Preflight:
    """The document for the flags, and the profile's flags for experts where the model has some."""
    target = release.target
    added = request.add_flags
    flags = with_flags(request.flags, target.flags if added else ())
    chosen = _sizes(flags)
    flags = with_flags(flags, _SHARE if request.add_share and not chosen else ())
    more = with_flags(flags, target.flags_for_experts if added else ())
    device = device_memory(request.memory, chosen=chosen) if request.fits else None
    document = Preflight(
        model=request.model, served=served_name(request.model, request.models),
        base=target.base, packages=dict(target.packages),
        patched=target.patched, flags=flags, environment=dict(target.env), starts="not run",
        refusal=None, warnings=(), lines=(), settings={}, layers=(), caches=(), memory=None,
        simulated=(),
    )  # fmt: skip
    weights = weight_headers(folder)
    try:
        choices = [flags, more] if more != flags else [flags]
        answers = release.ask(folder, choices, device, weights)
    except SandboxUnavailable as error:
        hint = f"; try: {error.hint}" if error.hint else ""
        return replace(document, reason=f"{error}{hint}")
    cured = answers[0].error is not None and answers[-1].error is None
    experts = cured or any(answer.has_experts for answer in answers) or _names_experts(folder)
    answer = answers[-1 if experts else 0]
    missing = answer.not_run
    loading = loadings(answer, weights)
    refusal = answer.error or refusal_to_load(loading) or unquantised(folder, answer)
    refusal = refusal or _too_large(answer)
    starts: Literal["yes", "no", "not run"] = "no" if refusal else "yes"
    known = device or device_memory(request.memory, chosen=chosen)
    return replace(
        document, flags=more if experts else flags, starts="not run" if missing else starts,
        environment=release.environment,
        troubles=troubles_of(answer.layers), reason=missing, refusal=refusal,
        warnings=answer.warnings, lines=answer.lines,
        settings=answer.settings, layers=answer.layers, caches=answer.caches,
        memory=None if answer.error else room(answer, known), simulated=answer.simulated,
        passed_over=answer.passed_over, cached=answer.kept, loading=loading,
    )  # fmt: skip


#: The share of the memory that is asked for where nobody chose one.
_SHARE = (UTILIZATION, str(USUAL_FRACTION))


def _sizes(flags: Sequence[str]) -> bool:
    """Whether flags choose the share of the memory, or the bytes of the KV cache."""
    return any(with_flags(flags, (name, "0")) == tuple(flags) for name in (UTILIZATION, KV_BYTES))


def _too_large(answer: ModelAnswer) -> Refusal | None:
    """The refusal of a release that has too little memory for a model that it built."""
    if answer.memory is None or answer.memory.refusal is None:
        return None
    return Refusal(type="ValueError", message=answer.memory.refusal, stage="memory")


def unquantised(folder: Path, answer: ModelAnswer) -> Refusal | None:
    """The refusal of a model whose experts the checkpoint has in few bits, and the release in 16.

    The release says so only when it loads the weights: their names and shapes do not fit.
    """
    plain = [
        row
        for row in answer.layers
        if row.experts and row.part == "model" and row.quantisation.startswith("Unquantized")
    ]
    if not plain or not quantises_experts(folder):
        return None
    size = sum(row.bytes for row in plain)
    message = (
        f"the checkpoint has quantised experts, and this release builds {plain[0].pattern} in 16 "
        f"bits ({gibibytes(size)}), so it cannot load their weights"
    )
    return Refusal(type="ValueError", message=message, stage="loading")


def quantises_experts(folder: Path) -> bool:
    """Whether a checkpoint names layers that it quantises, and routed experts are among them."""
    try:
        raw = json.loads(read_regular(folder / "config.json", MOST_BYTES))
    except (OSError, ValueError, RecursionError):  # the release says so itself
        return False
    given = raw.get("quantization_config") if isinstance(raw, dict) else None
    layers = given.get("quantized_layers") if isinstance(given, dict) else None
    return isinstance(layers, dict) and any(".experts" in str(name) for name in layers)


def _names_experts(folder: Path) -> bool:
    """Whether a configuration names routed experts, which an early refusal does not tell."""
    try:
        config = read_config(folder)
    except UsageError:  # the release says so itself
        return False
    return bool(config and config.experts)


def troubles_of(rows: Sequence[LayerRow]) -> tuple[Trouble, ...]:
    """The kernels among those that were selected which failed in the field."""
    kernels = " ".join(kernel for row in rows for kernel in row.kernels)
    return tuple(one for pattern, one in _TROUBLES.items() if re.search(pattern, kernels))


def with_flags(flags: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    """Flags, and those of a profile that they do not set themselves."""
    given = {word.partition("=")[0].replace("_", "-") for word in flags if word.startswith("--")}
    added: list[str] = []
    keep = True
    for word in more:
        if word.startswith("--"):
            keep = word.partition("=")[0].replace("_", "-") not in given
        added += [word] if keep else []
    return (*flags, *added)


#: Measured tokens/s of one request as a share of the ceiling, without speculation, on GB10s with
#: vLLM 0.17.0 to 0.28.0: three dense models 0.78 to 0.85, seven with experts 0.62 to 0.69
#: (djangodevreng/dgx-spark-benchmarks, and a thread in NVIDIA's forum).
MEASURED_SHARE = {"dense": (0.77, 0.85), "experts": (0.61, 0.70)}


def ranks_of(answer: ModelAnswer) -> int:
    """Among how many devices a model is divided."""
    names = ("tensor_parallel_size", "pipeline_parallel_size")
    return math.prod(int(answer.settings.get(name) or 1) for name in names)


def expected_speed(answer: ModelAnswer, limit: float | None) -> tuple[float, float] | None:
    """The tokens/s to expect of one request; None where nothing was measured.

    Drafts and several machines have no share of their own.
    """
    if limit is None or answer.settings.get("speculative") or ranks_of(answer) > 1:
        return None
    low, high = MEASURED_SHARE["experts" if answer.has_experts else "dense"]
    return round(low * limit, 1), round(high * limit, 1)


def device_memory(total: int | None, *, chosen: bool) -> DeviceMemory:
    """The memory of a GB10 as a server finds it.

    ``chosen`` says whether somebody chose the share of it that the server takes.
    """
    whole = total or TOTAL.bytes
    used = TOTAL.bytes - (MOST_FREE if chosen else USUAL_FREE)
    return DeviceMemory(
        total=whole, free=whole - used, overhead=OVERHEAD.bytes,
        overhead_per_token=OVERHEAD_PER_TOKEN, overhead_between_ranks=OVERHEAD_BETWEEN_NODES,
        requests=_USERS,
    )  # fmt: skip


def room(answer: ModelAnswer, device: DeviceMemory) -> Room:
    """The memory of a model that was built, and its limit of speed."""
    fraction = float(answer.settings.get("gpu_memory_utilization") or 0.9)
    stages = int(answer.settings.get("pipeline_parallel_size") or 1)  # one after another
    read = [row.token_bytes * stages for row in answer.layers]
    limit = ceiling(read, "by the release's layers")
    sized = answer.memory
    overhead = sized.overhead_bytes if sized else device.overhead
    left = int(device.total * fraction) - answer.parameter_bytes - overhead
    place = int(device.total * USUAL_FRACTION) - overhead
    several = ranks_of(answer) > 1
    error = OVERHEAD_ERROR + (OVERHEAD_BETWEEN_NODES if several else 0)
    sparks = -(-answer.parameter_bytes // place) if place > 0 else 1
    made = Room(
        total_bytes=device.total, free_bytes=device.free, fraction=fraction,
        weight_bytes=answer.parameter_bytes, overhead_bytes=overhead,
        overhead_error=error, cache_bytes=left, longest={},
        not_asked=answer.memory_unknown, sparks=sparks if sparks > 1 else None,
        ceiling=limit.tokens_per_second if limit else None,
        expected=expected_speed(answer, limit.tokens_per_second if limit else None),
    )  # fmt: skip
    if sized is None:
        return made
    longest = dict(sorted(sized.longest.items(), key=lambda row: int(row[0])))
    return replace(
        made, cache_bytes=sized.available_bytes, longest=longest, context=sized.context,
        request_bytes=sized.request_bytes, concurrency=sized.concurrency,
        block_tokens=sized.block_tokens, groups=sized.groups, refusal=sized.refusal or "",
    )  # fmt: skip


def refuse_if_it_does_not_start(document: Preflight) -> None:
    """Raise if the model does not start, could not be built here, or was only assumed.

    Raises:
        RemoteError: its configuration could not be downloaded, and another one was asked about.
        SparkBuildError: with the release's own words (exit 5).
    """
    if document.starts == "yes":
        return
    vllm = document.packages.get("vllm", "")
    if document.starts == "not known":
        raise RemoteError(
            f"it is not known whether {document.model} starts on vLLM {vllm}: {document.reason}",
            hint=_WITH_ITS_OWN,
        )
    if document.starts == "not run":
        text = f"{document.model} was not built with vLLM {vllm}: {document.reason}"
        raise SparkBuildError(text, Exit.VERIFY_FAILED)
    assert document.refusal is not None
    text = f"{document.model} does not start on vLLM {vllm}: {sentence(document.refusal)}"
    if was_built(document):
        raise SparkBuildError(text, Exit.VERIFY_FAILED, hint=next_step(document))
    words = ["spark-build", "preflight", document.model, "--base", document.base]
    cure = document.cures[0] if document.cures else None
    more = cure.flags if cure else (*document.flags, "--layers", MAIN_PROFILE)
    more = (*more, "--layers", ",".join(cure.layers)) if cure and cure.layers else more
    raise SparkBuildError(text, Exit.VERIFY_FAILED, hint=shlex.join([*words, *more]))


_WITH_ITS_OWN = "spark-build preflight DIR, a folder with its config.json"


def next_step(document: Preflight) -> str:
    """What to try where a model was built, and does not fit or cannot be loaded."""
    memory, refusal = document.memory, document.refusal
    assert memory is not None
    assert refusal is not None
    if refusal.stage == "loading":
        return shlex.join(["spark-build", "preflight", document.model, "--releases", "all"])
    if memory.sparks:
        return f"serve it on {memory.sparks} GB10s or more, or take a smaller checkpoint"
    if document.settings.get("gpu_memory_utilization", 0) != USUAL_FRACTION and (
        memory.free_bytes < memory.fraction * memory.total_bytes
    ):
        return f"{UTILIZATION} {USUAL_FRACTION}"
    tokens = memory.longest.get("1", 0)
    if tokens >= _FEWEST:
        return f"--max-model-len {tokens // _FEWEST * _FEWEST}"
    return "take a smaller checkpoint, or serve it on several GB10s"


#: Tokens that a context is a multiple of in a hint.
_FEWEST = 1024


def refuse_if_it_starts_nowhere(document: ModelMatrix) -> None:
    """Raise if no release takes the model.

    Raises:
        RemoteError: its configuration could not be downloaded, and another one was asked about.
        SparkBuildError: with the reason of the last release (exit 5).
    """
    if document.starting or not document.rows:
        return
    if any(row.starts == "not known" for row in document.rows):
        raise RemoteError(
            f"it is not known whether {document.model} starts on one of these releases: its "
            "configuration could not be downloaded",
            hint=_WITH_ITS_OWN,
        )
    last = document.rows[-1]
    text = (
        f"{document.model} starts on none of {len(document.rows)} releases; {last.vllm}: {last.why}"
    )
    raise SparkBuildError(text, Exit.VERIFY_FAILED)


def gibibytes(size: int) -> str:
    """Bytes as a reader wants them."""
    return f"{size / GIB:.2f} GiB"
