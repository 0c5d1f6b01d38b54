"""Opens what is to be verified, once: an image, an overlay, released wheels, a directory."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections import ChainMap
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from builder.applier.trees import Content, OverlayTree
from builder.applier.values import ApplyError
from builder.common.background import in_background
from builder.common.console import console
from builder.common.reference import Ref, base_kind
from builder.errors import RemoteError, SparkBuildError, UsageError
from builder.images.bases.identify import asks_engine, identify
from builder.images.bases.image import InEngine, base_of, embedded_in, with_files
from builder.images.engines.baked import PLAN_LABEL, SHARE, is_overlay, read_layers
from builder.images.engines.docker import without_engine
from builder.images.engines.metadata import image_layers
from builder.images.engines.oci import (
    labels_of_layout,
    layout_digest,
    name_of_both,
    read_layout,
)
from builder.images.registry.copy import layout_place, refuse_missing
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import blobs, is_index, platform_name
from builder.images.registry.reference import refuse_wrong_kind
from builder.images.rootfs.image import open_image, read_config, subjects
from builder.images.subject import BaseRequest, InFiles, Subject, no_facts, tracked_for
from builder.layers.planner import make_plan
from builder.proof.dispatch import make_request, own_settings
from builder.proof.gpuoptions import GpuOptions
from builder.proof.runners import InContainer, InSandbox, runner_of
from builder.proof.target import Origin, VerifyTarget
from builder.proof.trust import TrustedSources

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.applier.trees import Tree
    from builder.common.plan import BakedPlan, BaseIdentity, BuildPlan, PlanDocument, RecordedPlan
    from builder.common.pypi import PackageIndex
    from builder.images.bases.image import Embedded
    from builder.images.registry.model import Descriptor
    from builder.images.rootfs.image import Image
    from builder.images.subject import FactsOf, OpenImage
    from builder.layers.catalog import Selection
    from builder.layers.pinned import IndexSources
    from builder.proof.target import Runner


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

    def request(self, ref: Ref, layers: Sequence[Layer] = ()) -> BaseRequest:
        """The request for a base that the user named, or an image that has these layers."""
        return BaseRequest(
            ref=ref,
            platform=self.platform,
            pins=self.selection.pins() if self.selection else {},
            tracked=self.tracked(layers),
            index=self.index,
        )

    def trusting(self, identity: BaseIdentity) -> TrustedSources:
        """The same for a target, with its selected layers."""
        named = self.selection.layers if self.selection else ()
        return dataclasses.replace(
            self.trust, index=self.index, layers=named, platform=identity.platform
        )


def open_target(ref: Ref, opening: Opening) -> VerifyTarget:
    """Open a target by its reference.

    Raises:
        UsageError: the reference is malformed, or the expected layers are unknown.
    """
    refuse_wrong_kind(ref)
    if ref.in_layout and _is_overlay(ref):
        return open_layout(ref, opening)
    if ref.has_name and asks_engine(ref):
        return open_engine_image(ref.place, opening)
    if not ref.kind.is_image:
        return _open_files(ref, opening)
    try:
        return open_layered(ref, opening)
    except RemoteError as error:
        if ref.has_scheme:
            raise
        raise without_engine(ref.text, error) from None


# ------------------------------------------------------------------- released wheels, a directory


def target_of_plan(
    plan: BuildPlan, base: Subject, name: str, *, patched: bool, trust: TrustedSources | None = None
) -> VerifyTarget:
    """A plan's base, unpatched or (``patched``) with the plan applied, before any image exists."""
    trust = trust or TrustedSources(platform=base.identity.platform)
    own = trust.with_plan(plan.document) if patched else trust.with_variables(plan.env)
    target = VerifyTarget(
        name=name,
        subject=base,
        plan=plan.document,
        layers=[d.layer for d in plan.decisions],
        runner=runner_of(base, own),
        trust=own,
    )
    if not patched:
        return target
    overlay = OverlayTree(base.tree)
    overlay.update(plan.changes)
    return target.planned(overlay, {**base.identity.env, **plan.env})


