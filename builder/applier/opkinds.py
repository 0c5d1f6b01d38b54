"""What a layer changes: one class for each kind of op, read from a rendered layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from builder.applier.failures import EXIT_USAGE, ApplyError
from builder.applier.versions import all_match

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The package versions that an op is for: every one where it says none.
When = Mapping[str, str]


class _Subject:
    #: the field that says what an op is about
    about: ClassVar[str] = "file"

    @property
    def subject(self) -> str:
        """What it is about, in a word."""
        return str(getattr(self, self.about))


@dataclass(frozen=True)
class Replace(_Subject):
    """Old text for new text, an exact number of times."""

    kind: ClassVar[str] = "replace"

    file: str
    old: str
    new: str
    count: int = 1
    when: When = field(default_factory=dict)


@dataclass(frozen=True)
class Diff(_Subject):
    """A unified diff; of a pull request, ``file`` is the request and ``pull`` its source."""

    kind: ClassVar[str] = "diff"

    diff: str
    file: str = ""
    pull: Mapping[str, Any] = field(default_factory=dict)
    when: When = field(default_factory=dict)


@dataclass(frozen=True)
class Graft(_Subject):
    """Definitions of a released wheel's file; ``donor`` is ``DISTRIBUTION==VERSION``."""

    kind: ClassVar[str] = "graft"

    file: str
    donor: str
    member: str = ""
    names: Sequence[str] = ()
    after: str | None = None
    replace: bool = False
    whole: bool = False
    when: When = field(default_factory=dict)

    @property
    def donor_file(self) -> str:
        """The file in the wheel."""
        return self.member or self.file


@dataclass(frozen=True)
class Copy(_Subject):
    """A new file; ``data`` is base64."""

    kind: ClassVar[str] = "copy"
    about: ClassVar[str] = "to"

    to: str
    data: str
    when: When = field(default_factory=dict)


@dataclass(frozen=True)
class Wheel(_Subject):
    """A distribution, at a version or at that of another distribution (``version_of``)."""

    kind: ClassVar[str] = "wheel"
    about: ClassVar[str] = "distribution"

    distribution: str
    version: str = ""
    version_of: str = ""
    when: When = field(default_factory=dict)


@dataclass(frozen=True)
class Remove(_Subject):
    """A distribution that goes away, unless its version is in a range."""

    kind: ClassVar[str] = "remove"
    about: ClassVar[str] = "distribution"

    distribution: str
    unless: str | None = None
    when: When = field(default_factory=dict)


@dataclass(frozen=True)
class Env(_Subject):
    """An environment variable, and the file that reads it."""

    kind: ClassVar[str] = "env"
    about: ClassVar[str] = "name"

    name: str
    value: str
    reader: str = "vllm/envs.py"
    when: When = field(default_factory=dict)


@dataclass(frozen=True)
class Hook(_Subject):
    """A function from a file's text to its new text; ``source`` is the module that has it."""

    kind: ClassVar[str] = "hook"

    file: str
    source: str
    function: str
    when: When = field(default_factory=dict)


@dataclass(frozen=True)
class Compile(_Subject):
    """A change to compiled code: one known by name (``change``), or what a pull request has.

    Without ``source`` no stage can compile it.
    """

    kind: ClassVar[str] = "compile"

    source: str = ""
    arch: str = ""
    #: of a known change: its text, and the kernels whose machine code tells its state
    change: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
    #: of a pull request: the request, the layer's name, the diff, and where that is from
    file: str = ""
    name: str = ""
    diff: str = ""
    files: Sequence[str] = ()
    reason: str = "this layer changes compiled code"
    pull: Mapping[str, Any] = field(default_factory=dict)
    when: When = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """What it is about, in a word."""
        return self.file or self.change_name

    @property
    def change_name(self) -> str:
        """What its change is called."""
        return str(self.change["name"]) if self.change else self.name


@dataclass(frozen=True)
class Pull(_Subject):
    """A pull request; it is turned into other ops before a layer is judged."""

    kind: ClassVar[str] = "pull"
    about: ClassVar[str] = "pull"

    pull: str
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    map: Mapping[str, str] | None = None
    when: When = field(default_factory=dict)


FORMS = {
    form.kind: form
    for form in (Replace, Diff, Graft, Copy, Wheel, Remove, Env, Hook, Compile, Pull)
}
#: Fields whose key in a rendered op is another word.
_KEYS = {"when": "if", "version_of": "version-of", "donor": "from"}

if TYPE_CHECKING:
    Op = Replace | Diff | Graft | Copy | Wheel | Remove | Env | Hook | Compile | Pull


def read_op(raw: Mapping[str, Any]) -> Op:
    """An op of a rendered layer; keys that decide nothing are dropped.

    Raises:
        ApplyError: its kind is not known, or it lacks something.
    """
    form = FORMS.get(raw.get("op", ""))
    if form is None:
        raise ApplyError(
            f"unknown op {raw.get('op')!r} (known: {', '.join(FORMS)}): the layer comes from "
            "another version of spark-build",
            EXIT_USAGE,
        )
    values: dict[str, Any] = {}
    for one in fields(form):
        key = _KEYS.get(one.name, one.name)
        if key in raw:
            values[one.name] = raw[key]
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ApplyError(f"op {form.kind}: {key!r} is missing", EXIT_USAGE)
    made: Op = form(**values)
    return made


def ops_of(variant: Mapping[str, Any]) -> list[Op]:
    """The ops of a variant, in order."""
    return [read_op(raw) for raw in variant["ops"]]


def counts(op: Op, packages: Mapping[str, str]) -> bool:
    """Whether an op is for a base with these packages."""
    return all_match(op.when, packages)
