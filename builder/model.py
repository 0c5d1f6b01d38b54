"""The values that flow through the pipeline.  All are immutable; none does I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec

from builder.applier.digests import canonical_json, sha256_hex
from builder.applier.outcomes import Outcome, Target, layer_digest
from builder.applier.states import NEEDED
from builder.basekinds import base_kind
from builder.documents.compiled import Input, StageRequest
from builder.documents.plan import ImageInputs, PlanDocument, PlannedBase, PlannedFile, PlannedLayer
from builder.errors import UsageError
from builder.util.documents import plain, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from builder.applier.receipts import Receipt
    from builder.applier.trees import Changes
    from builder.documents.compiled import CompiledCode, PinnedWheel
    from builder.documents.plan import ExpectedChoice, State
    from builder.documents.pulls import PullReport

#: 2: a plan says by which spark-build, at which time and in what form its image is made.
PLAN_SCHEMA = 2
#: What images call a base that was a layout on somebody's disk.
LAYOUT = "oci:layout"

#: One table for architecture names: OCI architecture -> uname machine.
_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}
#: Architecture -> the variants that its bare name stands for, in the forms that are written.
_DEFAULTS = {"arm64": ("v8", "8", "v8.0"), "amd64": ("v1",)}
_ALIASES = {"aarch64": "arm64", "x86_64": "amd64", "x86-64": "amd64", "arm64v8": "arm64"}


def is_default(architecture: str, variant: str) -> bool:
    """Whether a variant adds nothing to the architecture."""
    return variant in _DEFAULTS.get(architecture, ())


@dataclass(frozen=True, kw_only=True)
class Platform:
    """What the image runs on: an OCI platform and a CPython tag (``cp312``)."""

    architecture: str = "arm64"
    python: str = "cp312"

    @classmethod
    def parse(cls, text: str, python: str = "3.12") -> Platform:
        """From ``linux/arm64``, ``linux/arm64/v8`` (or a machine name) and ``3.12`` (or ``cp312``).

        Raises:
            UsageError: the platform is not one that vLLM has wheels for.
        """
        name, _, variant = text.removeprefix("linux/").partition("/")
        architecture = _ALIASES.get(name, name)
        if architecture not in _MACHINES:
            raise UsageError(f"platform {text!r} is not linux/arm64 or linux/amd64")
        if variant and not is_default(architecture, variant):
            raise UsageError(
                f"platform {text!r}: of {architecture}, variant {variant} is not supported; "
                f"runtimes on a DGX Spark ask for linux/arm64",
                hint=f"--platform linux/{architecture}, or an image by its digest: NAME@sha256:...",
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
        """``aarch64``, as uname and wheel tags say it."""
        return _MACHINES[self.architecture]

    @property
    def python_version(self) -> tuple[int, int]:
        """``(3, 12)``."""
        return int(self.python[2]), int(self.python[3:])

    @property
    def target(self) -> Target:
        """The same for the applier."""
        return Target(self.oci, self.python)


@dataclass(frozen=True, kw_only=True)
class BaseIdentity:
    """What is patched, pinned: everything that a plan may depend on.

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
    #: absolute path -> [mode, uid, gid] of folders that are not root's with mode 0755
    folders: Mapping[str, Any] = field(default_factory=dict)
    #: absolute path of a folder that is a link -> where it leads
    links: Mapping[str, str] = field(default_factory=dict)
    #: path below site-packages -> [uid, gid] of files that are not root's
    owners: Mapping[str, Any] = field(default_factory=dict)
    user: str = ""
    created: str = ""

    @property
    def is_image(self) -> bool:
        """Whether it is an image, which a build puts layers on."""
        return base_kind(self.kind).is_image

    @property
    def is_wheels(self) -> bool:
        """Whether it is released wheels, of which a build makes an overlay."""
        return base_kind(self.kind).is_wheels

    @property
    def is_installed(self) -> bool:
        """Whether it is an environment of this machine, which is patched in place."""
        return base_kind(self.kind).is_installed

    @property
    def name(self) -> str:
        """``ref`` as images carry it: a layout's place on some disk says nothing elsewhere."""
        return LAYOUT if self.ref.startswith("oci:") else self.ref

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