@contextmanager
def dispatch_ahead(plan: BuildPlan, base: Subject, trust: TrustedSources) -> Iterator[None]:
    """Ask for the kernels of an image during the block, which builds and verifies it.

    Level ``dispatch`` then knows the answer, if the image has the same files.  Where nothing can be
    asked, the level itself says why.
    """
    trust = dataclasses.replace(trust, platform=base.identity.platform)
    target = target_of_plan(plan, base, base.identity.ref, patched=True, trust=trust)
    if plan.base.is_wheels:
        target = target.planned(_overlay_of(plan, base.tree), target.env)
    runner = target.runner
    with ExitStack() as running:
        if isinstance(runner, InSandbox):
            with suppress(SparkBuildError, ApplyError):
                running.enter_context(in_background(runner.maker()))  # while files are laid out
                request = make_request(target.plan, own_settings(target))
                running.enter_context(in_background(runner.ahead(request)))
        yield


def _overlay_of(plan: BuildPlan, tree: Tree) -> OverlayTree:
    """Wheels with the files that an overlay will have: every RECORD is not in its final form."""
    layers = image_layers(plan)
    return _laid_over(tree, plan.document, dict(ChainMap(*(files for _, files in layers[::-1]))))


def _open_files(ref: Ref, opening: Opening) -> VerifyTarget:
    """Released wheels or a directory, held against the selected layers."""
    base = identify(opening.request(ref))
    try:
        if opening.selection is None:
            raise UsageError(
                f"{ref} does not name its layers",
                hint=f"spark-build verify {shlex.quote(ref.text)} --layers b12x-full",
            )
        plan = make_plan(base, opening.selection, opening.sources)
        trust = opening.trusting(base.identity)
        target = target_of_plan(plan, base, ref.text, patched=False, trust=trust)
        return dataclasses.replace(
            target,
            runner=runner_of(base, trust, opening.gpu),
            origin=Origin(subject=base, sources=opening.sources),
        )
    except BaseException:
        base.close()
        raise


# -------------------------------------------------------------------------------------- an overlay


def _is_overlay(ref: Ref) -> bool:
    """Whether this may be an overlay: an image in a layout without a base image."""
    layout, name = layout_place(ref)
    return layout.is_dir() and is_overlay(labels_of_layout(layout, name))


def open_layout(ref: Ref, opening: Opening) -> VerifyTarget:
    """Open an overlay layout on top of the released wheels in its plan.

    Raises:
        UsageError: it is not a layout of spark-build, is damaged, or is for other wheels.
    """
    layout, name = layout_place(ref)
    plan, files, env = read_layout(layout, name)
    image = InFiles(
        files=files,
        env=env,
        labels=labels_of_layout(layout, name),
        digests=(layout_digest(layout, name),),
        runs_as=name_of_both(plan.document),
    )
    return open_overlay(ref.text, image, plan, opening)


def open_overlay(
    name: str, image: InFiles, recorded: RecordedPlan, opening: Opening
) -> VerifyTarget:
    """An overlay's files on the released wheels in its plan.

    Raises:
        UsageError: the package index has other wheels now.
    """
    plan = recorded.document
    layers = read_layers(image.read(f"{SHARE}/layers.json"), name)
    base = _wheels_of(name, plan, opening, layers)
    trust = opening.trusting(base.identity)
    origin = Origin(subject=base, sources=opening.sources)
    overlay = Subject(
        dataclasses.replace(base.identity, env=dict(image.env)),
        _laid_over(base.tree, plan, {p: Content.of(data) for p, data in image.files.items()}),
        image,
    )
    if opening.selection is not None:
        judged = make_plan(overlay, opening.selection, opening.sources)
        target = target_of_plan(judged, overlay, name, patched=False, trust=trust)
        return dataclasses.replace(target, origin=origin)
    console.say(f"  {name} is an overlay; it is checked on the files of {plan.base.ref}")
    no_gpu = "an overlay cannot run alone; build an image with its Dockerfile"
    return VerifyTarget(
        name=name,
        subject=overlay,
        plan=plan,
        layers=layers,
        runner=InSandbox(overlay.tree, plan.base.packages, trust, no_gpu),
        trust=trust,
        label=image.labels.get(PLAN_LABEL, ""),
        recomputed=recorded.digest,
        origin=dataclasses.replace(origin, baked=layers, trust=trust),
    )


