"""Writes the input of ``docker buildx bake``: a context for each image, and a file of targets.

The contexts are those of the buildkit engine; buildx only pulls the base by digest and adds the
layers.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, ValidationError

from builder.applier.files import DOCUMENT, read_regular
from builder.common.console import console
from builder.common.document import Count, Digest, Document, Part, Text, plain, read
from builder.common.hints import ELSEWHERE, instead, os_hint
from builder.common.reference import Ref
from builder.errors import BuildFailed, Exit, SparkBuildError, UsageError, did_you_mean
from builder.images.engines.buildkit import write_pinned_context
from builder.images.registry.layout import work_folder
from builder.images.registry.reference import parse_reference
from builder.layers.catalog import Catalog
from builder.layers.planner import refuse_nothing, refuse_plan
from builder.pipeline.inputs import inputs_of
from builder.pipeline.show import show_plan

if TYPE_CHECKING:
    from pathlib import Path

    from builder.common.plan import BuildPlan
    from builder.pipeline.options import BakeOptions, PlanOptions

#: The file name that ``docker buildx bake`` reads by default.
BAKE_FILE = "docker-bake.json"
#: Characters not allowed in target names (buildx: 'Invalid name; only "[a-zA-Z0-9_-]+" are
#: allowed').
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_NOT_IN_TAGS = re.compile(r"[^A-Za-z0-9.]+")

Tags = Annotated[tuple[Text, ...], Meta(min_length=1)]


class ImageLists(Part, frozen=True, kw_only=True):
    """The lists in a file such as ``.github/images.json``; other keys are ignored."""

    profiles: tuple[Text, ...]
    bases: tuple[Text, ...]


class Job(Part, frozen=True, kw_only=True):
    """One image: an entry of a matrix of GitHub Actions."""

    target: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]+$(?!\n)")]
    profile: Text
    base: Text
    tags: Tags


class Jobs(Document, frozen=True, kw_only=True):
    """Every profile on every base."""

    include: tuple[Job, ...]


class BakedTarget(Part, frozen=True, kw_only=True):
    """The files written for one image."""

    target: Text
    profile: Text
    base: Annotated[str, Meta(min_length=1, description="with its digest")]
    plan_digest: Digest
    tags: Tags
    added_bytes: Count


class Bake(Document, frozen=True, kw_only=True):
    """The document of ``bake``."""

    folder: Text
    file: Text
    targets: tuple[BakedTarget, ...]

    @property
    def command(self) -> str:
        """The command that builds everything; contexts are relative to the current directory."""
        import shlex

        return f"cd {shlex.quote(self.folder)} && docker buildx bake"


class _Group(Part, frozen=True, kw_only=True):
    targets: tuple[str, ...]


class _Target(Part, frozen=True, kw_only=True):
    context: str
    dockerfile: str
    platforms: tuple[str, ...]
    tags: tuple[str, ...]
    args: dict[str, str]
    attest: tuple[str, ...]


class _BakeFile(Part, frozen=True, kw_only=True):
    group: dict[str, _Group]
    target: dict[str, _Target]


def bake_jobs(options: BakeOptions) -> Jobs:
    """Every profile on every base, with its names; reads no base.

    Raises:
        UsageError: a list is missing, a name is unknown, or two images have one name.
    """
    listed = _lists(options)
    catalog = Catalog.discover(options.plan.patches)
    for profile in listed.profiles:
        catalog.select([profile])
    for base in listed.bases:
        _check_base(base)
    jobs: dict[str, Job] = {}
    owners: dict[str, Job] = {}
    for profile, base in itertools.product(listed.profiles, listed.bases):
        job = _job(profile, base, options.tag_prefix, last=base == listed.bases[-1])
        for name in (job.target, *job.tags):
            other = owners.setdefault(name, job)
            if other is not job:
                raise UsageError(
                    f"two images would have the name {name}: {other.profile} on {other.base}, and "
                    f"{profile} on {base}",
                    hint="bake them one after the other, each with its own --tag-prefix and -o",
                )
        jobs[job.target] = job
    for name in options.target:
        if name not in jobs:
            raise UsageError(
                f"no target {name!r}{did_you_mean(name, jobs)}", hint=f"targets: {', '.join(jobs)}"
            )
    chosen = (job for job in jobs.values() if not options.target or job.target in options.target)
    return Jobs(include=tuple(chosen))


def _lists(options: BakeOptions) -> ImageLists:
    listed = ImageLists(profiles=(), bases=())
    if options.images is not None:
        try:
            listed = read(json.loads(read_regular(options.images, DOCUMENT)), ImageLists)
        except OSError as error:
            raise UsageError(f"cannot read {options.images}: {error.strerror}") from None
        except (ValueError, ValidationError, RecursionError) as error:
            raise UsageError(
                f'{options.images}: {error}; expected {{"profiles": [...], "bases": [...]}}'
            ) from None
    listed = ImageLists(
        profiles=options.layers or listed.profiles, bases=options.base or listed.bases
    )
    for name, values, hint in (
        ("profile", listed.profiles, "--layers b12x-full"),
        ("base", listed.bases, "--base docker://vllm/vllm-openai:v0.33.0"),
    ):
        if not values:
            raise UsageError(f"no {name} is named, nor a list with --images", hint=hint)
    return listed


def _check_base(base: str) -> None:
    if not Ref(base).has_name:
        raise UsageError(
            f"{base} is not an image in a registry, so buildx cannot take it by its digest",
            hint=instead(base, "docker://vllm/vllm-openai:v0.33.0"),
        )
    parse_reference(base)


def _job(profile: str, base: str, prefix: str, *, last: bool) -> Job:
    """The names of one image, as in the images workflow."""
    image = base.rpartition("/")[2]
    name = _NOT_IN_TAGS.sub("-", profile)
    release = _NOT_IN_TAGS.sub("-", image.rpartition(":")[2]).removeprefix("v")
    tags = [f"{prefix}:{tag}" for tag in (f"{release}-{name}", *([name] if last else []))]
    for tag in tags:
        parse_reference(tag)
    target = _NOT_IN_NAMES.sub("-", f"{profile}-{image}")
    return Job(target=target, profile=profile, base=base, tags=tuple(tags))


def write_bake(options: BakeOptions, folder: Path) -> Bake:
    """Plan every image, and write contexts and a file of targets into a new folder.

    Raises:
        UsageError: the folder exists, or a profile does not support a base.
        SparkBuildError: a plan cannot be built; the folder is removed.
        BuildFailed: the disk does not take it.
    """
    jobs = bake_jobs(options).include
    target = folder.absolute()
    if target.exists():
        raise UsageError(f"{target} already exists", hint="--output DIR")
    try:
        with work_folder(target) as work:
            staged = work / "bake"
            staged.mkdir()
            baked, targets = [], {}
            for job in jobs:
                with console.step(f"{job.profile} on {job.base}"):
                    one, targets[job.target] = _bake(job, options.plan, staged / job.target)
                    baked.append(one)
            group = {"default": _Group(targets=tuple(targets))}
            text = json.dumps(plain(_BakeFile(group=group, target=targets)), indent=2)
            (staged / BAKE_FILE).write_text(text + "\n", "utf-8")
            staged.rename(target)
    except OSError as error:
        raise BuildFailed(
            f"cannot write {target}: {error.strerror}; nothing was left there",
            hint=os_hint(error, ELSEWHERE),
        ) from error
    return Bake(folder=str(folder), file=str(folder / BAKE_FILE), targets=tuple(baked))


def _bake(job: Job, options: PlanOptions, folder: Path) -> tuple[BakedTarget, _Target]:
    """Write the context of one image."""
    try:
        plan, added = _written(job, options, folder)
    except SparkBuildError as error:
        message = f"{job.profile} on {job.base}: {error}"
        raise SparkBuildError(message, Exit(error.code), error.hint) from error
    target = _Target(
        context=job.target,
        dockerfile="Dockerfile",
        platforms=(plan.base.platform.oci,),
        tags=job.tags,
        args={"SOURCE_DATE_EPOCH": str(plan.epoch)},
        attest=("type=provenance,disabled=true",),
    )
    baked = BakedTarget(
        target=job.target,
        profile=job.profile,
        base=f"{plan.base.ref.split('@')[0]}@{plan.base.digest}",
        plan_digest=plan.digest,
        tags=job.tags,
        added_bytes=added,
    )
    return baked, target


def _written(job: Job, options: PlanOptions, folder: Path) -> tuple[BuildPlan, int]:
    inputs = inputs_of(replace(options, layers=(job.profile,), base=job.base))
    planning = inputs.identify(Ref(job.base), in_engine=False)
    try:
        plan = planning.plan()
        show_plan(plan)
        refuse_nothing(plan, inputs.selection, building=True)
        refuse_plan(plan, planning.rebuild_command("image"))
        folder.mkdir()
        return plan, write_pinned_context(folder, plan)
    finally:
        planning.close()
