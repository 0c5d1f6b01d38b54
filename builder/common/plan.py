"""A plan, and the values that it consists of, with their JSON forms.  No I/O.

A plan is printed as JSON, and stored in images.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import msgspec
from msgspec import Meta

from builder.applier.states import NEEDED, Target
from builder.applier.values import canonical_json, sha256_hex
from builder.common.document import Count, Digest, Document, Part, Sha256, Text, always, plain, read
from builder.common.reference import LAYOUT, base_kind
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.applier.receipts import Receipt
    from builder.applier.states import Outcome
    from builder.applier.trees import Changes


# --------------------------------------------------------------------------------------- platforms

#: One table for architecture names: OCI architecture -> uname machine.
_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}
#: Architecture -> spellings of its default variant.
_DEFAULTS = {"arm64": ("v8", "8", "v8.0"), "amd64": ("v1",)}
_ALIASES = {"aarch64": "arm64", "x86_64": "amd64", "x86-64": "amd64", "arm64v8": "arm64"}


def is_default(architecture: str, variant: str) -> bool:
    """Whether a variant is the architecture's default."""
    return variant in _DEFAULTS.get(architecture, ())


def usual_architecture(name: str) -> str:
    """An architecture as runtimes read it: ``aarch64`` and ``ARM64`` are ``arm64``."""
    return _ALIASES.get(name.lower(), name.lower())


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The platform of an image: an OCI platform and a CPython tag (``cp312``)."""

    architecture: str = "arm64"
    python: str = "cp312"

    @classmethod
    def parse(cls, text: str, python: str = "3.12") -> Platform:
        """From ``linux/arm64``, ``linux/arm64/v8`` (or a machine name) and ``3.12`` (or ``cp312``).

        Raises:
            UsageError: vLLM has no wheels for the platform.
        """
        name, _, variant = text.removeprefix("linux/").partition("/")
        architecture = _ALIASES.get(name, name)
        if architecture not in _MACHINES:
            raise UsageError(f"platform {text!r} is not linux/arm64 or linux/amd64")
        if variant and not is_default(architecture, variant):
            raise UsageError(
                f"platform {text!r}: variant {variant} of {architecture} is not supported; "
                f"runtimes on a DGX Spark request linux/arm64 (NAME@sha256:... selects any image)",
                hint=f"--platform linux/{architecture}",
            )
        digits = re.fullmatch(r"(?:cp)?(\d)\.?(\d+)", python)
        if not digits:
            raise UsageError(f"python {python!r} is not of the form 3.12")
        return cls(architecture=architecture, python=f"cp{digits[1]}{digits[2]}")

    @property
    def oci(self) -> str:
        """``linux/arm64``."""
        return f"linux/{self.architecture}"

    @property
    def machine(self) -> str:
        """``aarch64``, as in uname and wheel tags."""
        return _MACHINES[self.architecture]

    @property
    def python_version(self) -> tuple[int, int]:
        """``(3, 12)``."""
        return int(self.python[2]), int(self.python[3:])

    @property
    def target(self) -> Target:
        """The same for the applier."""
        return Target(self.oci, self.python)


# ----------------------------------------------------------------------------------- pull requests

Commit = Annotated[str, Meta(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$(?!\n)")]
Day = Annotated[str, Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$(?!\n)")]


#: The state of a hunk in a file.
HunkState = Literal["pre", "post", "drift", "ambiguous"]


class Pin(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pull request, or a commit (without a number), fixed by its commits and its diff's sha256.

    The diff is from ``base`` to ``commit``, in normal form (:mod:`builder.common.diffs`).
    Empty fields are omitted.
    """

    base: Annotated[Commit, Meta(description="the commit that the change was made from")]
    commit: Annotated[Commit, Meta(description="its head, or the commit that was named")]
    date: Annotated[Day, Meta(description="day of that commit")]
    forge: Annotated[Text, Meta(description="the forge's host")]
    merge_commit: Commit = ""
    merged_at: Day = ""
    number: Annotated[int, Meta(ge=1)] = 0
    release: Annotated[Text, Meta(description="the first release of the package that has it")] = ""
    repository: Annotated[Text, Meta(description="OWNER/REPO on the forge")]
    request: Annotated[
        Text,
        Meta(description="as requested: OWNER/REPO#NUMBER[@COMMIT], or OWNER/REPO@COMMIT"),
    ]
    sha256: Sha256
    size: Annotated[int, Meta(ge=1, description="bytes of the diff in normal form")]
    state: Annotated[str, Meta(pattern=r"^(open|merged|closed|unknown)$(?!\n)")] = ""
    superseded_by: Text = ""
    title: Text = ""
    url: Annotated[str, Meta(pattern=r"^https?://[!-~]+$(?!\n)", description="its page")] = ""

    def __post_init__(self) -> None:
        """Refuse a release that is no version, and a day that is in no calendar.

        Raises:
            ValueError: there is one.
        """
        for day in filter(None, (self.date, self.merged_at)):
            datetime.date.fromisoformat(day)
        if self.release:
            from packaging.version import Version  # the schema of a plan needs none

            Version(self.release)

    @property
    def short(self) -> str:
        """The abbreviated commit."""
        return self.commit[:12]