def _wheels_of(name: str, plan: BakedPlan, opening: Opening, layers: Sequence[Layer]) -> Subject:
    """The released wheels that an overlay was made for."""
    request = BaseRequest(
        ref=exact_ref(plan),
        platform=plan.base.platform,
        python=plan.base.python,
        site_packages=plan.base.site_packages,
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
    return base


def _laid_over(tree: Tree, plan: PlanDocument, files: Mapping[str, Content | None]) -> OverlayTree:
    """Wheels with an overlay's files; what the plan removes is gone: there are no whiteouts."""
    prefix = f"{plan.base.site_packages}/"
    removed = {
        file.path: None for layer in plan.layers for file in layer.files if file.after is None
    }
    own = {
        path.removeprefix(prefix): content
        for path, content in files.items()
        if path.startswith(prefix)
    }
    overlay = OverlayTree(tree)
    overlay.update({**removed, **own})
    return overlay


def exact_ref(plan: PlanDocument) -> Ref:
    """The base with all versions; vLLM first, so that wheels are unpacked in its order."""
    packages = dict(plan.base.packages)
    named = {"vllm": packages.pop("vllm"), **packages}
    return Ref("pypi:" + ",".join(f"{name}=={version}" for name, version in named.items()))


# ---------------------------------------------------------------------------------------- an image


def open_engine_image(name: str, opening: Opening) -> VerifyTarget:
    """Open an image in a Docker Engine by name or ID: an overlay, or an image with vLLM."""
    return _target_of(InEngine.open(name, opening.platform), Ref(name), opening)


def open_layered(ref: Ref, opening: Opening) -> VerifyTarget:
    """Open an image in a registry or a layout: its files are read from its layers.

    Raises:
        RemoteError: it does not exist, or is damaged.
        UsageError: its expected state is unknown, or it has no vLLM.
    """
    image = open_image(ref, opening.platform)
    if opening.platform is None and opening.selection is None:
        try:
            _refuse_foreign(image, ref)
        except BaseException:
            image.close()
            raise
    return target_of_layers(image, ref, opening)


def _refuse_foreign(image: Image, ref: Ref) -> None:
    """Refuse an index that gives other machines an image without a plan, unless one is asked for.

    Raises:
        UsageError: there is such an image.
    """
    if not is_index(image.top) or PLAN_LABEL not in image.config.labels:
        return
    own = platform_name({"os": "linux", **image.config.platform})
    for entry in subjects(image.top):
        name = platform_name({"os": "linux", **entry.platform})
        if entry.digest == image.manifest.digest:
            continue
        manifest = image.source.manifest(entry.digest)
        planned = not is_index(manifest) and (
            PLAN_LABEL in read_config(image.source, manifest).labels
        )
        if not planned:
            raise UsageError(
                f"{ref} is an index, and its image for {name} has no plan: {entry.digest}; "
                f"only the one for {own} can be verified",
                hint=f"spark-build verify {shlex.quote(ref.text)} --platform {own}",
            )
        console.say(f"  not verified by this: the image for {name} (--platform {name})")


def target_of_layers(image: Image, ref: Ref, opening: Opening) -> VerifyTarget:
    """The target for an open image, with the name ``ref``; closing the target closes it.

    Raises:
        RemoteError: the image is damaged.
        UsageError: its expected state is unknown, or it has no vLLM.
    """
    try:  # what is known of a layer from an earlier run does not say that it is still there
        refuse_missing(image.source, _needed(image), "push or copy the image again")
    except BaseException:
        image.close()
        raise
    return _target_of(with_files(image, opening.facts_of), ref, opening)


def _needed(image: Image) -> list[Descriptor]:
    """The blobs that must exist: a thin layout (``image --thin``) lacks the base's layers."""
    config, *layers = blobs(image.manifest)
    layout = image.source
    if isinstance(layout, LayoutDirectory):
        base = list(itertools.takewhile(lambda layer: not layout.has(layer.digest), layers[:-1]))
        layers = layers[len(base) :]
    return [config, *layers]


def _target_of(image: OpenImage, ref: Ref, opening: Opening) -> VerifyTarget:
    """An open image as a target, which closes it."""
    name = ref.text
    try:
        embedded = embedded_in(image, name)
        plan = embedded.plan
        if plan is None or not _stands_alone(plan.document, image):
            return _patched_image(image, ref, embedded, opening)
        overlay = InFiles(
            files=image.all_files(name),
            env=image.env,
            labels=image.labels,
            digests=image.digests,
            runs_as=name_of_both(plan.document),
        )
        target = open_overlay(name, overlay, plan, opening)
    except BaseException:
        image.close()
        raise
    image.close()
    return target


def _stands_alone(plan: BakedPlan, image: OpenImage) -> bool:
    """Whether an image is only an overlay, without a base image with vLLM."""
    base = plan.base
    metadata = f"{base.site_packages}/vllm-{base.packages['vllm']}.dist-info/METADATA"
    return base_kind(base.kind).is_wheels and not image.has(metadata)


def _patched_image(
    image: OpenImage, ref: Ref, embedded: Embedded, opening: Opening
) -> VerifyTarget:
    """An image with vLLM, compared with the requested layers or its own plan.

    Raises:
        UsageError: its expected state is unknown.
    """
    named = Ref(ref.place) if ref.has_name else ref
    base = base_of(image, opening.request(named, embedded.layers), named.text)
    plan: PlanDocument
    layers: Sequence[Layer] = embedded.layers
    if opening.selection is not None:
        plan = make_plan(base, opening.selection, opening.sources).document
        layers = list(opening.selection.layers)
    elif embedded.plan is not None:
        plan = embedded.plan.document
    else:
        raise UsageError(
            f"image {ref} has no spark-build plan, so its expected contents are unknown",
            hint=f"spark-build verify {shlex.quote(ref.text)} --layers b12x-full",
        )
    trust = opening.trusting(base.identity)
    baked = embedded.plan
    former = None if baked is None else _former(baked.document, base, opening)
    runner: Runner = InSandbox(base.tree, base.identity.packages, trust)
    if base.in_engine:
        runner = InContainer(base=base, name=named.text, gpu=opening.gpu)
    selected = opening.selection is not None
    return VerifyTarget(
        name=ref.text,
        subject=base,
        plan=plan,
        layers=layers,
        runner=runner,
        trust=trust,
        label=None if selected else embedded.label,
        recomputed=baked.digest if baked else "",
        origin=Origin(
            subject=base,
            sources=opening.sources,
            former=former,
            baked=() if selected else layers,
            trust=trust,
        ),
    )


def _former(baked: BakedPlan, image: Subject, opening: Opening) -> BaseRequest:
    """The base of an image: another image, or the wheels in it."""
    return BaseRequest(
        ref=exact_ref(baked) if base_kind(baked.base.kind).is_wheels else Ref(baked.base.ref),
        platform=image.identity.platform.oci,
        python=baked.base.python,
        site_packages=image.identity.site_packages,
        pins={},
        index=opening.index,
        in_engine=image.in_engine,
        facts_of=opening.facts_of,
    )
