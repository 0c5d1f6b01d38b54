"""Builds images for several platforms of the base's index, in a new index."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from builder.common.background import in_background
from builder.common.console import console
from builder.common.diskspace import check_room
from builder.common.model.reference import Ref
from builder.errors import Exit, NotServed, SparkBuildError, UsageError
from builder.images.engines.choice import named
from builder.images.engines.model import BuildRequest
from builder.images.engines.oci import IndexRequest, OciEngine, build_index
from builder.images.engines.runcommands import run_commands
from builder.images.registry.locations import Locations
from builder.images.registry.model import is_index, platform_name
from builder.images.rootfs.image import PREFERRED, image_entries, platform_of, subjects
from builder.layers.plan.planner import refuse_nothing, refuse_plan
from builder.pipeline.destination import Destination, destination_of
from builder.pipeline.image import PlannedBuild, verification_needs
from builder.pipeline.inputs import inputs_of
from builder.pipeline.result import BuildResult, PlatformPlan, plans_digest, timed
from builder.pipeline.show import show_plan
from builder.pipeline.verify import verify_built
from builder.proof.runners import sandbox_maker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.images.engines.oci import BuiltIndex
    from builder.pipeline.inputs import Inputs
    from builder.pipeline.options import ImageOptions
    from builder.proof.report import Report

#: Platforms for which vLLM has wheels.
_PLATFORMS = ("linux/arm64", "linux/amd64")


@contextmanager
def planned_index(options: ImageOptions) -> Iterator[PlannedBuild]:
    """Plan for the entries that the profile supports; their bases are open inside the block.

    Raises:
        UsageError: the options do not apply to an index, or the base is not an index.
        SparkBuildError: no entry has anything to do.
    """
    ref = _check(options)
    inputs = inputs_of(options.plan)
    timings: dict[str, float] = {}
    with ExitStack() as opened:
        entries: list[PlatformPlan] = []
        with timed(timings, "plan"):
            for platform in _platforms(ref, options):
                found = _plan(ref, platform, options, inputs)
                if found is not None:
                    opened.callback(found.planning.close)
                    entries.append(found)
        if not entries:
            raise SparkBuildError(
                f"nothing to do: this profile supports no image of {ref}",
                Exit.NOTHING_TO_DO,
            )
        yield PlannedBuild(entries=tuple(entries), inputs=inputs, timings=timings, ref=ref)


def _check(options: ImageOptions) -> Ref:
    """Check that the options apply to an index, and return the base."""
    if options.others not in ("keep", "drop"):
        raise UsageError(f"--others {options.others!r} is neither keep nor drop")
    ref = options.plan.base_ref
    if ref is None or not ref.kind.is_image:
        raise UsageError("--all-platforms and --others need an image index: name it with --base")
    if options.plan.compile_here:
        raise UsageError(
            "--compile compiles only for this machine's architecture",
            hint="leave --all-platforms and --others out",
        )
    if options.print_dockerfile:
        raise UsageError(
            "--print-dockerfile works for one platform",
            hint="leave --all-platforms and --others out",
        )
    if (kind := named(options.engine)) is not None and not kind.writes_manifests:
        raise UsageError(f"the {kind.name} engine builds for one platform", hint="--engine oci")
    return ref


def _platforms(ref: Ref, options: ImageOptions) -> list[str]:
    """The platforms to patch."""
    with Locations() as locations:
        place = locations.open(ref)
        top = place.image.manifest(place.reference)
    if not is_index(top):
        raise UsageError(f"{ref} is a single image, not an index")
    has = [name for e in image_entries(top) if (name := platform_of(e)) in _PLATFORMS]
    rest = [name for e in subjects(top) if (name := platform_name(e.platform)) not in has]
    if rest:
        become = "kept as they are" if options.others == "keep" else "left out (see --others)"
        console.say(f"  {', '.join(rest)}: {become}")
    if options.all_platforms:
        if options.plan.platform is not None:
            raise UsageError("--platform and --all-platforms contradict each other")
        return list(dict.fromkeys(has))
    return [options.plan.platform or PREFERRED]


def _plan(ref: Ref, platform: str, options: ImageOptions, inputs: Inputs) -> PlatformPlan | None:
    """The plan for one entry, or None if the profile does not support it."""
    with console.step(f"base and plan for {platform}"):
        planning = inputs.identify(ref, platform=platform, engine="oci")
        try:
            plan = planning.plan()
            if not options.json:
                show_plan(plan)
            refuse_nothing(plan, inputs.selection, building=True)
            refuse_plan(plan, planning.rebuild_command("image"))
        except SparkBuildError as error:
            planning.close()
            if error.code != Exit.NOTHING_TO_DO and not isinstance(error, NotServed):
                raise
            console.say(f"  {platform} is not patched: {error}")
            return None
        except BaseException:
            planning.close()
            raise
    return PlatformPlan(platform, planning, plan)


def build_images(options: ImageOptions, planned: PlannedBuild) -> BuildResult:
    """Build every entry and the index, and verify each entry.

    Raises:
        UsageError, BuildFailed, RemoteError: see ``engines.deliver``.
    """
    entries, first = planned.entries, planned.entries[0]
    request = _request(options, entries)
    needs = [need for single in request.requests for need in OciEngine().needs(single)]
    check_room([*needs, *verification_needs(first, options)])
    timings = dict(planned.timings)
    reports: list[Report] = []
    with in_background(sandbox_maker(first.plan, first.base.tree) if options.verify else None):
        with timed(timings, "build"), console.step("build with oci"):
            built = build_index(request)
        for entry in entries if options.verify else ():
            with timed(timings, "verify"), console.step(f"verify {entry.platform}"):
                name = _name_of(entry, built)
                console.left = f"{built.image.ref} is complete, but not verified"
                reports.append(verify_built(name, planned.inputs, entry.plan, options))
    return BuildResult(
        entries=entries,
        built=built.image,
        reports=tuple(reports),
        timings=timings,
        started=run_commands(first.plan, built.image),
        is_index=True,
    )


def _request(options: ImageOptions, entries: Sequence[PlatformPlan]) -> IndexRequest:
    place = _place(options, entries)
    return IndexRequest(
        requests=tuple(
            BuildRequest(
                plan=entry.plan,
                tag=place.tag,
                base=entry.base,
                output=place.output,
                push=place.push,
                thin=options.thin,
            )
            for entry in entries
        ),
        tag=place.tag,
        keep=options.others == "keep",
        output=place.output,
        push=place.push,
        thin=options.thin,
    )


def _place(options: ImageOptions, entries: Sequence[PlatformPlan]) -> Destination:
    """The destination of the index; without a tag, its name is derived from all plans."""
    place = destination_of(entries[0].plan, options, "oci")
    if options.tag is not None:
        return place
    name = place.tag.rpartition("-")[0]
    return replace(place, tag=f"{name}-{plans_digest(entries).removeprefix('sha256:')[:12]}")


def _name_of(entry: PlatformPlan, built: BuiltIndex) -> Ref:
    """An entry of the new index, as a target of verification."""
    assert entry.base.opened is not None
    digest = built.digests[entry.base.opened.image.manifest.digest]
    ref = built.image.ref
    return Ref(f"{ref}@{digest}" if ref.in_layout else f"docker://{ref}@{digest}")
