"""A rendered layer (a ``layer.toml`` as JSON with all files inlined), and its pins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from builder.applier.digests import Sha256, canonical_json, sha256_hex
from builder.applier.opkinds import read_op
from builder.applier.targets import checked_path
from builder.applier.values import part, read_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.applier.opkinds import Op

#: A layer as JSON: what its digest is of, and what images and mods carry.
Rendered = Mapping[str, Any]


@dataclass(frozen=True)
class InputPin:
    """A wheel that goes into a base, by its sha256."""

    distribution: str
    version: str
    filename: str
    sha256: Sha256


@dataclass(frozen=True)
class WheelPin(InputPin):
    """A wheel on a package index, with its OCI platform and CPython tag.

    ``record_sha256`` is that of its RECORD, which files read by range are held against; a rendered
    layer lacks it, because the wheel's sha256 covers it.
    """

    size: int
    platform: str
    python: str
    record_sha256: Sha256 = ""


@dataclass(frozen=True)
class DonorPin(InputPin):
    """A file of a wheel."""

    member: str
    member_sha256: Sha256


@dataclass(frozen=True)
class CodePin:
    """How SM121 runs the kernels of a `compile` op in a released extension module."""

    version: str
    platform: str
    module: str
    sha256: Sha256
    how: str
    arch: str = ""
    guard: str = ""


@dataclass(frozen=True)
class Pins:
    """The pinned inputs of a layer; pins of pull requests are read by the forge package.

    A pin with an unknown key is refused, because its meaning is unknown.
    """

    wheel: Sequence[WheelPin] = field(default=(), metadata=part(WheelPin, strict=True))
    donor: Sequence[DonorPin] = field(default=(), metadata=part(DonorPin, strict=True))
    code: Sequence[CodePin] = field(default=(), metadata=part(CodePin))
    pull: Sequence[Mapping[str, object]] = field(default=(), metadata=part(lambda row, _: row))


@dataclass(frozen=True)
class Clause:
    """A file of a tree, and one test of it."""

    file: str
    contains: str | None = None
    lacks: str | None = None
    missing: bool = False


def _read_clause(raw: object, where: str) -> Clause:
    clause: Clause = read_value(Clause, raw, where)
    checked_path(clause.file, where)
    return clause


@dataclass(frozen=True)
class KnownRange:
    """Bases of which a layer knows more than their text says: from which release, and why."""

    when: Mapping[str, str]
    reason: str
    since: str | None = None
    probe: Sequence[Clause] = field(default=(), metadata=part(_read_clause))


@dataclass(frozen=True)
class Variant:
    """The form that a layer takes for one range of versions."""

    name: str
    when: Mapping[str, str]
    ops: Sequence[Op] = field(metadata=part(read_op))
    notes: Sequence[str] = ()
    serve_flags: Sequence[str] = ()
    moe_serve_flags: Sequence[str] = ()


@dataclass(frozen=True)
class Layer:
    """A layer; `rendered` is the JSON that it was read from."""

    name: str
    package: str
    order: int
    variants: Sequence[Variant] = field(metadata=part(Variant))
    summary: str = ""
    after: Sequence[str] = ()
    provenance: Mapping[str, object] = field(default_factory=dict)
    #: ranges in which a base may have the change in its own form, or has no use for it
    upstream: Sequence[KnownRange] = field(default=(), metadata=part(KnownRange))
    not_applicable: Sequence[KnownRange] = field(default=(), metadata=part(KnownRange))
    pins: Pins = field(default_factory=Pins, metadata=part(Pins))
    #: layers of one series may change the same text, one after another
    series: str | None = None
    #: where the change is merged, and may have been edited since
    merged: KnownRange | None = field(default=None, metadata=part(KnownRange))
    rendered: Rendered = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def read(cls, rendered: Rendered) -> Layer:
        """A layer out of its JSON.

        Raises:
            ApplyError: something is missing or of another type, or a kind of op is not known.
        """
        name = rendered.get("name") if isinstance(rendered, Mapping) else rendered
        made: Layer = replace(read_value(cls, rendered, f"layer {name}"), rendered=rendered)
        return made

    @cached_property
    def digest(self) -> str:
        """The identity of the layer."""
        return sha256_hex(canonical_json(self.rendered))

    @property
    def ops(self) -> Iterator[Op]:
        """The ops of all variants."""
        return (op for variant in self.variants for op in variant.ops)
