"""Options of ``plan``, ``image``, ``verify`` and ``diagnose``.

In this and the other option modules annotations are not strings: typer would evaluate each of
them at every start, which takes a tenth of ``--help``.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from builder import settings
from builder.cli import complete
from builder.cli import options as opt
from builder.cli.commands import BUILD, INSPECT
from builder.cli.help import App, examples

main_app = App()


@main_app.command(
    rich_help_panel=BUILD,
    epilog=examples(
        "spark-build plan --layers b12x-full --base pypi:vllm==0.20.1",
        "spark-build plan -l b12x-full -b vllm/vllm-openai:v0.20.1 --json",
        "spark-build plan --with-pr vllm-project/vllm#40082 -b pypi:vllm==0.21.0",
    ),
)
def plan(
    layers: opt.LayersOrPulls = None,
    with_pr: opt.WithPr = None,
    base: opt.BaseRef = None,
    platform: opt.PlatformName = None,
    python: opt.PythonVersion = None,
    site_packages: opt.SitePackages = None,
    patches: opt.Patches = None,
    compile_here: opt.Compile = False,
    toolkit: opt.Toolkit = None,
    builder: opt.Builder = None,
    forge_clone: opt.ForgeClone = None,
    locked: opt.Locked = False,
    refresh: opt.Refresh = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Show what each layer would do to a base."""
    from builder.cli.plan import plan_command
    from builder.pipeline.options import PlanOptions, toolkit_choice

    options = replace(
        PlanOptions.selecting(layers, with_pr, forge_clone, patches),
        base=base,
        platform=platform,
        python=python,
        site_packages=site_packages,
        locked=locked,
        refresh=refresh,
        compile_here=compile_here,
        toolkit=toolkit_choice(toolkit, builder, compiling=compile_here),
    )
    plan_command(options, json=json)


