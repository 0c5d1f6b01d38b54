"""A plan: the state of each layer, and everything that determines an image. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from builder.applier.digests import canonical_json, sha256_hex
from builder.applier.states import NEEDED
from builder.common.document import plain, read
from builder.common.documents.compiled import CompiledCode, Input
from builder.common.documents.plan import ImageInputs, PlanDocument, PlannedFile, PlannedLayer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from builder.applier.layers import Layer
    from builder.applier.outcomes import Outcome
    from builder.applier.receipts import Receipt
    from builder.applier.trees import Changes
    from builder.common.documents.compiled import StageRequest
    from builder.common.documents.plan import BakedPlan, ExpectedChoice, State
    from builder.common.documents.pulls import PullReport
    from builder.common.model.base import BaseIdentity

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
        found = self.document.compile if self.outcome.pending else None
        return found.stage if found else None

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
