"""The modules of a model in a common form, from a checkpoint's headers or from vLLM."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.serving.checkpoint import DRAFT, EXPERTS, group_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from builder.serving.auditdocuments import LoadedModel, LoadedModule
    from builder.serving.checkpoint import Tensor

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
        found = _LAYER.search(self.name)
        return int(found[3]) if found else None


def checkpoint_modules(tensors: Iterable[Tensor], layers: int | None) -> list[Module]:
    """The modules of a checkpoint; their kind follows from the tensors' dtypes and names."""
    by_module: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_module[tensor.name.rpartition(".")[0]].append(tensor)
    made = []
    for name, own in by_module.items():
        dtypes: dict[str, int] = defaultdict(int)
        for tensor in own:
            dtypes[tensor.dtype] += tensor.bytes
        group = group_of(own[0].name, layers)
        made.append(Module(name=name, method=_kind(own, group), group=group, dtypes=dict(dtypes)))
    return made


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
