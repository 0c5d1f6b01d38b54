"""The modules of a model by quantisation method: from headers, a model's file, or vLLM itself.

vLLM names modules differently from the checkpoint: it merges several (``qkv_proj``), merges all
experts of a layer, and uses another root.  So modules are matched by the layer's number and the
name after it.
"""

from __future__ import annotations

import re
import shlex
import stat
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from builder.applier.files import read_regular
from builder.common.document import Count, Document, Part, Text
from builder.common.files import write_atomically
from builder.common.hints import reason
from builder.common.paths import package_file
from builder.errors import UsageError
from builder.serving.checkpoint import (
    DRAFT,
    EMBEDDING,
    EXPERTS,
    HEAD,
    VISION,
    Unknown,
    checkpoint_tensors,
    group_of,
    means_a_path,
    read_config,
    refuse_gguf,
)
from builder.serving.memory import (
    Ceiling,
    bytes_read,
    ceiling,
    expert_share,
    total,
    weights_of_model,
)
from builder.serving.models import Models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from builder.serving.checkpoint import Tensor
    from builder.serving.models import Model


Share = Annotated[float, Meta(ge=0, le=1)]


class LoadedModule(Part, frozen=True, kw_only=True, rename={"kind": "class"}):
    """A module with tensors of its own."""

    name: str
    kind: Annotated[Text, Meta(description="its class")]
    bytes: Annotated[
        dict[Text, Count], Meta(description="bytes of its parameters, by torch's name of the dtype")
    ]
    buffers: Annotated[Count, Meta(description="bytes")] = 0
    method: Annotated[Text | None, Meta(description="class of its quantisation method")] = None
    scheme: Annotated[Text | None, Meta(description="class of its compressed-tensors scheme")] = (
        None
    )
    kernel: Annotated[Text | None, Meta(description="class of its kernel, or of its experts")] = (
        None
    )
    shares: Annotated[
        Text | None, Meta(description="module that shares this memory, and counts it")
    ] = None
    experts: Annotated[
        tuple[Count, Count] | None,
        Meta(description="experts that a token uses, experts in the layer"),
    ] = None


class Renamed(Part, frozen=True, kw_only=True):
    """How vLLM renames a checkpoint's tensors, in this order."""

    substr: dict[str, str] = msgspec.field(default_factory=dict)
    prefix: dict[str, str] = msgspec.field(default_factory=dict)

    def __call__(self, name: str) -> str:
        """vLLM's name for a tensor of the checkpoint."""
        for old, new in self.substr.items():
            name = name.replace(old, new, 1)
        for old, new in self.prefix.items():
            if name.startswith(old):
                name = name.replace(old, new, 1)
        return name


class LoadedModel(Part, frozen=True, kw_only=True):
    """The document that `spark_build_audit.py` writes inside vLLM."""

    schema: Literal[1]
    vllm: Text
    model: str
    architecture: Text
    rank: Count
    world_size: Annotated[int, Meta(ge=1)]
    packed: Annotated[
        dict[str, tuple[str, ...]], Meta(description="modules into which vLLM merges several")
    ]
    renamed: Renamed = Renamed()
    modules: Annotated[tuple[LoadedModule, ...], Meta(min_length=1)]


class Method(Part, frozen=True, kw_only=True):
    """Modules with the same quantisation method."""

    name: Annotated[
        Text,
        Meta(description="class of vLLM's method, or of a module without one; kind, by headers"),
    ]
    kernel: Annotated[str, Meta(description="class of vLLM's kernel, where it has one")] = ""
    modules: Annotated[Count | None, Meta(description="null: unknown")]
    bytes: Annotated[Count | None, Meta(description="null: unknown")]
    read: Annotated[Count | None, Meta(description="bytes read for each token; null: unknown")]
    dtypes: Annotated[dict[str, Count], Meta(description="bytes by dtype")] = msgspec.field(
        default_factory=dict
    )
    source: Annotated[str, Meta(description="for a model's file: the source")] = ""


