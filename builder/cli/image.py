"""``spark-build image``: plan, render, build, verify, push."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from builder import settings
from builder.beside import beside
from builder.cli.builders import check_builder, of_registry
from builder.cli.inputs import Inputs
from builder.cli.place import check_base_options, check_place, place_of
from builder.cli.show import CheckLines, print_json, show_plan, show_report, show_verdict
from builder.cli.units import seconds_of
from builder.console import console
from builder.deadline import time_limit
from builder.engines.choice import check_docker_host, engine_for, wanted_engine
from builder.engines.model import BuildRequest
from builder.engines.overlay import write_dockerfile
from builder.engines.runit import run_it
from builder.errors import Exit, SparkBuildError, UsageError, did_you_mean
from builder.planner import refuse_nothing, refuse_plan
from builder.room import check_room
from builder.verify.levels import DEFAULT_LEVELS
from builder.verify.run import verify
from builder.verify.sandbox import sandbox_needs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from builder.bases.model import Base, FactsOf
    from builder.cli import options as opt
    from builder.engines.model import BuiltImage, Engine
    from builder.index import PackageIndex
    from builder.model import BuildPlan
    from builder.native.container import ToolkitChoice
    from builder.sources import IndexSources
    from builder.verify.model import Report


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """What the command line said."""

    layers: list[str] | None
    pulls: opt.PullOptions
    base: str | None
    platform: str | None
    python: str | None
    site_packages: str | None
    patches: list[Path] | None
    engine: str
    builder: str
    cache_from: tuple[str, ...]
    cache_to: tuple[str, ...]
    tag: str | None
    output: str | None
    push: bool
    thin: bool
    single_layer: bool
    all_platforms: bool
    others: str
    verify: bool
    compile_here: bool
    toolkit: ToolkitChoice | None
    time_limit: str
    dry_run: bool
    print_dockerfile: bool
    refresh: bool
    json: bool

    def settled(self) -> ImageOptions:
        """With the engine that the other options are about; a setting gives way to an option."""
        index = self.all_platforms or self.others != "drop"
        other = self.engine == "oci" or index or self.thin or self.single_layer
        # where a toolkit image compiles, the builder is for that, and the choice has it
        aside = self.engine == "oci" and self.toolkit is not None
        if other and (aside or self.builder == settings.BUILDER.value):
            return replace(self, builder="").settled() if self.builder else self
        asked = self.builder or self.cache_from or self.cache_to
        return replace(self, engine="buildkit") if asked and self.engine == "auto" else self

    def engine_for(self, plan: BuildPlan, base: Base) -> tuple[Engine, str]:
        """The engine, and why ``auto`` is this one."""
        return engine_for(plan, base, self.engine, self.output, self.builder)


def image_command(options: ImageOptions) -> None:
    """Build an image; the last line of stdout is its name with its digest."""
    if not options.time_limit:
        _image(options)
        return
    seconds = seconds_of(options.time_limit)
    if not seconds:
        raise UsageError("--time-limit 0 leaves no time at all")
    with time_limit(seconds, options.time_limit):
        _image(options)


def _image(options: ImageOptions) -> None:
    options = options.settled()
    if options.engine not in ("auto", "buildkit", "oci"):
        engines = ("auto", "buildkit", "oci")
        guess = did_you_mean(options.engine, engines)
        raise UsageError(f"unknown engine {options.engine!r}; engines: {', '.join(engines)}{guess}")
    check_builder(options)
    check_place(options, wanted_engine(options.engine, options.output))
    if options.base:
        check_base_options(options, options.base)
    if options.all_platforms or options.others != "drop":
        from builder.cli.image_index import index_command

        index_command(options)
        return
    inputs = Inputs(
        options.layers,
        options.patches,
        options.pulls,
        refresh=options.refresh,
        compile_here=options.compile_here,
        toolkit=options.toolkit,
        single_layer=options.single_layer,
    )
    timings: dict[str, float] = {}
    began = time.monotonic()
    with console.step("base"):
        engine = wanted_engine(options.engine, options.output)
        check_docker_host(engine, options.base, options.builder)
        pull = not (options.dry_run or options.builder)
        ref = inputs.base_ref(options.base, engine, pull=pull)
        check_base_options(options, ref)
        with of_registry(ref, options.builder):
            base = inputs.identify(
                ref,
                platform=options.platform,
                python=options.python,
                site_packages=options.site_packages,
                engine="oci" if options.builder else engine,
            )
    try:
        with console.step("plan"):
            plan = inputs.plan(base)
            if not options.json or not options.dry_run:
                show_plan(plan, elsewhere=inputs.elsewhere)
        timings["plan"] = time.monotonic() - began
        refuse_nothing(plan, inputs.selection, building=True)
        refuse_plan(plan, inputs.rebuild_command("image", ref))
        inputs.refuse_stages(plan)
        if options.dry_run:
            _print_dry_run(plan, options)
            return
        if plan.pending and not options.print_dockerfile:
            options.engine_for(plan, base)  # what cannot be built is not compiled for
            compiling = time.monotonic()
            plan = inputs.compiled(plan, base)
            timings["compile"] = time.monotonic() - compiling
        if options.print_dockerfile:
            engine_text = options.engine_for(plan, base)[0].render(plan)
            _print_dockerfile(plan, inputs.stage_dockerfiles(plan) + engine_text, options)
            return
        opened = Opened(inputs.index, inputs.sources, inputs.facts.of)
        _build_and_verify(plan, base, options, timings, opened)
    finally:
        base.close()


@dataclass(frozen=True)
class Opened:
    """The index clients of this run and what the lock holds of the base, for verification."""

    index: PackageIndex
    sources: IndexSources
    facts_of: FactsOf


def _print_dry_run(plan: BuildPlan, options: ImageOptions) -> None:
    if options.json:
        print_json(plan.as_json())
    else:
        print(plan.digest)


def _print_dockerfile(plan: BuildPlan, text: str, options: ImageOptions) -> None:
    if options.json:
        print_json({"schema": 1, "plan_digest": plan.digest, "dockerfile": text})
    else:
        print(text, end="")


def _build_and_verify(
    plan: BuildPlan,
    base: Base,
    options: ImageOptions,
    timings: dict[str, float],
    opened: Opened,
) -> None:
    engine, why = options.engine_for(plan, base)
    if why:
        console.say(f"engine  {engine.name}, because {why}")
    request = _request(plan, base, options, engine)
    check_room(
        [
            *engine.needs(request),
            *(sandbox_needs(plan.base.packages, base.tree) if options.verify else ()),
        ]
    )
    report: Report | None = None
    with beside(_sandbox_for(plan, base, options, request)):
        began = time.monotonic()
        with console.step(f"build with {engine.name}"):
            built = engine.build(request)
        timings["build"] = time.monotonic() - began
        if options.verify:
            began = time.monotonic()
            with console.step("verify"):
                report = _verify(built, opened)
            timings["verify"] = time.monotonic() - began
    _print_result(plan, built, report, timings, options)
    if report is not None and report.passed():
        show_verdict(report.verdict())
    if report is not None and not report.passed():
        failed = report.of("fail")
        raise SparkBuildError(
            f"{built.pinned} was built, but verification failed: "
            + "; ".join(f"{c.name}: expected {c.expected!r}, seen {c.seen!r}" for c in failed),
            Exit.VERIFY_FAILED,
            hint=f"spark-build verify {shlex.quote(built.target or built.ref)}",
        )


def _request(plan: BuildPlan, base: Base, options: ImageOptions, engine: Engine) -> BuildRequest:
    place = place_of(plan, options, engine.name)
    return BuildRequest(
        plan=plan,
        tag=place.tag,
        output=place.output,
        push=place.push,
        base=base,
        thin=options.thin,
        cache_from=options.cache_from,
        cache_to=options.cache_to,
    )


def _sandbox_for(
    plan: BuildPlan, base: Base, options: ImageOptions, request: BuildRequest
) -> Callable[[], object] | None:
    """What makes the sandbox, where verification will need one: an engine's image is its own."""
    from builder.verify.insandbox import sandbox_maker

    in_engine = request.output is None and not request.push
    return None if in_engine or not options.verify else sandbox_maker(plan, base.tree)