@dataclass(frozen=True, kw_only=True)
class LayerDecision:
    """One layer, judged on the tree as the layers before it leave it."""

    layer: Mapping[str, Any]
    outcome: Outcome
    receipt: Receipt | None
    #: everything that this layer adds to the image, its receipt included
    changes: Changes

    @property
    def name(self) -> str:
        """The layer's name."""
        return str(self.layer["name"])

    @property
    def needed(self) -> bool:
        """Whether a build applies it."""
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
            digest=layer_digest(self.layer),
            files=tuple(self._files()),
            since=outcome.since or None,
            # JSON already; what stands in for a stage while a target is verified is part of one
            compile=cast("CompiledCode", outcome.compiled) if outcome.compiled else None,
            notes=tuple(outcome.notes),
            inputs=tuple(read(pin, Input) for pin in outcome.inputs),
            env=outcome.env,
            serve_flags=tuple(outcome.serve_flags),
            moe_serve_flags=tuple(outcome.moe_serve_flags),
        )

    def _files(self) -> Iterator[PlannedFile]:
        for path, entry in self.receipt["files"].items() if self.receipt else ():
            content = self.changes.get(path)
            size = 0 if content is None else content.size
            yield PlannedFile(path=path, before=entry["before"], after=entry["after"], size=size)


@dataclass(frozen=True, kw_only=True)
class Maker:
    """A spark-build: its version, and the digest of what it puts into every image."""

    version: str
    files: str


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """Everything that decides an image.  Its canonical JSON is the plan; its sha256 the digest."""

    name: str
    profiles: tuple[str, ...]
    base: BaseIdentity
    decisions: tuple[LayerDecision, ...]
    expect: tuple[ExpectedChoice, ...]
    maker: Maker
    #: seconds since 1970, for every file and for the image
    epoch: int
    #: all that is added in one layer of the image
    single_layer: bool = False
    #: for people; no part of the image
    hints: tuple[str, ...] = ()
    #: reports on pull requests; no part of the image either
    pulls: tuple[PullReport, ...] = ()

    @property
    def needed(self) -> list[LayerDecision]:
        """Layers that a build applies, in order."""
        return [d for d in self.decisions if d.needed]

    @property
    def pending(self) -> list[LayerDecision]:
        """Layers whose change has yet to be compiled; a build needs what that makes."""
        return [d for d in self.decisions if d.outcome.pending]

    @property
    def stages(self) -> list[StageRequest]:
        """What has yet to be compiled, one for each pending layer."""
        return [read(d.outcome.compiled["stage"], StageRequest) for d in self.pending]

    @property
    def env(self) -> dict[str, str]:
        """Variables that the image sets, from every layer that stands."""
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
        """What the digest is taken of: no local path, clock or host name."""
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
        made = self._undigested
        return msgspec.structs.replace(made, plan_digest=_digest(self._body_of(made)))

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
    """What of a plan's JSON its digest is taken of."""
    body = {key: value for key, value in plan.items() if key not in _NOT_DIGESTED}
    return {**body, "layers": [_digested(layer) for layer in plan["layers"]]}


def _digested(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's part of the digest: of a compile stage what goes in, as for the whole plan.

    What comes out is known only when it has been compiled, and the plan is the same before.
    """
    if "stage" not in layer.get("compile", {}):
        return dict(layer)
    stage = {key: value for key, value in layer["compile"].items() if key != "wheel"}
    return {**layer, "files": [], "compile": stage}


#: What a plan's JSON holds beside that which its digest is taken of.
_NOT_DIGESTED = ("plan_digest", "hints", "pulls")


def digest_of(plan: Mapping[str, Any]) -> str:
    """The digest that a baked plan must have, recomputed from its JSON."""
    return _digest(_body(plan))


def _digest(body: Mapping[str, Any]) -> str:
    return f"sha256:{sha256_hex(canonical_json(body))}"