class KeptLayers(Part, frozen=True, kw_only=True):
    """Modules of one name that are not quantised, over all layers."""

    name: Annotated[Text, Meta(description="* is the number of a layer")]
    group: Text
    layers: Annotated[str, Meta(description="numbers, such as 0-11, 13; empty: not in a layer")]
    modules: Count
    bytes: Count
    read: Annotated[Count | None, Meta(description="bytes read for each token; null: unknown")]
    share: Annotated[Share | None, Meta(description="of all that a token reads; null: unknown")]


class Difference(Part, frozen=True, kw_only=True):
    """Modules whose form differs between the checkpoint and vLLM."""

    name: Annotated[Text, Meta(description="* is the number of a layer")]
    layers: str
    modules: Count
    bytes: Annotated[Count, Meta(description="in vLLM")]
    checkpoint: Annotated[Text, Meta(description="kinds, by the headers")]
    loaded: Annotated[Text, Meta(description="vLLM's method")]
    what: Literal["not quantised in vLLM", "quantised by vLLM"]


class Unmatched(Part, frozen=True, kw_only=True):
    """Modules that only the checkpoint or only vLLM has."""

    name: Text
    layers: str
    modules: Count
    bytes: Count


class Comparison(Part, frozen=True, kw_only=True):
    """What vLLM loaded, compared with a checkpoint's headers."""

    checkpoint: Text
    same: Annotated[
        Count, Meta(description="modules that are the same in vLLM and in the checkpoint")
    ]
    differences: tuple[Difference, ...]
    only_checkpoint: tuple[Unmatched, ...]
    only_loaded: tuple[Unmatched, ...]

    @property
    def lost(self) -> tuple[Difference, ...]:
        """Layers in 16 bits that the checkpoint has quantised."""
        return tuple(one for one in self.differences if one.what == "not quantised in vLLM")


class Audit(Document, frozen=True, kw_only=True):
    """The modules of a model by quantisation method."""

    model: Text
    source: Annotated[
        Literal["headers", "model", "vllm"],
        Meta(description="headers of a checkpoint, a model's file, or a loaded model"),
    ]
    vllm: Annotated[str, Meta(description="the release that loaded it")] = ""
    rank: Count = 0
    world_size: Annotated[int, Meta(ge=1)] = 1
    bytes: Annotated[Count | None, Meta(description="weights of all modules; null: unknown")]
    at_least: Annotated[bool, Meta(description="the true bytes may be more")] = False
    buffers: Annotated[Count, Meta(description="bytes besides the weights")] = 0
    methods: tuple[Method, ...]
    kept: Annotated[
        tuple[KeptLayers, ...], Meta(description="in 16 bits or more; the most read first")
    ]
    ceiling: Ceiling | None
    compared: Comparison | None = None
    unknown: Annotated[tuple[Text, ...], Meta(description="and why")] = ()


class InsideFiles(Document, frozen=True, kw_only=True):
    """The files that `audit --inside` wrote."""

    written: tuple[Text, ...]


