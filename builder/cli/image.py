"""``spark-build image``: plan, render, build, verify, push."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.cli import options as opt
from builder.cli.show import print_json, show_plan, show_report
from builder.console import console
from builder.engines import BuildRequest, get_engine
from builder.errors import EngineError, Exit, SparkBuildError, UsageError
from builder.index import PackageIndex
from builder.planner import make_plan, refuse_nothing, refuse_plan
from builder.verify import DEFAULT_LEVELS, Report, verify
from builder.wheels import IndexSources

if TYPE_CHECKING:
    from builder.engines import BuiltImage, Engine
    from builder.model import BuildPlan


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """What the command line said."""

    layers: list[str]
    base: str | None
    platform: str | None
    python: str | None
    site_packages: str | None
    patches: list[Path] | None
    engine: str
    tag: str | None
    output: str | None
    push: bool
    verify: bool
    dry_run: bool
    print_dockerfile: bool
    refresh: bool
    json: bool


def image_command(options: ImageOptions) -> None:
    """Build an image; the last line of stdout is its name with its digest."""
    if options.engine not in ("auto", "buildkit", "oci"):
        raise UsageError(f"unknown engine {options.engine!r}; engines: auto, buildkit, oci")
    _, selection = opt.select(options.layers, options.patches)
    index = PackageIndex(refresh=options.refresh)
    sources = IndexSources(index)
    timings: dict[str, float] = {}
    began = time.monotonic()
    with console.step("base"):
        ref = options.base or opt.default_base(selection, options.engine, pull=not options.dry_run)
        base = opt.identify_base(
            ref,
            selection,
            index,
            platform=options.platform,
            python=options.python,
            site_packages=options.site_packages,
        )
    try:
        with console.step("plan"):
            plan = make_plan(base, selection, sources)
            if not options.json or not options.dry_run:
                show_plan(plan)
        timings["plan"] = time.monotonic() - began
        refuse_nothing(plan, selection, building=True)
        refuse_plan(plan)
        if options.dry_run:
            _print_dry_run(plan, options)
            return
        _build_and_verify(plan, options, timings, Opened(index, sources))
    finally:
        base.close()


@dataclass(frozen=True)
class Opened:
    """The index clients of this run, for verification."""

    index: PackageIndex
    sources: IndexSources


def _print_dry_run(plan: BuildPlan, options: ImageOptions) -> None:
    if options.json:
        print_json(plan.as_json())
    else:
        print(plan.digest)


def _build_and_verify(
    plan: BuildPlan, options: ImageOptions, timings: dict[str, float], opened: Opened
) -> None:
    engine = _engine_for(plan, options)
    if options.print_dockerfile:
        print(engine.render(plan), end="")
        return
    request = _request(plan, options, engine)
    began = time.monotonic()
    with console.step(f"build with {engine.name}"):
        built = engine.build(request)
    timings["build"] = time.monotonic() - began
    report: Report | None = None
    if options.verify:
        began = time.monotonic()
        with console.step("verify"):
            report = _verify(built, opened)
            show_report(report)
        timings["verify"] = time.monotonic() - began
    _print_result(plan, built, report, timings, options)
    if report is not None and not report.passed():
        failed = report.of("fail")
        raise SparkBuildError(
            f"{built.pinned} was built, but verification failed: "
            + "; ".join(f"{c.name}: expected {c.expected!r}, seen {c.seen!r}" for c in failed),
            Exit.VERIFY_FAILED,
            hint=f"spark-build verify {built.ref}",
        )


def _engine_for(plan: BuildPlan, options: ImageOptions) -> Engine:
    wanted = options.engine
    if wanted == "auto" and options.output and options.output.startswith("oci:"):
        wanted = "oci"
    engine = get_engine(wanted)
    refusal = engine.refuses(plan)
    if refusal:
        raise EngineError(refusal, hint="--engine buildkit, with a Docker Engine that answers")
    return engine


def default_tag(plan: BuildPlan) -> str:
    """``spark-build/<profile>:<vllm>-<plan12>``: the same plan always has the same name."""
    vllm = plan.base.packages.get("vllm", "unknown").replace("+", "-")
    return f"spark-build/{plan.name}:{vllm}-{plan.digest.removeprefix('sha256:')[:12]}"


def _request(plan: BuildPlan, options: ImageOptions, engine: Engine) -> BuildRequest:
    tag = options.tag or default_tag(plan)
    if not re.fullmatch(r"[a-z0-9][a-zA-Z0-9._/:-]*", tag):
        raise UsageError(f"--tag {tag!r} is not an image name")
    output = options.output or ("docker" if engine.name == "buildkit" else "")
    push = options.push or output == "registry"
    if output in ("docker", "registry"):
        if engine.name == "oci":
            raise EngineError(
                f"--output {output} needs a Docker Engine; the oci engine writes a layout",
                hint="--output oci:DIR",
            )
        return BuildRequest(plan=plan, tag=tag, push=push)
    if engine.name == "buildkit":
        raise UsageError(
            f"--output {output!r} is not what the buildkit engine makes",
            hint="--output docker or registry; or --engine oci --output oci:DIR",
        )
    if output and not output.startswith("oci:"):
        raise UsageError(f"--output {output!r} is not docker, oci:DIR or registry")
    vllm = plan.base.packages.get("vllm", "unknown")
    folder = Path(output.removeprefix("oci:") or f"spark-build-{plan.name}-{vllm}")
    return BuildRequest(plan=plan, tag=tag, output=folder, push=push)


def _verify(built: BuiltImage, opened: Opened) -> Report:
    """Verify what was built, read back from the built thing itself."""
    from builder.verify.targets import Opening, open_target

    target = open_target(built.ref, Opening(index=opened.index, sources=opened.sources))
    try:
        return verify(target, DEFAULT_LEVELS)
    finally:
        target.close()


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
        "layers": [{"name": d.name, "state": d.outcome.state} for d in plan.decisions],
        "verify": report.as_json() if report else {"passed": False, "checks": [], "not_run": 1},
        "timings": {name: round(seconds, 3) for name, seconds in timings.items()},
    }
    if options.json:
        print_json(value)
        return
    if plan.base.kind == "pypi":
        from builder.engines.oci import overlay_recipe

        console.say("\nOn the Spark, put it onto the official image with this Dockerfile:\n")
        for line in overlay_recipe(plan, built.ref).splitlines():
            console.say(f"    {line}")
        console.say("")
    if not options.verify:
        console.warn("not verified (--no-verify)")
    print(built.pinned)