def read_pin(value: object, where: str) -> Pin:
    """Read a pin from a lock or ``pins.toml``.

    Raises:
        UsageError: a field is missing or malformed.
    """
    try:
        return read(value, Pin)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


class PatchedFile(Part, frozen=True, kw_only=True):
    """A file that a pull request changes, with the state of its hunks."""

    path: Annotated[Text, Meta(description="below site-packages")]
    change: Literal["edit", "new", "delete", "rename", "mode"]
    hunks: Annotated[
        tuple[HunkState, ...],
        Meta(
            description="what each finds: its text from before, from after, neither, "
            "or more than one"
        ),
    ]
    offsets: Annotated[
        tuple[int, ...],
        Meta(description="lines between the position in the diff and the actual one"),
    ]


class DroppedFile(Part, frozen=True, kw_only=True):
    """A changed file that is not installed."""

    path: Text
    why: Text


class Conflict(Part, frozen=True, kw_only=True):
    """A hunk that does not match: the expected text, and the nearest one."""

    path: Text
    hunk: Annotated[int, Meta(ge=1, description="from 1")]
    line: Annotated[
        Count, Meta(description="its line according to the diff, from 1; 0 without one")
    ]
    why: Text
    expected: tuple[str, ...] = always(())
    found_line: Annotated[
        Count, Meta(description="where the nearest text is, from 1; 0 where nothing is near")
    ] = always(0)
    found: tuple[str, ...] = always(())
    history: Annotated[str, Meta(description="the releases that it would fit, in words")] = always(
        ""
    )


class PullReport(Pin, frozen=True, kw_only=True):
    """A pull request of a plan and its state, which can change while the image does not."""

    layer: Text
    in_base: Annotated[
        Literal["whole", "part", "no"], Meta(description="how much of it the base already has")
    ]
    installed: tuple[PatchedFile, ...]
    compiled: Annotated[tuple[Text, ...], Meta(description="files that reach a wheel compiled")]
    dropped: tuple[DroppedFile, ...]
    conflicts: tuple[Conflict, ...]
    hints: tuple[Text, ...]


class PinnedPull(Part, frozen=True, kw_only=True):
    """A layer's pull request."""

    pinned: Pin
    today: Annotated[Pin | None, Meta(description="with --refresh: as the forge has it")] = None


# ----------------------------------------------------------------------------------- compiled code


class Input(Part, frozen=True, kw_only=True):
    """A pinned wheel or archive, or a file of one."""

    distribution: Text
    version: Text
    filename: Text
    sha256: Sha256
    size: Count | None = None
    platform: Text | None = None
    python: Text | None = None
    member: Text | None = None
    member_sha256: Sha256 | None = msgspec.field(default=None, name="member-sha256")


class PinnedWheel(Part, frozen=True, kw_only=True):
    """A wheel by its sha256."""

    filename: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+!-]{0,195}\.whl$(?!\n)")]
    sha256: Sha256


class CompiledWheel(Part, frozen=True, kw_only=True):
    """The wheel of a compile stage."""

    filename: Text
    sha256: Sha256


class MachineCode(Part, frozen=True, kw_only=True):
    """Facts about the base's machine code."""

    module: Annotated[str, Meta(description="empty where the base has no compiled module")]
    sha256: str
    how: Literal["runs", "trap", "not-loadable", "absent", "no-code"]
    arch: str | None = None
    guard: Annotated[
        str | None,
        Meta(description="part of the kernels' names that shows the supported chips"),
    ] = None


