"""The request for a base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.applier.layers import Remove, Wheel
from builder.applier.values import normalize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.common.pypi import PackageIndex
    from builder.common.reference import Ref
    from builder.images.registry.model import Descriptor
    from builder.images.rootfs.facts import RecordedFiles

    FactsOf = Callable[[Sequence[Descriptor]], RecordedFiles | None]

#: Distributions that layers use; those of user layers are added.
TRACKED = (
    "vllm",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "b12x",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)


def tracked_for(layers: Iterable[Layer]) -> tuple[str, ...]:
    """Those that layers use, with what these layers name."""
    named: set[str] = set()
    for layer in layers:
        named.add(layer.package)
        for variant in layer.variants:
            named.update(variant.when)
            for op in variant.ops:
                named.update(op.when)
                if isinstance(op, (Wheel, Remove)):
                    named.add(normalize(op.distribution))
                if isinstance(op, Wheel) and op.version_of:
                    named.add(normalize(op.version_of))
    return (*TRACKED, *sorted(named - set(TRACKED)))


def no_facts(_layers: Sequence[Descriptor]) -> RecordedFiles | None:
    """No known facts of layers: they are read."""
    return None


@dataclass(frozen=True, kw_only=True)
class BaseRequest:
    """How to identify a base, from the command line and the profile."""

    ref: Ref
    platform: str | None = None
    python: str | None = None
    site_packages: str | None = None
    pins: Mapping[str, str]
    tracked: tuple[str, ...] = TRACKED
    index: PackageIndex
    #: whether an image by name is in a Docker Engine; None: if one responds, unless its registry is
    #: meant
    in_engine: bool | None = None
    #: known facts of an image's lowest layers, given all its layers, bottom first
    facts_of: FactsOf = no_facts
    #: whether reads of an image in a registry or layout are recorded (``Rootfs.notes``)
    noting: bool = False
