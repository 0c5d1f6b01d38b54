"""Verification targets: an image, an overlay layout, released wheels, a directory."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.applier.outcomes import Target
from builder.applier.trees import Content, OverlayTree
from builder.common.console import console
from builder.common.document import plain
from builder.common.model.base import base_kind
from builder.common.model.reference import Ref
from builder.errors import UsageError
from builder.images.bases.identify import identify
from builder.images.bases.model import BaseRequest, no_facts, tracked_for
from builder.images.engines import metadata
from builder.images.engines.overlay import name_of_both
from builder.images.rootfs.base import Base
from builder.layers.plan.planner import make_plan
from builder.proof.codegen import python_compiler, sandbox_compiler
from builder.proof.insandbox import SandboxProbe, in_sandbox
from builder.proof.launches import sandbox_launcher
from builder.proof.ongpu import GpuOptions
from builder.proof.parts import Parts, parts_of_image, without_foreign_hooks
from builder.proof.replies import DispatchReply
from builder.proof.sandbox import ask_probe
from builder.proof.target import VerifyTarget
from builder.proof.trust import TrustedSources

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.applier.trees import Tree
    from builder.common.documents.plan import BakedPlan, PlanDocument
    from builder.common.model.base import BaseIdentity
    from builder.common.model.plan import BuildPlan, RecordedPlan
    from builder.common.pypi import PackageIndex
    from builder.images.bases.model import FactsOf
    from builder.layers.catalog import Selection
    from builder.layers.plan.sources import IndexSources
    from builder.proof.interpreters import AskCompiler, AskDispatch, Probes


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Options to open a target."""

    index: PackageIndex
    sources: IndexSources
    selection: Selection | None = None
    platform: str | None = None
    gpu: GpuOptions = field(default_factory=GpuOptions)
    facts_of: FactsOf = no_facts
    #: the trusted sources of code that may run on this machine
    trust: TrustedSources = field(default_factory=TrustedSources)

    def tracked(self, layers: Sequence[Layer] = ()) -> tuple[str, ...]:
        """Distributions whose files are looked at: those of layers in an image and of selected."""
        return tracked_for([*layers, *(self.selection.layers if self.selection else ())])

    def request(self, ref: Ref, layers: Sequence[Layer] = (), engine: str = "auto") -> BaseRequest:
        """The request for a base that the user named, or an image that has these layers."""
        return BaseRequest(
            ref=ref,
            platform=self.platform,
            pins=self.selection.pins() if self.selection else {},
            tracked=self.tracked(layers),
            index=self.index,
            engine=engine,
        )

    def trusting(self, identity: BaseIdentity) -> TrustedSources:
        """The same for a target, with its selected layers."""
        named = self.selection.layers if self.selection else ()
        return dataclasses.replace(
            self.trust, index=self.index, layers=named, platform=identity.platform
        )


def target_of_plan(
    plan: BuildPlan, base: Base, name: str, *, patched: bool, trust: TrustedSources | None = None
) -> VerifyTarget:
    """A plan's base, unpatched or (``patched``) with the plan applied, before any image exists."""
    trust = trust or TrustedSources(platform=base.identity.platform)
    tree: Tree = base.tree
    env = dict(base.identity.env)
    if patched:
        overlay = OverlayTree(base.tree)
        overlay.update(plan.changes)
        tree = overlay
        env |= plan.env
        trust = trust.with_plan(plan.document)
    return VerifyTarget(
        name=name,
        kind=base.identity.kind,
        plan=plan.document,
        layers=[d.layer for d in plan.decisions],
        tree=tree,
        env=env,
        ask=_ask_of(tree, base, trust),
        compile=_compiler_of(tree, base, trust, patched=patched),
        launch=sandbox_launcher(tree, dict(base.identity.packages), trust),
        close=base.close,
    )


def _compiler_of(tree: Tree, base: Base, trust: TrustedSources, *, patched: bool) -> AskCompiler:
    python = own_python(base)
    if python is not None and not patched:
        return python_compiler(python)
    return sandbox_compiler(tree, dict(base.identity.packages), trust)


def own_python(base: Base) -> Path | None:
    """The interpreter of a local environment's directory."""
    if not base.identity.is_installed:
        return None
    python = Path(base.identity.site_packages).parents[2] / "bin" / "python"
    here = base.identity.platform.target.platform == Target.here().platform
    return python if here and python.exists() else None


def _ask_of(tree: Tree, base: Base, trust: TrustedSources) -> AskDispatch:
    python = own_python(base)
    if python is not None:
        return lambda request: ask_probe(python, plain(request), DispatchReply)
    return SandboxProbe(tree, base.identity.packages, trust)