#: Unquantised dtypes, by their names in safetensors.
PLAIN = ("BF16", "F16", "F32", "F64")
UNQUANTIZED = "unquantized"
#: torch's names for dtypes with another name in safetensors.
_TORCH = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "uint8": "U8",
    "int8": "I8", "int32": "I32", "int64": "I64", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4",
}  # fmt: skip
#: Scales of activations: a checkpoint with NVFP4 weights and none of these is W4A16.
_ACTIVATIONS = ("input_scale", "input_global_scale")
_DRAFT = "draft."
_LAYER = re.compile(r"(^|\.)(layers|blocks)\.(\d+)(?=\.|$)")
_EXPERT = re.compile(r"(^|\.)experts\.\d+")


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module with tensors of its own."""

    name: str
    #: vLLM's class, or the kind according to the headers
    method: str
    kernel: str = ""
    group: str
    dtypes: Mapping[str, int]
    #: experts that a token uses, and experts in the module, if known
    experts: tuple[int, int] | None = None
    #: the module whose memory it shares
    shares: str = ""
    #: bytes besides its weights, such as tables for rotary embeddings
    buffers: int = 0

    @property
    def bytes(self) -> int:
        """The bytes of all its weights."""
        return sum(self.dtypes.values())

    @property
    def plain(self) -> bool:
        """Whether its weights are not quantised; scales alone do not count."""
        return 2 * sum(self.dtypes.get(name, 0) for name in PLAIN) > self.bytes

    @property
    def pattern(self) -> str:
        """Its name with a star for the numbers of the layer and the expert."""
        starred = _EXPERT.sub(r"\1experts.*", _LAYER.sub(r"\1\2.*", self.name))
        return starred or "(the model itself)"

    @property
    def layer(self) -> int | None:
        """The number of its layer."""
        match = _LAYER.search(self.name)
        return int(match[3]) if match else None


def checkpoint_modules(tensors: Iterable[Tensor], layers: int | None) -> list[Module]:
    """The modules of a checkpoint; their kind follows from the tensors' dtypes and names."""
    by_module: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_module[tensor.name.rpartition(".")[0]].append(tensor)
    modules = []
    for name, own in by_module.items():
        dtypes: dict[str, int] = defaultdict(int)
        for tensor in own:
            dtypes[tensor.dtype] += tensor.bytes
        group = group_of(own[0].name, layers)
        modules.append(
            Module(name=name, method=_kind(own, group), group=group, dtypes=dict(dtypes))
        )
    return modules


def _kind(tensors: list[Tensor], group: str) -> str:
    """The kind as model files name it (`LayerKind`), if they do."""
    dtypes = {tensor.dtype for tensor in tensors}
    names = {tensor.name.rpartition(".")[2] for tensor in tensors}
    if dtypes <= set(PLAIN):
        return UNQUANTIZED
    end = "moe" if group == EXPERTS else "linear"
    scales = {tensor.dtype for tensor in tensors if "scale" in tensor.name.rpartition(".")[2]}
    if dtypes & {"U8", "I8", "F4"} and "F8_E4M3" in scales:
        activations = any(name.endswith(_ACTIVATIONS) for name in names)
        return f"{'nvfp4' if activations else 'w4a16'}-{end}"
    if dtypes & {"U8", "F4"} and scales & {"U8", "F8_E8M0"} and "F8_E4M3" not in dtypes:
        return f"mxfp4-{end}"
    if "F8_E4M3" in dtypes and scales & {"U8", "F8_E8M0"}:
        return f"mxfp8-{end}"
    if "F8_E4M3" in dtypes:
        return "fp8-block" if "weight_scale_inv" in names else f"fp8-{end}"
    return f"other: {', '.join(sorted(dtypes))}"


def loaded_modules(loaded: LoadedModel) -> list[Module]:
    """The modules as vLLM loaded them."""
    return [_loaded(module) for module in loaded.modules]


def _loaded(module: LoadedModule) -> Module:
    method = module.method or f"no method: {module.kind}"
    if module.scheme:
        method = f"{method} ({module.scheme})"
    group = EXPERTS if module.experts else group_of(f"{module.name}.weight", None)
    if module.name.startswith(_DRAFT):
        group = DRAFT
    dtypes: dict[str, int] = defaultdict(int)
    for name, size in module.bytes.items():
        dtypes[_TORCH.get(name, name)] += size
    return Module(
        name=module.name, method=method, kernel=module.kernel or "", group=group,
        dtypes=dict(dtypes), experts=module.experts, shares=module.shares or "",
        buffers=module.buffers,
    )  # fmt: skip


