"""``spark-build image`` for the several platforms of a base's index."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from builder.applier.digests import canonical_json, sha256_hex
from builder.beside import beside
from builder.cli.image import layer_rows
from builder.cli.inputs import Inputs
from builder.cli.place import Place, place_of
from builder.cli.show import CheckLines, print_json, show_plan, show_report, show_verdict
from builder.console import console
from builder.engines.model import BuildRequest
from builder.engines.multi import IndexRequest, build_index
from builder.engines.oci import OciEngine
from builder.engines.runit import run_it
from builder.errors import Exit, NotServed, SparkBuildError, UsageError
from builder.planner import refuse_nothing, refuse_plan
from builder.registry.locations import Locations
from builder.registry.manifests import is_index
from builder.registry.platforms import platform_name
from builder.room import check_room
from builder.rootfs.image import PREFERRED, image_entries, platform_of, subjects
from builder.verify.levels import DEFAULT_LEVELS
from builder.verify.run import verify
from builder.verify.sandbox import sandbox_needs

if TYPE_CHECKING:
    from builder.bases.model import Base
    from builder.cli.image import ImageOptions
    from builder.engines.multi import BuiltIndex
    from builder.model import BuildPlan
    from builder.verify.model import Report

#: What vLLM has wheels for.
_PLATFORMS = ("linux/arm64", "linux/amd64")


@dataclass(frozen=True)
class Planned:
    """One entry of the base's index that will be patched."""

    platform: str
    base: Base
    plan: BuildPlan


def index_command(options: ImageOptions) -> None:
    """Patch the entries of an index that the profile serves; the last line names the new index."""
    if options.others not in ("keep", "drop"):
        raise UsageError(f"--others {options.others!r} is neither keep nor drop")
    if options.base is None or options.base.startswith(("pypi:", "dir:")):
        raise UsageError("--all-platforms and --others are about an index: name it with --base")
    if options.compile_here:
        raise UsageError(
            "--compile makes modules for this machine's architecture alone",
            hint="one platform at a time: --platform, without --all-platforms and --others",
        )
    if options.engine == "buildkit":
        raise UsageError("the buildkit engine builds for one platform", hint="--engine oci")
    inputs = Inputs(
        options.layers,
        options.patches,
        options.pulls,
        refresh=options.refresh,
        single_layer=options.single_layer,
    )
    began = time.monotonic()
    planned: list[Planned] = []
    try:
        for platform in _platforms(options):
            found = _plan(platform, options, inputs)
            if found is not None:
                planned.append(found)
        if not planned:
            raise SparkBuildError(
                f"nothing to do: no image of {options.base} is one that this profile serves",
                Exit.NOTHING_TO_DO,
            )
        timings = {"plan": time.monotonic() - began}
        if options.dry_run:
            _print(options, planned, None, [], timings)
            return
        _build(options, planned, timings, inputs)
    finally:
        for one in planned:
            one.base.close()


def _platforms(options: ImageOptions) -> list[str]:
    """The platforms that are to be patched."""
    assert options.base is not None
    with Locations() as locations:
        place = locations.open(options.base)
        top = place.image.manifest(place.reference)
    if not is_index(top):
        raise UsageError(f"{options.base} is one image, not an index of several")
    has = [name for e in image_entries(top) if (name := platform_of(e)) in _PLATFORMS]
    rest = [name for e in subjects(top) if (name := platform_name(e.platform)) not in has]
    if rest:
        become = "kept as they are" if options.others == "keep" else "left out (see --others)"
        console.say(f"  {', '.join(rest)}: {become}")
    if options.all_platforms:
        if options.platform is not None:
            raise UsageError("--platform and --all-platforms contradict each other")
        return list(dict.fromkeys(has))
    return [options.platform or PREFERRED]


def _plan(platform: str, options: ImageOptions, inputs: Inputs) -> Planned | None:
    """The plan for one entry, or None where the profile does not concern it."""
    assert options.base is not None
    with console.step(f"base and plan for {platform}"):
        base = inputs.identify(options.base, platform=platform, engine="oci")
        try:
            plan = inputs.plan(base)
            if not options.json:
                show_plan(plan)
            refuse_nothing(plan, inputs.selection, building=True)
            refuse_plan(plan, inputs.rebuild_command("image", options.base))
        except SparkBuildError as error:
            base.close()
            if error.code != Exit.NOTHING_TO_DO and not isinstance(error, NotServed):
                raise
            console.say(f"  {platform} is not patched: {error}")
            return None
        except BaseException:
            base.close()
            raise
    return Planned(platform, base, plan)


