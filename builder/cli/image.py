"""``spark-build image``: build a patched image, and verify it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.cli.units import seconds_of
from builder.common.console import console, print_json
from builder.common.shutdown import time_limit
from builder.errors import UsageError
from builder.pipeline.documents import DockerfileText, IndexPlans
from builder.pipeline.image import build_image, check_options, dockerfile_of, planned_image
from builder.pipeline.result import plans_digest
from builder.pipeline.show import show_verdict

if TYPE_CHECKING:
    from builder.pipeline.image import PlannedBuild
    from builder.pipeline.options import ImageOptions
    from builder.pipeline.result import BuildResult


def image_command(options: ImageOptions, limit: str = "") -> None:
    """Build an image within ``limit``, and print its name with its digest as the last line."""
    if not limit:
        _image(options)
        return
    seconds = seconds_of(limit)
    if not seconds:
        raise UsageError("--time-limit must be more than 0")
    with time_limit(seconds, limit):
        _image(options)


def _image(options: ImageOptions) -> None:
    options = check_options(options)
    if options.is_index:
        from builder.pipeline.index import build_images, planned_index

        plan, build = planned_index, build_images
    else:
        plan, build = planned_image, build_image
    with plan(options) as planned:
        if options.dry_run:
            _print_plan(planned, options)
        elif options.print_dockerfile:
            _print_dockerfile(planned, options)
        else:
            _print_result(build(options, planned), options)


def _print_plan(planned: PlannedBuild, options: ImageOptions) -> None:
    entries = planned.entries
    if not options.is_index:
        plan = entries[0].plan
        print_json(plan.document) if options.json else print(plan.digest)
    elif options.json:
        print_json(
            IndexPlans(
                plan_digest=plans_digest(entries),
                plans=tuple(entry.plan.document for entry in entries),
                timings={step: round(took, 3) for step, took in planned.timings.items()},
            )
        )
    else:
        print(plans_digest(entries), flush=True)


def _print_dockerfile(planned: PlannedBuild, options: ImageOptions) -> None:
    text = dockerfile_of(options, planned)
    if options.json:
        digest = planned.entries[0].plan.digest
        print_json(DockerfileText(plan_digest=digest, dockerfile=text))
    else:
        print(text, end="")


def _print_result(result: BuildResult, options: ImageOptions) -> None:
    """Print the image, how to run it and what is proven; exit 5 if verification failed."""
    if options.json:
        print_json(result.document())
    else:
        if not result.failed:
            console.say(f"\n{result.started.text()}\n")
        if not options.verify:
            target = result.built.target or result.built.ref
            console.warn(f"not verified (--no-verify); try: spark-build verify {target}")
        print(result.built.pinned, flush=True)
    for entry, report in zip(result.entries, result.reports, strict=False):
        if result.is_index:
            show_verdict(report.verdict(), entry.platform)
        elif report.passed():
            show_verdict(report.verdict())
    result.refuse_failed()