def ranges(numbers: Iterable[int | None]) -> str:
    """Layer numbers as ranges: ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in sorted({n for n in numbers if n is not None}):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


#: Merged modules of nearly all vLLM models, for models that do not list theirs.
_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_AFTER_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.(.*)$")
_EXPERTS = re.compile(r"(^|\.)experts(\..*)?$")
_SHARED = re.compile(r"(^|\.)experts\.(?=_?shared)")
#: Prefixes that differ between checkpoints and vLLM for the same module.
_ROOTS = ("model.", "language_model.", "backbone.", "transformer.")


class _Key(NamedTuple):
    """A key that is equal for a module in the checkpoint and in vLLM."""

    zone: str
    layer: int | None
    rest: str


def compare(
    folder: str,
    checkpoint: Sequence[Module],
    loaded: Sequence[Module],
    packed: Mapping[str, Sequence[str]],
    renamed: Callable[[str], str],
) -> Comparison:
    """Find modules that are quantised in only one of them."""
    by_key: dict[_Key, list[Module]] = defaultdict(list)
    for module in checkpoint:
        name = renamed(f"{module.name}.weight").removesuffix(".weight")
        by_key[_key(module, name)].append(module)
    known = {**_PACKED, **packed}
    same, used = 0, set[_Key]()
    differ: list[tuple[Module, str, bool]] = []
    strange = []
    for module in loaded:
        parts = [key for key in _parts(_key(module, module.name), known) if key in by_key]
        used.update(parts)
        theirs = [one for key in parts for one in by_key[key]]
        if not theirs:
            if module.bytes:
                strange.append(module)
        elif (plain := sum(o.bytes for o in theirs if o.plain) * 2 > _size(theirs)) == module.plain:
            same += 1
        else:
            kinds = ", ".join(sorted({one.method for one in theirs}))
            differ.append((module, kinds, plain))
    rest = [one for key, group in by_key.items() if key not in used for one in group]
    return Comparison(
        checkpoint=folder,
        same=same,
        differences=tuple(_differences(differ)),
        only_checkpoint=tuple(_unmatched(rest)),
        only_loaded=tuple(_unmatched(strange)),
    )


def _size(modules: Iterable[Module]) -> int:
    return sum(module.bytes for module in modules)


def _key(module: Module, name: str) -> _Key:
    zone = module.group if module.group in (VISION, DRAFT) else ""
    match = _AFTER_LAYER.search(name)
    if match is None or zone:
        if module.group in (EMBEDDING, HEAD):
            return _Key("", None, module.group)
        return _Key(zone, module.layer, _without_root(name))
    rest = _SHARED.sub(r"\1", match[1])
    if "shared" not in rest:
        rest = _EXPERTS.sub(r"\1experts", rest)
    return _Key(zone, module.layer, rest.replace("._shared", ".shared"))


def _without_root(name: str) -> str:
    while root := next((r for r in _ROOTS if name.startswith(r)), ""):
        name = name.removeprefix(root)
    return name


def _parts(key: _Key, packed: Mapping[str, Sequence[str]]) -> Iterator[_Key]:
    """The checkpoint's modules that one module of vLLM merges."""
    yield key
    parent, dot, last = key.rest.rpartition(".")
    for part in packed.get(last, ()):
        yield key._replace(rest=f"{parent}{dot}{part}")


def _differences(rows: Iterable[tuple[Module, str, bool]]) -> Iterator[Difference]:
    sums: dict[tuple[str, str, str, bool], list[Module]] = defaultdict(list)
    for module, kinds, plain in rows:
        sums[module.pattern, kinds, module.method, plain].append(module)
    for (name, kinds, method, plain), own in sorted(
        sums.items(), key=lambda one: (-_size(one[1]), one[0])
    ):
        what: Literal["not quantised in vLLM", "quantised by vLLM"]
        what = "quantised by vLLM" if plain else "not quantised in vLLM"
        yield Difference(
            name=name, layers=ranges(m.layer for m in own), modules=len(own), bytes=_size(own),
            checkpoint=kinds, loaded=method, what=what,
        )  # fmt: skip


def _unmatched(modules: Iterable[Module]) -> Iterator[Unmatched]:
    sums: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        sums[module.pattern].append(module)
    for name, own in sorted(sums.items(), key=lambda one: (-_size(one[1]), one[0])):
        yield Unmatched(
            name=name, layers=ranges(m.layer for m in own), modules=len(own), bytes=_size(own)
        )