def _build(
    options: ImageOptions,
    planned: list[Planned],
    timings: dict[str, float],
    inputs: Inputs,
) -> None:
    place = _place(options, planned)
    request = IndexRequest(
        requests=tuple(
            BuildRequest(
                plan=one.plan,
                tag=place.tag,
                base=one.base,
                output=place.output,
                push=place.push,
                thin=options.thin,
            )
            for one in planned
        ),
        tag=place.tag,
        keep=options.others == "keep",
        output=place.output,
        push=place.push,
        thin=options.thin,
    )
    engine = OciEngine()
    needs = [need for single in request.requests for need in engine.needs(single)]
    check_room(
        [
            *needs,
            *(
                sandbox_needs(planned[0].plan.base.packages, planned[0].base.tree)
                if options.verify
                else ()
            ),
        ]
    )
    from builder.verify.insandbox import sandbox_maker

    first = planned[0]
    reports: list[Report] = []
    ahead = sandbox_maker(first.plan, first.base.tree) if options.verify else None
    with beside(ahead):
        began = time.monotonic()
        with console.step("build with oci"):
            built = build_index(request)
        timings["build"] = time.monotonic() - began
        if options.verify:
            began = time.monotonic()
            for one in planned:
                with console.step(f"verify {one.platform}"):
                    reports.append(_verify(one, built, inputs))
            timings["verify"] = time.monotonic() - began
        else:
            console.warn("not verified (--no-verify)")
    _print(options, planned, built, reports, timings)
    for one, report in zip(planned, reports, strict=False):
        show_verdict(report.verdict(), one.platform)
    failed = [r.target for r in reports if not r.passed()]
    if failed:
        raise SparkBuildError(
            f"{built.image.pinned} was built, but verification failed for {', '.join(failed)}",
            Exit.VERIFY_FAILED,
            hint=f"spark-build verify {shlex.quote(failed[0])}",
        )


def _place(options: ImageOptions, planned: list[Planned]) -> Place:
    """Where the index goes; without a tag, its name comes from all of its plans."""
    place = place_of(planned[0].plan, options, "oci")
    if options.tag is not None:
        return place
    name = place.tag.rpartition("-")[0]
    return replace(place, tag=f"{name}-{_digest(planned).removeprefix('sha256:')[:12]}")


def _digest(planned: list[Planned]) -> str:
    """One digest for all plans of an index."""
    plans = [[one.platform, one.plan.digest] for one in planned]
    return f"sha256:{sha256_hex(canonical_json(plans))}"


def _verify(one: Planned, built: BuiltIndex, inputs: Inputs) -> Report:
    from builder.verify.opening import open_target
    from builder.verify.targets import Opening

    assert one.base.opened is not None
    digest = built.digests[one.base.opened.image.manifest.digest]
    ref = built.image.ref
    name = f"{ref}@{digest}" if ref.startswith("oci:") else f"docker://{ref}@{digest}"
    opening = Opening(index=inputs.index, sources=inputs.sources, facts_of=inputs.facts.of)
    target = open_target(name, opening)
    try:
        report = verify(target, DEFAULT_LEVELS, CheckLines())
        show_report(report)
    finally:
        target.close()
    return report


def _print(
    options: ImageOptions,
    planned: list[Planned],
    built: BuiltIndex | None,
    reports: list[Report],
    timings: dict[str, float],
) -> None:
    started = None if built is None else run_it(planned[0].plan, built.image)
    if not options.json:
        if started is not None and all(report.passed() for report in reports):
            console.say(f"\n{started.text()}\n")
        print(_digest(planned) if built is None else built.image.pinned, flush=True)
        return
    value: dict[str, Any] = {
        "schema": 1,
        "plan_digest": _digest(planned),
        "plans": [one.plan.as_json() for one in planned],
        "timings": {name: round(seconds, 3) for name, seconds in timings.items()},
    }
    if built is not None and started is not None:
        checks = [check.as_json() for report in reports for check in report.checks]
        passed = bool(reports) and all(report.passed() for report in reports)
        value |= {
            "image": built.image.ref,
            "digest": built.image.digest,
            "engine": built.image.engine,
            "added_bytes": built.image.added_bytes,
            "layers": [
                {**row, "platform": one.platform}
                for one in planned
                for row in layer_rows(one.plan, built.image)
            ],
            "verify": {
                "passed": passed,
                "checks": checks,
                "verdicts": {
                    one.platform: report.verdict().as_json()
                    for one, report in zip(planned, reports, strict=False)
                },
            },
            "run": started.as_json(),
        }
    print_json(value)