class SourceFile(Part, frozen=True, kw_only=True):
    """A source file that changes; null means that it does not exist before or after."""

    path: Text
    before: Sha256 | None
    after: Sha256 | None


class SourceUnit(Part, frozen=True, kw_only=True):
    """A translation unit that is compiled."""

    path: Text
    extension: Text
    gencode: tuple[Text, ...]


class ToolkitImage(Part, frozen=True, kw_only=True):
    """The image that a stage compiles in."""

    image: Text
    digest: Digest


class CompiledPull(Part, frozen=True, kw_only=True):
    """A compiled pull request."""

    request: Text
    repository: Text
    number: Count
    commit: Text
    sha256: Sha256


class StageRequest(Part, frozen=True, kw_only=True):
    """The inputs of a compile stage."""

    change: Annotated[
        Text,
        Meta(
            description="what is changed, by name; several that are compiled together are "
            "joined by '-'"
        ),
    ]
    arch: Text
    platform: Text
    vllm: Text
    torch: Annotated[Text, Meta(description="of the base; headers come from the same release")]
    module: Annotated[
        Sha256,
        Meta(description="the extension that the compiled code extends and is checked against"),
    ]
    compilers: Annotated[
        dict[str, str],
        Meta(
            description="versions by name: nvcc, and the host's compiler",
            extra_json_schema={"required": ["nvcc"]},
        ),
    ]
    operators: Annotated[
        tuple[Text, ...],
        Meta(min_length=1, description="torch operators that are registered again"),
    ]
    files: tuple[SourceFile, ...]
    units: Annotated[
        tuple[SourceUnit, ...],
        Meta(
            min_length=1,
            description="those that change, and those between them and the operators",
        ),
    ]
    inputs: Annotated[
        tuple[Input, ...],
        Meta(description="the source archive, and the wheels that headers are taken from"),
    ]
    toolkit: Annotated[ToolkitImage | None, Meta(description="absent if this machine compiles")] = (
        None
    )
    pulls: Annotated[
        tuple[CompiledPull, ...] | None,
        Meta(description="by commit and the sha256 of the diff"),
    ] = None


class FoundSources(Part, frozen=True, kw_only=True):
    """The state of a pull request's change in the release's source archive."""

    change: Text
    filename: Annotated[Text, Meta(description="the archive")]
    sha256: Sha256
    found: Literal["to-compile", "there", "nothing", "conflict", "not-compiled"]
    unreached: Annotated[
        tuple[Text, ...] | None,
        Meta(description="changed files without effect: no unit is compiled from them"),
    ] = None


class CompiledCode(Part, frozen=True, kw_only=True):
    """Compiled code of a layer: the base's, and the compile stage for a change."""

    code: MachineCode | None = None
    wheel: Annotated[
        CompiledWheel | None, Meta(description="the output of the stage; null before it has run")
    ]
    carrier: Annotated[
        Text | None,
        Meta(description="the layer whose extension wheel includes this layer's change too"),
    ] = msgspec.field(default=None, name="with")
    stage: StageRequest | None = None
    sources: FoundSources | None = None


# ---------------------------------------------------------------------------------- a plan as JSON

#: The state of a layer on a base.
State = Literal[
    "needed", "applied", "upstream", "not-applicable", "needs-rebuild", "drift", "ambiguous"
]


class PlannedBase(Part, frozen=True, kw_only=True):
    """The pinned base."""

    kind: Text
    ref: Text
    digest: Digest
    platform: Annotated[str, Meta(pattern="^linux/")]
    python: Annotated[str, Meta(pattern=r"^3\.\d+$(?!\n)")]
    site_packages: Annotated[str, Meta(pattern="^/")]
    interpreter: Text
    packages: Annotated[
        dict[str, Text], Meta(description="versions by normalised distribution name")
    ]
    wheels: tuple[PinnedWheel, ...] = ()


class PlannedFile(Part, frozen=True, kw_only=True):
    """A file that a layer changes."""

    path: Annotated[str, Meta(pattern="^[^/]", description="below site-packages")]
    before: Annotated[Sha256 | None, Meta(description="null: the file is new")]
    after: Annotated[Sha256 | None, Meta(description="null: the file is removed")]
    size: Annotated[Count, Meta(description="bytes afterwards")]