def _verify(built: BuiltImage, opened: Opened) -> Report:
    """Verify what was built, read back from the built thing itself."""
    from builder.verify.opening import open_target
    from builder.verify.targets import Opening

    target = open_target(
        built.target or built.ref,
        Opening(index=opened.index, sources=opened.sources, facts_of=opened.facts_of),
    )
    try:
        report = verify(target, DEFAULT_LEVELS, CheckLines())
        show_report(report)
    finally:
        target.close()
    return report


def layer_rows(plan: BuildPlan, built: BuiltImage) -> list[dict[str, Any]]:
    """Name and state of each layer; of one that was applied, whether it was made anew."""
    rows: list[dict[str, Any]] = []
    for decision in plan.decisions:
        row: dict[str, Any] = {"name": decision.name, "state": decision.outcome.state}
        cached = built.cached.get((plan.base.platform.oci, decision.name))
        rows.append(row if cached is None else {**row, "cached": cached})
    return rows


def _print_result(
    plan: BuildPlan,
    built: BuiltImage,
    report: Report | None,
    timings: dict[str, float],
    options: ImageOptions,
) -> None:
    value: dict[str, Any] = {
        "schema": 1,
        "plan_digest": plan.digest,
        "image": built.ref,
        "digest": built.digest,
        "engine": built.engine,
        "added_bytes": built.added_bytes,
        "layers": layer_rows(plan, built),
        "verify": report.as_json() if report else {"passed": False, "checks": [], "not_run": 1},
        "timings": {name: round(seconds, 3) for name, seconds in timings.items()},
    }
    started = run_it(plan, built, write_dockerfile(plan, built))
    value["run"] = started.as_json()
    if plan.base.kind == "pypi":
        value["overlay"] = True
    if options.json:
        print_json(value)
        return
    if report is None or report.passed():
        console.say(f"\n{started.text()}\n")
    if not options.verify:
        console.warn(
            f"not verified (--no-verify); try: spark-build verify {built.target or built.ref}"
        )
    print(built.pinned, flush=True)