#: The name of the script that runs inside vLLM, and the distribution by which vLLM finds it.
SCRIPT = "spark_build_audit.py"
_INFO = "spark_build_audit-1.dist-info"
_METADATA = "Metadata-Version: 2.1\nName: spark-build-audit\nVersion: 1\n"
_ENTRY_POINTS = "[vllm.general_plugins]\nspark_build_audit = spark_build_audit:register\n"
#: The most bytes of a file: a thousand times that of a large model.
_LONGEST = 500_000_000


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """What to audit."""

    subject: str
    #: the checkpoint that a loaded model is compared with
    against: Path | None = None
    models: Sequence[Path] = ()


def audit_request(
    subject: str | None, inside: Path | None, against: Path | None, models: Sequence[Path]
) -> AuditRequest:
    """The request that the options describe.

    Raises:
        UsageError: there is nothing to audit, or ``--inside`` has another argument.
    """
    if subject is None:
        raise UsageError(
            "nothing to audit: name a checkpoint's folder, or a model of 'models list'",
            hint="spark-build audit DIR",
        )
    if inside is not None:
        raise UsageError(
            f"--inside only writes files, so {subject} would not be audited",
            hint=f"spark-build audit --inside {shlex.quote(str(inside))}",
        )
    return AuditRequest(subject=subject, against=against, models=models)


def audit(request: AuditRequest) -> Audit:
    """Audit a checkpoint, a loaded model or a known model.

    Raises:
        SparkBuildError: the checkpoint, the file or the model cannot be read.
    """
    refuse_gguf(request.subject)
    place = Path(request.subject)
    if place.is_file():
        return _from_file(place, request.against)
    if request.against is not None:
        raise UsageError(
            f"--against compares a loaded model with a checkpoint; {request.subject} is not a file "
            f"that {SCRIPT} wrote",
            hint="spark-build audit --inside DIR",
        )
    if place.is_dir():
        return _from_folder(place)
    if means_a_path(request.subject):
        raise UsageError(
            f"{request.subject} does not exist: name a checkpoint's folder, a file that {SCRIPT} "
            "wrote, or a model",
            hint="spark-build models list",
        )
    return _from_model(Models.discover(request.models).model(request.subject, or_folder=True))


