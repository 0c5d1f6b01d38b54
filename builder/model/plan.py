"""A plan: the state of each layer, and everything that determines an image. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from builder.applier.digests import canonical_json, sha256_hex
from builder.applier.states import NEEDED
from builder.documents.compiled import CompiledCode, Input
from builder.documents.plan import ImageInputs, PlanDocument, PlannedFile, PlannedLayer
from builder.util.documents import plain, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from builder.applier.layers import Layer
    from builder.applier.outcomes import Outcome
    from builder.applier.receipts import Receipt
    from builder.applier.trees import Changes
    from builder.documents.compiled import StageRequest
    from builder.documents.plan import BakedPlan, ExpectedChoice, State
    from builder.documents.pulls import PullReport
    from builder.model.base import BaseIdentity

#: 2: a plan says by which spark-build, at which time and in what form its image is made.
PLAN_SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class LayerDecision:
    """One layer, judged on the tree as the layers before it leave it."""

    layer: Layer
    outcome: Outcome
    receipt: Receipt | None
    #: everything that this layer adds to the image, its receipt included
    changes: Changes

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.layer.name

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
        """What has yet to be compiled for it."""
        found = self.document.compile if self.outcome.pending else None
        return found.stage if found else None

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
        return [decision.stage for decision in self.decisions if decision.stage]

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


@dataclass(frozen=True, kw_only=True)
class RecordedPlan:
    """A plan as an image carries it."""

    document: BakedPlan
    #: its JSON, with the keys of newer plans, which the document lacks
    json: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The digest that it must have, recomputed from all that is there."""
        return digest_of(self.json)


def digest_of(plan: Mapping[str, Any]) -> str:
    """The digest that a plan must have, recomputed from its JSON."""
    return _digest(_body(plan))


def _digest(body: Mapping[str, Any]) -> str:
    return f"sha256:{sha256_hex(canonical_json(body))}"