def open_overlay(
    name: str,
    recorded: RecordedPlan,
    files: Mapping[str, bytes],
    env: Mapping[str, str],
    opening: Opening,
    label: str,
) -> VerifyTarget:
    plan = recorded.document
    site = plan.base.site_packages
    layers = metadata.read_layers(files.get(f"{metadata.SHARE}/layers.json"), name)
    request = BaseRequest(
        ref=exact_ref(plan),
        platform=plan.base.platform,
        python=plan.base.python,
        site_packages=site,
        pins={},
        tracked=opening.tracked(layers),
        index=opening.index,
    )
    base = identify(request)
    if base.identity.digest != plan.base.digest:
        raise UsageError(
            f"{name} was made for wheels {plan.base.digest[:19]}..., the package index "
            f"has {base.identity.digest[:19]}...: a wheel was replaced"
        )
    trust = opening.trusting(base.identity)
    parts = Parts(base=base, sources=opening.sources, asking=in_sandbox(base, trust))
    overlay = OverlayTree(base.tree)
    prefix = f"{site}/"
    overlay.update(
        {
            path.removeprefix(prefix): None if data is None else Content.of(data)
            for path, data in {**_taken_away(plan), **files}.items()
            if path.startswith(prefix)
        }
    )
    if opening.selection is not None:
        judged = Base(dataclasses.replace(base.identity, env=dict(env)), overlay)
        judged_plan = make_plan(judged, opening.selection, opening.sources)
        opened = target_of_plan(judged_plan, judged, name, patched=False, trust=trust)
        return dataclasses.replace(opened, parts=lambda: parts, brought=tuple(files))
    console.say(f"  {name} is an overlay; it is checked on the files of {plan.base.ref}")
    return VerifyTarget(
        name=name,
        kind="oci",
        runs_as=name_of_both(plan),
        cannot_use_gpu="an overlay cannot run alone; build an image with its Dockerfile",
        brought=tuple(files),
        outside=partial(_files_at, files),
        plan=plan,
        layers=layers,
        tree=overlay,
        env=env,
        ask=SandboxProbe(overlay, plan.base.packages, trust),
        compile=sandbox_compiler(overlay, plan.base.packages, trust),
        launch=sandbox_launcher(overlay, plan.base.packages, trust),
        label=label,
        recomputed=recorded.digest,
        parts=lambda: without_foreign_hooks(layers, trust, lambda: parts),
    )


def _files_at(files: Mapping[str, bytes], path: str) -> dict[str, bytes]:
    """A file, or the files below a folder."""
    return {p: data for p, data in files.items() if p == path or p.startswith(f"{path}/")}


def exact_ref(plan: PlanDocument) -> Ref:
    """The base with all versions; vLLM first, so that wheels are unpacked in its order."""
    packages = dict(plan.base.packages)
    named = {"vllm": packages.pop("vllm"), **packages}
    return Ref("pypi:" + ",".join(f"{name}=={version}" for name, version in named.items()))


def _taken_away(plan: PlanDocument) -> dict[str, bytes | None]:
    """Files that the plan removes, because an image without a base has no whiteouts."""
    return {
        f"{plan.base.site_packages}/{file.path}": None
        for layer in plan.layers
        for file in layer.files
        if file.after is None
    }


@dataclass(frozen=True, kw_only=True)
class EmbeddedMetadata:
    """The metadata in an image: its plan, if it is ours, its layers, and its label."""

    plan: RecordedPlan | None
    layers: list[Any]
    label: str


@dataclass(frozen=True, kw_only=True)
class ImageProbes:
    """How to query an image's vLLM, also with some files replaced."""

    kind: str
    now: Probes
    otherwise: Callable[[Tree, Mapping[str, str]], Probes]
    #: where its base image is looked up: ``BaseRequest.engine``
    engine: str


def target_of_image(
    base: Base, name: str, baked: EmbeddedMetadata, opening: Opening, held: ImageProbes
) -> VerifyTarget:
    """An image with vLLM, compared with the requested layers or its own plan.

    Raises:
        UsageError: its expected state is unknown.
    """
    plan: PlanDocument
    layers = baked.layers
    try:
        if opening.selection is not None:
            plan = make_plan(base, opening.selection, opening.sources).document
            layers = list(opening.selection.layers)
        elif baked.plan is not None:
            plan = baked.plan.document
        else:
            raise UsageError(
                f"image {name} has no spark-build plan, so its expected contents are unknown",
                hint=f"spark-build verify {shlex.quote(name)} --layers b12x-full",
            )
    except BaseException:
        base.close()
        raise
    former = (
        None if baked.plan is None else _former(baked.plan.document, base, opening, held.engine)
    )
    return VerifyTarget(
        name=name,
        kind=held.kind,
        plan=plan,
        layers=layers,
        tree=base.tree,
        env=base.identity.env,
        ask=held.now.ask,
        cannot_ask=held.now.cannot_ask,
        compile=held.now.compile,
        launch=held.now.launch,
        close=base.close,
        label=None if opening.selection is not None else baked.label,
        recomputed=baked.plan.digest if baked.plan else "",
        parts=lambda: without_foreign_hooks(
            () if opening.selection is not None else layers,
            opening.trusting(base.identity),
            lambda: parts_of_image(base, former, opening.sources, held.otherwise),
        ),
    )


def _former(baked: BakedPlan, base: Base, opening: Opening, engine: str) -> BaseRequest:
    """The base of an image: another image, or the wheels in it."""
    return BaseRequest(
        ref=exact_ref(baked) if base_kind(baked.base.kind).is_wheels else Ref(baked.base.ref),
        platform=base.identity.platform.oci,
        python=baked.base.python,
        site_packages=base.identity.site_packages,
        pins={},
        index=opening.index,
        engine=engine,
        facts_of=opening.facts_of,
    )
