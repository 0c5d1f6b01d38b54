"""A rendered layer (a ``layer.toml`` as JSON with all files inlined): its ops and its pins."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from builder.applier.values import (
    EXIT_USAGE,
    ApplyError,
    Sha256,
    all_match,
    canonical_json,
    checked_path,
    part,
    read_value,
    sha256_hex,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def _when() -> Mapping[str, str]:
    """The package versions of an op; empty means all."""
    mapping: Mapping[str, str] = field(default_factory=dict, metadata={"key": "if"})
    return mapping


class _Subject:
    #: the field with an op's subject
    about: ClassVar[str] = "file"
    #: the fields with paths below site-packages
    paths: ClassVar[Sequence[str]] = ()

    @property
    def subject(self) -> str:
        """Its subject for messages."""
        return str(getattr(self, self.about))


@dataclass(frozen=True)
class PullSource:
    """The source of a pull request's diff; a commit has no number."""

    repository: str
    number: int
    commit: str
    sha256: str


@dataclass(frozen=True)
class TextChange:
    """A text replacement in some source files; ``files`` are suffixes of their paths."""

    name: str
    files: Sequence[str]
    old: str
    new: str
    guard: str
    applied_upstream: str


@dataclass(frozen=True)
class Kernels:
    """Kernels of extension modules, by a regular expression of their mangled names.

    ``guards``: part of a kernel's name -> prefix of the architectures that it supports.
    """

    name: str
    modules: Sequence[str]
    symbol: str
    guards: Mapping[str, str]


#: Characters of a pattern; ``fnmatch`` and ``re`` take the square of the length for some.
_PATTERN = 300
_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")


