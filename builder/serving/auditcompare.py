"""Compares what vLLM loaded with the headers of the checkpoint.

vLLM names modules differently: it merges several (``qkv_proj``), merges all experts of a layer,
and uses another root.  So modules are matched by the layer's number and the name after it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Literal, NamedTuple

from builder.serving.auditdocuments import Comparison, Difference, Unmatched
from builder.serving.auditmodules import ranges
from builder.serving.checkpoint import DRAFT, EMBEDDING, HEAD, VISION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from builder.serving.auditmodules import Module

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
    found = _AFTER_LAYER.search(name)
    if found is None or zone:
        if module.group in (EMBEDDING, HEAD):
            return _Key("", None, module.group)
        return _Key(zone, module.layer, _without_root(name))
    rest = _SHARED.sub(r"\1", found[1])
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


def _differences(found: Iterable[tuple[Module, str, bool]]) -> Iterator[Difference]:
    sums: dict[tuple[str, str, str, bool], list[Module]] = defaultdict(list)
    for module, kinds, plain in found:
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
