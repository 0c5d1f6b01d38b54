"""Builds one image, from options to evidence: identify, plan, compile, build, verify."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from builder.common.background import in_background
from builder.common.console import console
from builder.common.diskspace import check_room
from builder.errors import UsageError, did_you_mean
from builder.images.engines.choice import (
    AUTO,
    ENGINES,
    check_docker_host,
    engine_for,
    wanted_engine,
)
from builder.images.engines.model import BuildRequest
from builder.images.engines.overlay import write_dockerfile
from builder.images.engines.runcommands import run_commands
from builder.layers.plan.planner import refuse_nothing, refuse_plan
from builder.pipeline.destination import (
    check_base_options,
    check_builder,
    check_destination,
    destination_of,
    of_registry,
)
from builder.pipeline.inputs import inputs_of
from builder.pipeline.result import BuildResult, PlatformPlan, timed
from builder.pipeline.show import show_plan
from builder.pipeline.verify import verify_built
from builder.proof.runners import sandbox_maker
from builder.proof.sandbox import sandbox_needs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from builder.common.diskspace import Need
    from builder.common.model.reference import Ref
    from builder.images.engines.model import Engine
    from builder.pipeline.inputs import Inputs
    from builder.pipeline.options import ImageOptions
    from builder.proof.report import Report


@dataclass(frozen=True, kw_only=True)
class PlannedBuild:
    """A planned build: an entry for each platform, with open bases."""

    entries: tuple[PlatformPlan, ...]
    inputs: Inputs
    #: seconds by step
    timings: Mapping[str, float]
    #: the base's reference as given
    ref: Ref


def check_options(options: ImageOptions) -> ImageOptions:
    """Check options and choose the engine; reads nothing.

    Raises:
        UsageError: they contradict each other.
    """
    options = options.settled()
    names = (AUTO, *ENGINES)
    if options.engine not in names:
        guess = did_you_mean(options.engine, names)
        raise UsageError(f"unknown engine {options.engine!r}; engines: {', '.join(names)}{guess}")
    check_builder(options)
    check_destination(options, wanted_engine(options.engine, options.output))
    if options.plan.base_ref:
        check_base_options(options, options.plan.base_ref)
    return options


@contextmanager
def planned_image(options: ImageOptions) -> Iterator[PlannedBuild]:
    """Identify the base and plan for it; the base is open inside the block.

    Raises:
        NotServed: the profile does not support this base.
        SparkBuildError: there is nothing to do, or a layer cannot be applied.
    """
    inputs = inputs_of(options.plan)
    timings: dict[str, float] = {}
    with timed(timings, "plan"), console.step("base"):
        engine = wanted_engine(options.engine, options.output)
        check_docker_host(engine, options.plan.base_ref, options.builder)
        pull = not (options.dry_run or options.builder)
        ref = inputs.base_ref(engine, pull=pull)
        check_base_options(options, ref)
        with of_registry(ref, options.builder):
            planning = inputs.identify(ref, engine="oci" if options.builder else engine)
    try:
        with timed(timings, "plan"), console.step("plan"):
            plan = planning.plan()
            if not options.json or not options.dry_run:
                show_plan(plan, elsewhere=planning.elsewhere)
        refuse_nothing(plan, inputs.selection, building=True)
        refuse_plan(plan, planning.rebuild_command("image"))
        planning.refuse_stages(plan)
        entry = PlatformPlan(plan.base.platform.oci, planning, plan)
        yield PlannedBuild(entries=(entry,), inputs=inputs, timings=timings, ref=ref)
    finally:
        planning.close()


def dockerfile_of(options: ImageOptions, planned: PlannedBuild) -> str:
    """The Dockerfiles as text: compile stages first, then the image."""
    plan, base = planned.entries[0].plan, planned.entries[0].base
    engine, _ = engine_for(plan, base, options.engine, options.output, options.builder)
    return planned.entries[0].planning.stage_dockerfiles(plan) + engine.render(plan)


def build_image(options: ImageOptions, planned: PlannedBuild) -> BuildResult:
    """Compile pending units, build the image, and verify it.

    Raises:
        EngineError: no engine can build this plan.
        BuildFailed: the build, or a compiler, failed.
    """
    timings = dict(planned.timings)
    entry = planned.entries[0]
    base = entry.base
    engine, why = engine_for(entry.plan, base, options.engine, options.output, options.builder)
    if entry.plan.pending:  # what cannot be built is not compiled for
        with timed(timings, "compile"):
            entry = replace(entry, plan=entry.planning.compiled(entry.plan))
    plan = entry.plan
    if why:
        console.say(f"engine  {engine.name}, because {why}")
    request = _request(entry, options, engine)
    check_room([*engine.needs(request), *verification_needs(entry, options)])
    reports: tuple[Report, ...] = ()
    with in_background(_sandbox_for(entry, options, request)):
        with timed(timings, "build"), console.step(f"build with {engine.name}"):
            built = engine.build(request)
        if options.verify:
            with timed(timings, "verify"), console.step("verify"):
                console.left = f"{built.subject} is complete, but not verified"
                reports = (verify_built(built.subject, planned.inputs, plan, options),)
    started = run_commands(plan, built, write_dockerfile(plan, built), options.tag or "")
    return BuildResult(
        entries=(entry,), built=built, reports=reports, timings=timings, started=started
    )


def verification_needs(entry: PlatformPlan, options: ImageOptions) -> list[Need]:
    """The disk space needed to verify an image."""
    return sandbox_needs(entry.plan.base.packages, entry.base.tree) if options.verify else []


def _request(entry: PlatformPlan, options: ImageOptions, engine: Engine) -> BuildRequest:
    place = destination_of(entry.plan, options, engine.name)
    return BuildRequest(
        plan=entry.plan,
        tag=place.tag,
        output=place.output,
        push=place.push,
        base=entry.base,
        thin=options.thin,
        cache_from=options.cache_from,
        cache_to=options.cache_to,
    )


def _sandbox_for(
    entry: PlatformPlan, options: ImageOptions, request: BuildRequest
) -> Callable[[], object] | None:
    """The sandbox to prepare for verification; None if the image itself is used."""
    in_engine = request.output is None and not request.push
    if in_engine or not options.verify:
        return None
    return sandbox_maker(entry.plan, entry.base.tree)
