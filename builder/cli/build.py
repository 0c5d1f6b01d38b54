"""``spark-build plan``, ``image``, ``bake``, ``lock``, ``verify``, ``apply`` and ``revert``.

Modules that run a command are imported when it runs, to keep ``--help`` fast.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from builder.cli.command import PlainHttp, command, seconds_of
from builder.common.console import console, counted, megabytes, print_json, tell
from builder.common.options import Argument, Fields, Json, Option, OptionalLayers
from builder.errors import UsageError
from builder.pipeline.imageoptions import ImageOptions
from builder.pipeline.options import BakeOptions, PlanOptions
from builder.pipeline.verifyoptions import VerifyOptions

if TYPE_CHECKING:
    from builder.pipeline.image import BuildResult, PlannedBuild

_VERDICTS = {"proven": "verified", "not-proven": "NOT PROVEN", "failed": "failed"}


@command(
    "plan",
    "spark-build plan --layers b12x-full --base pypi:vllm==0.20.1",
    "spark-build plan -l b12x-full -b vllm/vllm-openai:v0.20.1 --json",
    "spark-build plan --with-pr vllm-project/vllm#40082 -b pypi:vllm==0.21.0",
)
def plan(
    options: Annotated[PlanOptions, Fields(without=("single_layer", "upgrade"))],
    _plain_http: PlainHttp = (),
    *,
    json: Json = False,
) -> None:
    """Plan and print; a plan that cannot be built is printed before the error."""
    from builder.layers.planner import refuse_nothing, refuse_plan, refuse_unserved
    from builder.pipeline.inputs import inputs_of
    from builder.pipeline.show import show_plan

    inputs = inputs_of(options)
    ref = inputs.base_ref()
    planning = inputs.identify(ref)
    try:
        build_plan = planning.plan()
    finally:
        planning.close()
    if json:
        print_json(build_plan.document)
    else:
        refuse_unserved(build_plan, inputs.selection)
        with console.as_data():
            show_plan(build_plan, elsewhere=planning.elsewhere)
    console.detail(f"read {megabytes(inputs.index.bytes_read)} from the package index")
    refuse_nothing(build_plan, inputs.selection)
    refuse_plan(build_plan, planning.rebuild_command("image"))


@command(
    "image",
    "spark-build image --layers b12x-full",
    "spark-build image -l b12x-full -b vllm/vllm-openai:v0.33.0 -t vllm-spark",
    "spark-build image -l b12x-full --engine oci --output oci:out",
    "spark-build image -l b12x-full -b docker://HOST/vllm:1 --push -t HOST/me:1",
    "spark-build image -l b12x-full --builder tcp://buildkitd:1234 -t vllm-spark",
    "IMG=$(spark-build image -l marlin -q)",
    detail="The last line of stdout is the image's name with its digest.",
)
def image(options: ImageOptions, _plain_http: PlainHttp = ()) -> None:
    """Build an image within its time limit, and print its name with its digest last."""
    from builder.common.shutdown import time_limit
    from builder.pipeline.image import check_options

    limit = options.time_limit
    seconds = seconds_of(limit) if limit else None
    if seconds == 0:
        raise UsageError("--time-limit must be more than 0")
    with time_limit(seconds, limit) if limit and seconds else nullcontext():
        options = check_options(options)
        if options.is_index:
            from builder.pipeline.image import build_images as build
            from builder.pipeline.image import planned_index as planning
        else:
            from builder.pipeline.image import build_image as build
            from builder.pipeline.image import planned_image as planning
        with planning(options) as planned:
            if options.dry_run:
                _print_plan(planned, options)
            elif options.print_dockerfile:
                _print_dockerfile(planned, options)
            else:
                _print_result(build(options, planned), options)


def _print_plan(planned: "PlannedBuild", options: ImageOptions) -> None:
    from builder.pipeline.image import IndexPlans, plans_digest

    entries = planned.entries
    if not options.is_index:
        first = entries[0].plan
        print_json(first.document) if options.json else print(first.digest)
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


def _print_dockerfile(planned: "PlannedBuild", options: ImageOptions) -> None:
    from builder.pipeline.image import DockerfileText, dockerfile_of

    text = dockerfile_of(options, planned)
    if options.json:
        digest = planned.entries[0].plan.digest
        print_json(DockerfileText(plan_digest=digest, dockerfile=text))
    else:
        print(text, end="")


def _print_result(result: "BuildResult", options: ImageOptions) -> None:
    """Print the image, how to run it and what is proven; exit 5 if verification failed."""
    from builder.pipeline.show import show_verdict

    if options.json:
        print_json(result.document())
    else:
        if not result.failed:
            console.say(f"\n{result.started.text()}\n")
        if options.no_verify:
            target = result.built.subject
            console.warn(f"not verified (--no-verify); try: spark-build verify {target}")
        print(result.built.pinned, flush=True)
    for entry, report in zip(result.entries, result.reports, strict=False):
        if result.is_index:
            show_verdict(report.verdict(), entry.platform)
        elif report.passed():
            show_verdict(report.verdict())
    result.refuse_failed()


@command(
    "bake",
    "spark-build bake -l b12x-full -b docker://vllm/vllm-openai:v0.33.0 -o out",
    "spark-build bake --images images.json --tag-prefix HOST/me/vllm -o out",
    "spark-build bake --images images.json --matrix",
    "spark-build bake --images images.json --target marlin-vllm-v1 -o out",
)
def bake(
    options: BakeOptions,
    output: Annotated[
        Path | None,
        Option("A new folder for docker-bake.json and a context for each image.", "DIR", "-o"),
    ] = None,
    _plain_http: PlainHttp = (),
    *,
    matrix: Annotated[
        bool, Option("Only print the list of images, for a matrix of GitHub Actions.")
    ] = False,
    json: Json = False,
) -> None:
    """Write the folder and print its name last; with ``matrix``, list the images."""
    from json import dumps

    from builder.common.document import plain
    from builder.pipeline.bake import bake_jobs, write_bake

    if matrix:
        if output is not None:
            raise UsageError(f"--matrix writes nothing, so --output {output} has no effect")
        jobs = bake_jobs(options)
        print_json(jobs) if json else print(dumps(plain(jobs)["include"]))
        return
    if output is None:
        raise UsageError("no folder to write to (--matrix writes none)", hint="--output DIR")
    baked = write_bake(options, output)
    if json:
        print_json(baked)
        return
    console.say(f"\nBuild {len(baked.targets)} images:\n    {baked.command}\n")
    print(baked.file)


@command(
    "lock",
    "spark-build lock -l b12x-full -b pypi:vllm==0.20.1",
    "spark-build lock --with-pr vllm-project/vllm#40082 -b pypi:vllm==0.21.0",
    "spark-build lock --check",
    "spark-build lock --upgrade",
    "spark-build lock --diff -b pypi:vllm==0.33.0",
    detail="Writes spark-build.lock: base digest, versions, and sha256 of every input.\n\n"
    "Without --layers and --with-pr, the entries of the lock are locked again.",
)
def lock(
    options: Annotated[
        PlanOptions,
        Fields(
            "layers", "with_pr", "base", "platform", "python", "patches", "forge_clone", "upgrade"
        ),
    ],
    _plain_http: PlainHttp = (),
    *,
    check: Annotated[
        bool, Option("Only check whether the lock is up to date (exit 9 if not).")
    ] = False,
    diff: Annotated[
        bool,
        Option("Only say what an upgrade would change: to --base, or of the locked bases."),
    ] = False,
    json: Json = False,
) -> None:
    """Write the lock, or with ``check`` only check it (exit 9 if stale)."""
    from builder.pipeline.locking import lock_requests

    if diff:
        _print_diff(options, check=check, json=json)
        return
    done = lock_requests(replace(options, refresh=options.upgrade), check=check)
    if json:
        print_json(done)
    if check:
        done.refuse_stale()
        if not json:
            tell(f"{done.lock} is up to date for {len(done.requests)}")
        return
    if json:
        return
    for key, lines in done.changes.items():
        console.say(f"  {key}")
        for line in lines:
            console.say(f"    {line}")
    changed = "" if done.written else ", nothing changed"
    tell(f"{done.lock}: {len(done.requests)} locked{changed}")


def _print_diff(options: PlanOptions, *, check: bool, json: bool) -> None:
    from builder.pipeline.locking import lock_diff

    if check:
        raise UsageError("--check and --diff exclude each other", hint="leave out --check")
    document = lock_diff(options)
    if json:
        print_json(document)
        return
    for upgrade in document.upgrades:
        tell(f"{upgrade.request}, to {upgrade.to}")
        for line in upgrade.lines():
            tell(f"  {line}")


@command(
    "verify",
    "spark-build verify oci:out",
    "spark-build verify my/image:tag --level dispatch --html evidence.html",
    "spark-build verify my/image:tag --prove-necessary",
    "spark-build verify pypi:vllm==0.33.0 --layers b12x-full",
    "spark-build verify oci:out --level model --model qwen3-30b-a3b",
)
def verify(options: VerifyOptions, _plain_http: PlainHttp = (), *, json: Json = False) -> None:
    """Verify a target; exit 5 if a check failed or a named level did not run."""
    from builder.pipeline.show import CheckLines, show_report, show_verdict
    from builder.pipeline.verify import verify_target
    from builder.serving.preflight import models_to_build

    choose = partial(models_to_build, options.model, options.models)
    done = verify_target(options, None if json else CheckLines(), choose)
    if json:
        print_json(done.report.document(done.required))
    else:
        show_report(done.report)
    verdict = done.report.verdict(done.required)
    if done.passed:
        if not json:
            print(f"{_VERDICTS[verdict.status]} {options.target}", flush=True)
        show_verdict(verdict)
    done.refuse_failed(options.target)


Directory = Annotated[Path, Argument("site-packages, or a virtual environment.", "DIR")]
DryRun = Annotated[bool, Option("Show what would change, without writing anything.", names="-n")]


@command(
    "apply",
    "spark-build apply ~/vllm-env --layers b12x-full --dry-run",
    "spark-build apply ~/vllm-env --layers b12x-full",
    detail="A layer is applied completely or not at all.",
)
def apply(
    directory: Directory,
    options: Annotated[
        PlanOptions,
        Fields(
            "layers", "with_pr", "patches", "forge_clone", "locked",
            "compile_here", "toolkit", "builder",
        ),
    ],
    *,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Judge all layers, stop if one cannot be applied, then apply them one by one."""
    from builder.pipeline.apply import apply_layers

    apply_layers(directory, options, dry_run=dry_run, json=json)


@command(
    "revert",
    "spark-build revert ~/vllm-env",
    "spark-build revert ~/vllm-env --layers vllm-b12x-backend --dry-run",
    detail="Removes all layers unless some are named.",
)
def revert(
    directory: Directory,
    options: Annotated[PlanOptions, Fields("layers", "patches", layers=OptionalLayers)],
    *,
    force: Annotated[
        bool, Option("Restore the original files even if they were edited later.")
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Restore the original files."""
    from builder.pipeline.apply import revert_layers

    done = revert_layers(directory, options, force=force, dry_run=dry_run)
    if json:
        print_json(done)
        return
    for name in done.reverted:
        console.say(f"  {'would revert' if dry_run else 'reverted'}  {name}")
    would = "would be " if dry_run else ""
    tell(f"{counted(len(done.reverted), 'layer')} {would}reverted in {done.directory}")