@main_app.command(
    rich_help_panel=BUILD,
    epilog=examples(
        "spark-build image --layers b12x-full",
        "spark-build image -l b12x-full -b vllm/vllm-openai:v0.33.0 -t vllm-spark",
        "spark-build image -l b12x-full --engine oci --output oci:out",
        "spark-build image -l b12x-full -b docker://HOST/vllm:1 --push -t HOST/me:1",
        "spark-build image -l b12x-full --builder tcp://buildkitd:1234 -t vllm-spark",
        "IMG=$(spark-build image -l marlin -q)",
    ),
)
def image(
    layers: opt.LayersOrPulls = None,
    with_pr: opt.WithPr = None,
    base: opt.BaseRef = None,
    platform: opt.PlatformName = None,
    python: opt.PythonVersion = None,
    site_packages: opt.SitePackages = None,
    patches: opt.Patches = None,
    engine: Annotated[
        str,
        typer.Option(
            help="auto (Docker when it answers), buildkit, or oci (no daemon).",
            metavar="|".join(complete.ENGINE_NAMES),
            autocompletion=complete.one_of(*complete.ENGINE_NAMES),
        ),
    ] = "auto",
    builder: opt.Builder = None,
    cache_from: Annotated[
        list[str] | None,
        typer.Option(
            help="Import finished steps from this cache: HOST/NAME:TAG, or in BuildKit's form, "
            "type=registry,ref=...; may be repeated (buildkit engine).",
            metavar="CACHE",
        ),
    ] = None,
    cache_to: Annotated[
        list[str] | None,
        typer.Option(
            help="Export every finished step to this cache; may be repeated (buildkit engine).",
            metavar="CACHE",
        ),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option("--tag", "-t", help="Name of the image.", metavar="[HOST/]NAME[:TAG]"),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="Where the image is written: a Docker Engine, an OCI layout, or its registry.",
            metavar="docker|oci:DIR|registry",
            autocompletion=complete.one_of("docker", "oci:", "registry"),
        ),
    ] = None,
    push: Annotated[bool, typer.Option("--push", help="Push the image after it is built.")] = False,
    thin: Annotated[
        bool, typer.Option("--thin", help="Leave the base image's blobs out of oci:DIR.")
    ] = False,
    single_layer: Annotated[
        bool, typer.Option("--single-layer", help="One layer for all patches (oci engine).")
    ] = False,
    all_platforms: Annotated[
        bool, typer.Option("--all-platforms", help="Patch every platform of the base's index.")
    ] = False,
    others: Annotated[
        str,
        typer.Option(
            metavar="keep|drop",
            help="What to do with platforms of the index that are not patched.",
            autocompletion=complete.one_of("keep", "drop"),
        ),
    ] = "drop",
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Skip verification of the built image.")
    ] = False,
    trust_image: opt.TrustImage = False,
    compile_here: opt.Compile = False,
    toolkit: opt.Toolkit = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            envvar=settings.TIME_LIMIT.name,
            metavar="TIME",
            help="Stop after this time (90s, 45m, 2h) with exit 7, leaving nothing half-written.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only print the plan.")] = False,
    print_dockerfile: Annotated[
        bool, typer.Option("--print-dockerfile", help="Print the Dockerfile, and stop.")
    ] = False,
    forge_clone: opt.ForgeClone = None,
    locked: opt.Locked = False,
    refresh: opt.Refresh = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Build a patched image and verify it.

    The last line of stdout is the image's name with its digest.
    """
    from builder.cli.image import image_command
    from builder.pipeline.options import ImageOptions, PlanOptions, toolkit_choice

    options = replace(
        PlanOptions.selecting(layers, with_pr, forge_clone, patches),
        base=base,
        platform=platform,
        python=python,
        site_packages=site_packages,
        locked=locked,
        refresh=refresh,
        compile_here=compile_here,
        toolkit=toolkit_choice(toolkit, builder, compiling=compile_here),
        single_layer=single_layer,
    )
    image_command(
        ImageOptions(
            plan=options,
            engine=engine,
            builder=builder or "",
            cache_from=tuple(cache_from or ()),
            cache_to=tuple(cache_to or ()),
            tag=tag,
            output=output,
            push=push,
            thin=thin,
            all_platforms=all_platforms,
            others=others,
            verify=not no_verify,
            trust_image=trust_image,
            dry_run=dry_run,
            print_dockerfile=print_dockerfile,
            json=json,
        ),
        limit=time_limit or "",
    )


@main_app.command(
    rich_help_panel=INSPECT,
    epilog=examples(
        "spark-build verify oci:out",
        "spark-build verify my/image:tag --level dispatch --html evidence.html",
        "spark-build verify my/image:tag --prove-necessary",
        "spark-build verify pypi:vllm==0.33.0 --layers b12x-full",
    ),
)
def verify(
    target: Annotated[
        str,
        typer.Argument(
            help="IMAGE, oci:DIR, pypi:vllm==VERSION, or dir:SITE_PACKAGES.", metavar="TARGET"
        ),
    ],
    layers: opt.OptionalLayers = None,
    with_pr: opt.WithPr = None,
    level: opt.Level = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            help="Also run these levels; they must run.",
            metavar="LEVEL[,LEVEL...]",
            autocompletion=complete.levels,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write the evidence as a self-contained HTML page.", metavar="FILE"),
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(help="Append the evidence as Markdown, for CI summaries.", metavar="FILE"),
    ] = None,
    prove_necessary: Annotated[
        bool,
        typer.Option(
            "--prove-necessary",
            help="Remove each layer in turn and show which check then fails (adds codegen).",
        ),
    ] = False,
    bench: Annotated[
        bool,
        typer.Option("--bench", help="Level serve: also measure tokens/s and time to first token."),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(help="Evidence (JSON) with a benchmark to compare with.", metavar="FILE"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Level serve: use this model instead of the tiny generated ones.", metavar="MODEL"
        ),
    ] = None,
    serve_args: Annotated[
        str,
        typer.Option(
            help="Level serve: extra arguments for vllm serve, as one string.", metavar="ARGS"
        ),
    ] = "",
    trust_image: opt.TrustImage = False,
    platform: opt.PlatformName = None,
    patches: opt.Patches = None,
    forge_clone: opt.ForgeClone = None,
    locked: opt.Locked = False,
    refresh: opt.Refresh = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Check an image's contents and the kernels it selects."""
    from builder.cli.verify import verify_command
    from builder.pipeline.options import PlanOptions, VerifyOptions
    from builder.proof.ongpu import GpuOptions

    options = replace(
        PlanOptions.selecting(layers, with_pr, forge_clone, patches),
        platform=platform,
        locked=locked,
        refresh=refresh,
    )
    verify_command(
        VerifyOptions(
            target=target,
            plan=options,
            levels=tuple(level or ()),
            require=tuple(require or ()),
            html=html,
            summary=summary,
            prove_necessary=prove_necessary,
            gpu=GpuOptions(bench=bench, against=against, model=model, serve_args=serve_args),
            trust_image=trust_image,
        ),
        json=json,
    )


@main_app.command(
    rich_help_panel=INSPECT,
    epilog=examples(
        "docker logs NAME 2>&1 | spark-build diagnose -",
        "spark-build diagnose server.log --vllm 0.25.0",
        "spark-build diagnose head.log worker.log",
        "spark-build diagnose show no-kernel-image",
        note="Exit 5: the log shows a failure, or the server never became ready. "
        "Exit 2: it is empty, or nothing in it looks like a log. Else 0.",
    ),
)
def diagnose(
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Logs of a model server, folders of them, packed or not; - is standard input. "
            "Or the catalogue: list, show ID, check [FILE...], table.",
            metavar="LOG",
        ),
    ] = None,
    vllm: Annotated[
        str | None,
        typer.Option(
            help="The vLLM release that wrote the log (default: read from the log).",
            metavar="VERSION",
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Follow a growing log until the server is ready or has failed."
        ),
    ] = False,
    json: opt.Json = False,
) -> None:
    """Explain a server log: selected kernels, failures, fixes.

    Shows the selected kernels, and the fix for the release that wrote the log. For a failure that
    is not in the catalogue it shows the line, the frame and a search phrase.
    """
    from builder.cli.diagnose import diagnose_command

    diagnose_command(logs or [], vllm=vllm, json=json, watch=watch)