class PlannedLayer(Part, frozen=True, kw_only=True):
    """A layer and its state."""

    name: Text
    state: State
    reason: Text
    variant: str | None
    digest: Annotated[Sha256, Meta(description="of the rendered layer")]
    files: tuple[PlannedFile, ...]
    since: Annotated[Text | None, Meta(description="the release that has the fix")] = None
    compile: CompiledCode | None = None
    notes: tuple[Text, ...] = ()
    inputs: Annotated[
        tuple[Input, ...], Meta(description="pinned wheels and files out of wheels")
    ] = ()
    env: dict[str, str] = msgspec.field(default_factory=dict)
    serve_flags: tuple[Text, ...] = ()
    moe_serve_flags: tuple[Text, ...] = ()


class ExpectedChoice(Part, frozen=True, kw_only=True):
    """What vLLM must do with a kind of layer."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "oneOf": [{"required": ["line"]}, {"required": ["selected"]}, {"required": ["refused"]}]
    }

    kind: Text
    line: Annotated[Text | None, Meta(description="part of a log line")] = None
    selected: Annotated[
        Text | None, Meta(description="pattern for vLLM's name of what it selects")
    ] = None
    refused: Annotated[
        Text | None, Meta(description="part of the message with which vLLM refuses")
    ] = None

    def __post_init__(self) -> None:
        """Refuse an expectation with none or several results.

        Raises:
            ValueError: it has none or several.
        """
        if sum(bool(word) for word in (self.line, self.selected, self.refused)) != 1:
            raise ValueError(f"{self.kind} must have one of line, selected and refused")


class ImageInputs(Part, frozen=True, kw_only=True):
    """What an image's bytes depend on, besides base and layers."""

    version: Annotated[Text, Meta(description="version of spark-build that makes the image")]
    files: Annotated[Digest, Meta(description="of the files that it adds to every image")]
    epoch: Annotated[
        Count, Meta(description="time of every file and of the image: seconds since 1970")
    ]
    single_layer: Annotated[bool, Meta(description="everything that is added is one layer")]


class PlanDocument(Document, frozen=True, kw_only=True):
    """A plan: the state of each layer on a base."""

    schema: Literal[2] = always(2)  # type: ignore[assignment]
    plan_digest: Digest
    name: Annotated[Text, Meta(description="a short name for tags")]
    profiles: tuple[Text, ...]
    base: PlannedBase
    layers: Annotated[tuple[PlannedLayer, ...], Meta(description="in order of application")]
    env: Annotated[dict[str, str], Meta(description="variables that the image sets")]
    serve_flags: Annotated[tuple[Text, ...], Meta(description="`vllm serve` flags of the profile")]
    moe_serve_flags: Annotated[
        tuple[Text, ...], Meta(description="flags for MoE models that its kernels support")
    ]
    expect: Annotated[tuple[ExpectedChoice, ...], Meta(description="what vLLM must log on SM121")]
    build: ImageInputs
    hints: Annotated[tuple[Text, ...], Meta(description="for readers; not part of the digest")]
    pulls: tuple[PullReport, ...] = ()


class BakedPlan(PlanDocument, frozen=True, kw_only=True):
    """A plan in an image; older ones lack the build inputs."""

    schema: Literal[1, 2]  # type: ignore[assignment]
    name: Text = ""
    profiles: tuple[Text, ...] = ()
    build: ImageInputs | None = None  # type: ignore[assignment]
    hints: tuple[Text, ...] = ()


class AppliedPlan(PlanDocument, frozen=True, kw_only=True):
    """A plan for a directory, and whether it was applied."""

    directory: Annotated[str, Meta(pattern="^/")]
    written: Annotated[bool, Meta(description="false with --dry-run")]


# ----------------------------------------------------------------------------------- a pinned base