def _read_kernels(raw: object, where: str) -> Kernels:
    kernels: Kernels = read_value(Kernels, raw, where)
    for pattern in kernels.modules:
        checked_path(pattern, where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a form that may change its meaning
            re.compile(kernels.symbol[: _PATTERN + 1])
    except (re.error, RecursionError, OverflowError) as error:
        raise ApplyError(
            f"{where}: 'symbol' is no regular expression: {error}", EXIT_USAGE
        ) from None
    if len(kernels.symbol) > _PATTERN:
        raise ApplyError(f"{where}: 'symbol' has more than {_PATTERN} characters", EXIT_USAGE)
    return kernels


@dataclass(frozen=True)
class Replace(_Subject):
    """Old text for new text, an exact number of times."""

    kind: ClassVar[str] = "replace"
    paths: ClassVar[Sequence[str]] = ("file",)

    file: str
    old: str
    new: str
    count: int = 1
    when: Mapping[str, str] = _when()


@dataclass(frozen=True)
class Diff(_Subject):
    """A unified diff; for a pull request, ``file`` is the request and ``pull`` its source."""

    kind: ClassVar[str] = "diff"

    diff: str
    file: str = ""
    pull: PullSource | None = field(default=None, metadata=part(PullSource))
    when: Mapping[str, str] = _when()


@dataclass(frozen=True)
class Graft(_Subject):
    """Definitions of a released wheel's file; ``donor`` is ``DISTRIBUTION==VERSION``."""

    kind: ClassVar[str] = "graft"
    paths: ClassVar[Sequence[str]] = ("file", "donor_file")

    file: str
    donor: str = field(metadata={"key": "from"})
    member: str = ""
    names: Sequence[str] = ()
    after: str | None = None
    replace: bool = False
    whole: bool = False
    when: Mapping[str, str] = _when()

    @property
    def donor_file(self) -> str:
        """The file in the wheel."""
        return self.member or self.file


@dataclass(frozen=True)
class Copy(_Subject):
    """A new file; ``data`` is base64."""

    kind: ClassVar[str] = "copy"
    about: ClassVar[str] = "to"
    paths: ClassVar[Sequence[str]] = ("to",)

    to: str
    data: str
    when: Mapping[str, str] = _when()


@dataclass(frozen=True)
class Wheel(_Subject):
    """A distribution, at a version or at that of another distribution (``version_of``)."""

    kind: ClassVar[str] = "wheel"
    about: ClassVar[str] = "distribution"

    distribution: str
    version: str = ""
    version_of: str = ""
    when: Mapping[str, str] = _when()


@dataclass(frozen=True)
class Remove(_Subject):
    """A distribution to remove, unless its version is in a range."""

    kind: ClassVar[str] = "remove"
    about: ClassVar[str] = "distribution"

    distribution: str
    unless: str | None = None
    when: Mapping[str, str] = _when()


@dataclass(frozen=True)
class Env(_Subject):
    """An environment variable, and the file that reads it."""

    kind: ClassVar[str] = "env"
    about: ClassVar[str] = "name"
    paths: ClassVar[Sequence[str]] = ("reader",)

    name: str
    value: str
    reader: str = "vllm/envs.py"
    when: Mapping[str, str] = _when()


@dataclass(frozen=True)
class Hook(_Subject):
    """A function from a file's text to its new text; ``source`` is the module that has it."""

    kind: ClassVar[str] = "hook"
    paths: ClassVar[Sequence[str]] = ("file",)

    file: str
    source: str
    function: str
    when: Mapping[str, str] = _when()


@dataclass(frozen=True)
class Compile(_Subject):
    """A change to compiled code: a built-in one (``change``), or that of a pull request.

    Without ``source`` no stage can compile it.
    """

    kind: ClassVar[str] = "compile"

    source: str = ""
    arch: str = ""
    #: for a built-in change: its text, and the kernels whose machine code shows its state
    change: TextChange | None = field(default=None, metadata=part(TextChange))
    code: Kernels | None = field(default=None, metadata=part(_read_kernels))
    #: for a pull request: the request, the layer's name, the diff, and its source
    file: str = ""
    name: str = ""
    diff: str = ""
    files: Sequence[str] = ()
    reason: str = "this layer changes compiled code"
    pull: PullSource | None = field(default=None, metadata=part(PullSource))
    when: Mapping[str, str] = _when()

    @property
    def subject(self) -> str:
        """Its subject for messages."""
        return self.file or self.change_name

    @property
    def change_name(self) -> str:
        """The name of its change."""
        return self.change.name if self.change else self.name


@dataclass(frozen=True)
class Pull(_Subject):
    """A pull request; it is turned into other ops before a layer is judged."""

    kind: ClassVar[str] = "pull"
    about: ClassVar[str] = "pull"

    pull: str
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    map: Mapping[str, str] | None = None
    #: the repository that this one is a fork of
    project: str = ""
    when: Mapping[str, str] = _when()


FORMS = {
    form.kind: form
    for form in (Replace, Diff, Graft, Copy, Wheel, Remove, Env, Hook, Compile, Pull)
}


def read_op(raw: object, where: str) -> Op:
    """Read an op of a rendered layer; keys without effect are dropped.

    Raises:
        ApplyError: its kind is unknown, a key is missing, or a path is none of a file below
            site-packages.
    """
    kind = raw.get("op") if isinstance(raw, Mapping) else raw
    form = FORMS.get(str(kind))
    if form is None:
        raise ApplyError(
            f"{where}: unknown op {kind!r} (known: {', '.join(FORMS)}): the layer comes from "
            "another version of spark-build",
            EXIT_USAGE,
        )
    op: Op = read_value(form, raw, f"{where}: op {kind}")
    for name in op.paths:
        checked_path(getattr(op, name), f"{where}: op {kind}")
    if isinstance(op, Env) and not _VARIABLE.fullmatch(op.name):
        raise ApplyError(f"{where}: op env: {op.name!r:.100} is no name of a variable", EXIT_USAGE)
    if isinstance(op, Env) and "\0" in op.value:  # every start of Python would print an error
        raise ApplyError(f"{where}: op env: the value of {op.name} has a zero byte", EXIT_USAGE)
    return op


def counts(op: Op, packages: Mapping[str, str]) -> bool:
    """Whether an op applies to a base with these packages."""
    return all_match(op.when, packages)


if TYPE_CHECKING:
    Op = Replace | Diff | Graft | Copy | Wheel | Remove | Env | Hook | Compile | Pull


# ----------------------------------------------------------------------------- a layer and its pins


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
        where = f"layer {name!s:.100}"
        layer: Layer = replace(read_value(cls, rendered, where), rendered=rendered)
        if "/" in checked_path(layer.name, where):  # its receipt has this name
            raise ApplyError(f"{where}: its name has a slash", EXIT_USAGE)
        return layer

    @cached_property
    def digest(self) -> str:
        """The identity of the layer."""
        return sha256_hex(canonical_json(self.rendered))

    @property
    def ops(self) -> Iterator[Op]:
        """The ops of all variants."""
        return (op for variant in self.variants for op in variant.ops)