def write_inside(folder: Path) -> InsideFiles:
    """Write the script that audits a model inside vLLM, and the files by which vLLM finds it.

    Raises:
        UsageError: the folder cannot be written.
    """
    script = package_file("probes", "audit_model.py").read_text("utf-8")
    files = {
        SCRIPT: script, f"{_INFO}/METADATA": _METADATA, f"{_INFO}/entry_points.txt": _ENTRY_POINTS
    }  # fmt: skip
    written = []
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode())
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
        written.append(str(path))
    script_path = folder / SCRIPT
    script_path.chmod(script_path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return InsideFiles(written=tuple(written))


# -- three sources


def _from_folder(folder: Path) -> Audit:
    modules, share, why = _checkpoint(folder)
    return _audit(str(folder), "headers", modules, share, "by the headers", why)


def _checkpoint(folder: Path) -> tuple[list[Module], tuple[int, int] | None, list[str]]:
    """Its modules, the share of experts that a token uses, and why that is unknown."""
    tensors = checkpoint_tensors(folder)
    config = read_config(folder)
    modules = checkpoint_modules(tensors, config.text.num_hidden_layers if config else None)
    try:
        return modules, expert_share(config, {module.group for module in modules}), []
    except Unknown as why:
        return modules, None, [f"ceiling: {why}"]


def _from_file(path: Path, against: Path | None) -> Audit:
    loaded = read_loaded(path)
    modules = loaded_modules(loaded)
    unknown = []
    if any(module.group == EXPERTS and module.experts is None for module in modules):
        unknown.append(f"ceiling: {path} does not give the number of experts per token")
    compared = None
    if against is not None:
        if not against.is_dir():
            raise UsageError(f"--against {against} is not a folder", hint="--against DIR")
        stored, _share, _why = _checkpoint(against)
        compared = compare(str(against), stored, modules, loaded.packed, loaded.renamed)
    result = _audit(
        loaded.model or loaded.architecture, "vllm", modules, None, "as vLLM loaded them", unknown
    )
    return msgspec.structs.replace(
        result, vllm=loaded.vllm, rank=loaded.rank, world_size=loaded.world_size, compared=compared
    )


def read_loaded(path: Path) -> LoadedModel:
    """Read the file that `spark_build_audit.py` wrote.

    Raises:
        UsageError: it is another kind of file.
    """
    hint = "spark-build audit --inside DIR"
    other = f"{path} is not a file that {SCRIPT} wrote"
    try:
        return msgspec.json.decode(read_regular(path, _LONGEST), type=LoadedModel)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{other}: {reason(error)}", hint=hint) from None


def _from_model(model: Model) -> Audit:
    weights, limit, unknown = weights_of_model(model)
    methods = tuple(
        Method(name=layers.kind, modules=None, bytes=None, read=None, source=layers.source)
        for layers in model.holds
    )
    if not methods:
        unknown.append("kinds of layers: no source lists them")
    unknown.append(
        "modules and layers in 16 bits: the model's file does not list them; a checkpoint does"
    )
    return Audit(
        model=model.name, source="model", bytes=weights.bytes if weights else None,
        at_least=weights is not None and weights.at_least, methods=methods, kept=(),
        ceiling=limit, unknown=tuple(unknown),
    )  # fmt: skip


# -- sums


@dataclass(frozen=True)
class _Read:
    """A module, and the bytes of it that a token reads."""

    module: Module
    bytes: int | None


def _audit(
    name: str,
    source: Literal["headers", "vllm"],
    modules: Sequence[Module],
    share: tuple[int, int] | None,
    words: str,
    unknown: Iterable[str],
) -> Audit:
    shared = {module.shares for module in modules}
    headless = not any(module.group == HEAD and not module.shares for module in modules)
    read = [
        _Read(
            m, bytes_read(m.group, m.bytes, m.experts or share, tied=headless or m.name in shared)
        )
        for m in modules
    ]
    limit = ceiling((one.bytes for one in read), words)
    return Audit(
        model=name, source=source, bytes=sum(module.bytes for module in modules),
        buffers=sum(module.buffers for module in modules), methods=_methods(read),
        kept=_unquantised(read, limit.bytes_per_token if limit else 0), ceiling=limit,
        unknown=tuple(unknown),
    )  # fmt: skip


def _methods(read: Iterable[_Read]) -> tuple[Method, ...]:
    sums: dict[tuple[str, str], list[_Read]] = defaultdict(list)
    for one in read:
        if one.module.bytes or one.module.shares:
            sums[one.module.method, one.module.kernel].append(one)
    rows = []
    for (name, kernel), own in sums.items():
        dtypes: dict[str, int] = defaultdict(int)
        for one in own:
            for dtype, size in one.module.dtypes.items():
                dtypes[dtype] += size
        rows.append(
            Method(
                name=name, kernel=kernel, modules=len(own),
                bytes=sum(one.module.bytes for one in own), read=total(one.bytes for one in own),
                dtypes=dict(sorted(dtypes.items(), key=lambda row: -row[1])),
            )
        )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-(row.bytes or 0), row.name)))


def _unquantised(read: Iterable[_Read], per_token: int) -> tuple[KeptLayers, ...]:
    """Modules that are not quantised, by name; the most read first."""
    sums: dict[tuple[str, str], list[_Read]] = defaultdict(list)
    for one in read:
        if one.module.plain:
            sums[one.module.pattern, one.module.group].append(one)
    rows = []
    for (name, group), own in sums.items():
        needed = total(one.bytes for one in own)
        share = None if needed is None or not per_token else round(needed / per_token, 4)
        rows.append(
            KeptLayers(
                name=name, group=group, layers=ranges(one.module.layer for one in own),
                modules=len(own), bytes=sum(one.module.bytes for one in own), read=needed,
                share=share,
            )
        )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-(row.read or 0), -row.bytes, row.name)))