@dataclass(frozen=True, kw_only=True)
class BaseIdentity:
    """A pinned base: everything that a plan may depend on.

    ``digest`` identifies the content: an image's manifest or config digest, or the sha256 over
    the wheels' file names and hashes.  ``site_packages`` is absolute inside the image.
    """

    kind: str
    ref: str
    digest: str
    platform: Platform
    site_packages: str
    packages: Mapping[str, str]
    wheels: tuple[PinnedWheel, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    interpreter: str = "python3"
    #: absolute path -> [mode, uid, gid] of folders, except root's with mode 0755
    folders: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: absolute path of a folder that is a symbolic link -> its target
    links: Mapping[str, str] = field(default_factory=dict)
    #: path below site-packages -> [uid, gid] of files not owned by root
    owners: Mapping[str, Sequence[int]] = field(default_factory=dict)
    user: str = ""
    created: str = ""

    @property
    def is_image(self) -> bool:
        """Whether it is an image, to which a build adds layers."""
        return base_kind(self.kind).is_image

    @property
    def is_wheels(self) -> bool:
        """Whether it consists of released wheels, from which a build makes an overlay."""
        return base_kind(self.kind).is_wheels

    @property
    def is_installed(self) -> bool:
        """Whether it is a local environment, which is patched in place."""
        return base_kind(self.kind).is_installed

    @property
    def in_layout(self) -> bool:
        """Whether it is an image in an OCI layout."""
        return self.is_image and self.ref.partition(":")[0] == "oci"

    @property
    def name(self) -> str:
        """``ref`` as recorded in images, without a layout's local path."""
        return LAYOUT if self.in_layout else self.ref

    @property
    def document(self) -> PlannedBase:
        """The base as recorded in the plan."""
        return PlannedBase(
            kind=self.kind,
            ref=self.name,
            digest=self.digest,
            platform=self.platform.oci,
            python=".".join(map(str, self.platform.python_version)),
            site_packages=self.site_packages,
            interpreter=self.interpreter,
            packages=dict(sorted(self.packages.items())),
            wheels=self.wheels,
        )


# ---------------------------------------------------------------------------------------- the plan

#: 2: a plan has the spark-build version, the timestamp and the form of the image.
PLAN_SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class LayerDecision:
    """One layer, judged on the tree with the previous layers applied."""

    layer: Layer
    outcome: Outcome
    receipt: Receipt | None
    #: everything that this layer adds to the image, including its receipt
    changes: Changes

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.layer.name

    @property
    def needed(self) -> bool:
        """Whether a build applies the layer."""
        return self.outcome.state == NEEDED

    @property
    def document(self) -> PlannedLayer:
        """The decision as recorded in the plan."""
        outcome = self.outcome
        return PlannedLayer(
            name=self.name,
            state=cast("State", outcome.state),
            reason=outcome.reason,
            variant=outcome.variant,
            digest=self.layer.digest,
            files=tuple(self._files()),
            since=outcome.since or None,
            compile=read(outcome.compiled, CompiledCode) if outcome.compiled else None,
            notes=tuple(outcome.notes),
            inputs=tuple(read(pin, Input) for pin in outcome.inputs),
            env=outcome.env,
            serve_flags=tuple(outcome.serve_flags),
            moe_serve_flags=tuple(outcome.moe_serve_flags),
        )

    @property
    def stage(self) -> StageRequest | None:
        """Its pending compile stage."""
        pending = self.document.compile if self.outcome.pending else None
        return pending.stage if pending else None

    def _files(self) -> Iterator[PlannedFile]:
        for path, entry in self.receipt.files.items() if self.receipt else ():
            content = self.changes.get(path)
            size = 0 if content is None else content.size
            yield PlannedFile(path=path, before=entry.before, after=entry.after, size=size)


@dataclass(frozen=True, kw_only=True)
class Maker:
    """The version of spark-build, and the digest of what it adds to every image."""

    version: str
    files: str


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """Everything that decides an image.  Its canonical JSON is the plan, the sha256 its digest."""

    name: str
    profiles: tuple[str, ...]
    base: BaseIdentity
    decisions: tuple[LayerDecision, ...]
    expect: tuple[ExpectedChoice, ...]
    maker: Maker
    #: seconds since 1970, for every file and for the image
    epoch: int
    #: add all files in one image layer
    single_layer: bool = False
    #: layers that mend defects of the kernels, and select none; not part of the image
    mends: frozenset[str] = frozenset()
    #: messages; not part of the image
    hints: tuple[str, ...] = ()
    #: reports on pull requests; not part of the image
    pulls: tuple[PullReport, ...] = ()

    @property
    def needed(self) -> list[LayerDecision]:
        """Layers that a build applies, in order."""
        return [d for d in self.decisions if d.needed]

    @property
    def pending(self) -> list[LayerDecision]:
        """Layers with a pending compile stage, whose result a build needs."""
        return [d for d in self.decisions if d.outcome.pending]

    @property
    def stages(self) -> list[StageRequest]:
        """The pending compile stages."""
        return [decision.stage for decision in self.decisions if decision.stage]

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of the image, from all layers in effect."""
        merged: dict[str, str] = {}
        for decision in self.decisions:
            merged.update(decision.outcome.env)
        return merged

    @property
    def serve_flags(self) -> list[str]:
        """``vllm serve`` flags of the profile."""
        return [f for d in self.decisions for f in d.outcome.serve_flags]

    @property
    def moe_serve_flags(self) -> list[str]:
        """Flags for MoE models that the profile's kernels support."""
        return [f for d in self.decisions for f in d.outcome.moe_serve_flags]

    @property
    def changes(self) -> Changes:
        """Net changes below site-packages."""
        merged: Changes = {}
        for decision in self.needed:
            merged.update(decision.changes)
        return merged

    def body(self) -> dict[str, Any]:
        """The digested part: without local paths, time or host names."""
        return self._body_of(self._undigested)

    def _body_of(self, document: PlanDocument) -> dict[str, Any]:
        value = _body(plain(document))
        if self.base.is_installed:
            for name in ("ref", "site_packages", "interpreter"):
                del value["base"][name]
        return value

    @property
    def digest(self) -> str:
        """``sha256:...`` of the canonical body."""
        return _digest(self.body())

    @property
    def document(self) -> PlanDocument:
        """The plan as it is printed and baked in."""
        body = self._undigested
        return msgspec.structs.replace(body, plan_digest=_digest(self._body_of(body)))

    def as_json(self) -> dict[str, Any]:
        """The same as dictionaries and lists."""
        return plain(self.document)

    @property
    def _undigested(self) -> PlanDocument:
        return PlanDocument(
            plan_digest="",
            name=self.name,
            profiles=self.profiles,
            base=self.base.document,
            layers=tuple(decision.document for decision in self.decisions),
            env=dict(sorted(self.env.items())),
            serve_flags=tuple(self.serve_flags),
            moe_serve_flags=tuple(self.moe_serve_flags),
            expect=self.expect,
            build=ImageInputs(
                version=self.maker.version,
                files=self.maker.files,
                epoch=self.epoch,
                single_layer=self.single_layer,
            ),
            hints=self.hints,
            pulls=self.pulls,
        )


def _body(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a plan's JSON that its digest covers."""
    body = {key: value for key, value in plan.items() if key not in _NOT_DIGESTED}
    return {**body, "layers": [_digested(layer) for layer in plan["layers"]]}


def _digested(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's part of the digest; only the inputs of a compile stage are included.

    The outputs are known only after compiling, and must not change the plan.
    """
    if "stage" not in layer.get("compile", {}):
        return dict(layer)
    stage = {key: value for key, value in layer["compile"].items() if key != "wheel"}
    return {**layer, "files": [], "compile": stage}


#: Keys of a plan's JSON that the digest does not cover.
_NOT_DIGESTED = ("plan_digest", "hints", "pulls")


@dataclass(frozen=True, kw_only=True)
class RecordedPlan:
    """A plan read from an image."""

    document: BakedPlan
    #: its JSON, including keys of newer plans, which the document lacks
    json: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The digest, recomputed from the JSON."""
        return digest_of(self.json)


def digest_of(plan: Mapping[str, Any]) -> str:
    """The digest of a plan, recomputed from its JSON."""
    return _digest(_body(plan))


def _digest(body: Mapping[str, Any]) -> str:
    return f"sha256:{sha256_hex(canonical_json(body))}"


def default_tag(plan: BuildPlan) -> str:
    """``spark-build/<profile>:<vllm>-<plan12>``: the same plan always has the same name."""
    vllm = plan.base.packages.get("vllm", "unknown").replace("+", "-")
    return f"spark-build/{plan.name}:{vllm}-{plan.digest.removeprefix('sha256:')[:12]}"
