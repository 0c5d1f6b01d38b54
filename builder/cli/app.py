"""The typer application.  Each command's module is imported when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from builder.cli import options as opt
from builder.cli.cacheapp import cache_app
from builder.cli.compileapp import compile_app
from builder.cli.dispatch import app as dispatch_app
from builder.cli.layersapp import layers_app
from builder.cli.lockapp import LOCK_EXAMPLES, lock
from builder.cli.publishapp import publish_app
from builder.console import console

app = typer.Typer(
    name="spark-build",
    help="Container images that run NVFP4 models at full speed on NVIDIA DGX Spark (GB10, SM121): "
    "patch a vLLM release, prove which kernels it selects, publish it.",
    epilog="Exit codes: 0 ok, 2 usage, 3 nothing to do, 4 drift, 5 verification failed, 6 engine "
    "missing, 7 build failed, 8 remote failed, 9 stale, 10 needs a rebuild, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
mods_app = typer.Typer(help="Layers as start-time mods for sparkrun and spark-vllm-docker.")
config_app = typer.Typer(help="What spark-build would use, and where each value comes from.")
app.add_typer(publish_app)
app.add_typer(layers_app, name="layers")
app.add_typer(dispatch_app, name="dispatch", no_args_is_help=True)
app.add_typer(cache_app, name="cache", no_args_is_help=True)
app.add_typer(mods_app, name="mods", no_args_is_help=True)
app.add_typer(config_app, name="config", no_args_is_help=True)
app.add_typer(compile_app, name="compile", no_args_is_help=True)

DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Say what would change; write nothing.")
]
Directory = Annotated[Path, typer.Argument(help="site-packages, or a virtual environment.")]


def _version(value: bool) -> None:
    if value:
        from builder import __version__

        print(f"spark-build {__version__}")
        raise typer.Exit


@app.callback()
def common(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every command run.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks for bugs of ours.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Set how much is said."""
    del debug, version  # --debug is read by the error boundary, --version by its callback
    console.quiet, console.verbose = quiet, verbose


@app.command(
    epilog="Examples:  spark-build plan --layers b12x-full --base pypi:vllm==0.20.1   |   "
    "spark-build plan -l b12x-full -b vllm/vllm-openai:v0.20.1 --json   |   spark-build plan "
    "--with-pr vllm-project/vllm#40082 -b pypi:vllm==0.21.0"
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
    """Show what each layer would do to a base, and why.  Changes nothing."""
    from builder.cli.plan import plan_command

    plan_command(
        layers=layers,
        pulls=opt.pull_options(with_pr, forge_clone, locked),
        base=base,
        platform=platform,
        python=python,
        site_packages=site_packages,
        patches=patches,
        compile_here=compile_here,
        toolkit=opt.toolkit_choice(toolkit, builder, compiling=compile_here),
        refresh=refresh,
        json=json,
    )


@app.command(
    epilog="Examples:  spark-build image --layers b12x-full   |   spark-build image -l b12x-full "
    "--engine oci --output oci:out   |   IMG=$(spark-build image -l marlin -q)   |   spark-build "
    "image -l b12x-full -b docker://HOST/vllm:1 --builder tcp://buildkitd:1234 --push -t HOST/me:1"
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
        str, typer.Option(help="auto (Docker when it answers), buildkit, or oci (no daemon).")
    ] = "auto",
    builder: opt.Builder = None,
    cache_from: Annotated[
        list[str] | None,
        typer.Option(
            help="Take finished steps from this cache: HOST/NAME:TAG, or as BuildKit writes it, "
            "type=registry,ref=...; may be repeated (buildkit engine).",
            metavar="CACHE",
        ),
    ] = None,
    cache_to: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave every finished step in this cache; may be repeated (buildkit engine).",
            metavar="CACHE",
        ),
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", "-t", help="Name of the image.")] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="docker, oci:DIR, or registry.")
    ] = None,
    push: Annotated[bool, typer.Option("--push", help="Push the image after it is built.")] = False,
    thin: Annotated[
        bool, typer.Option("--thin", help="Leave the base's own blobs out of oci:DIR.")
    ] = False,
    single_layer: Annotated[
        bool, typer.Option("--single-layer", help="One layer for all patches (oci engine).")
    ] = False,
    all_platforms: Annotated[
        bool, typer.Option("--all-platforms", help="Patch every entry of the base's index.")
    ] = False,
    others: Annotated[
        str,
        typer.Option(metavar="keep|drop", help="Entries of the base's index that are not patched."),
    ] = "drop",
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not verify the image at the end.")
    ] = False,
    compile_here: opt.Compile = False,
    toolkit: opt.Toolkit = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            envvar="SPARK_BUILD_TIME_LIMIT",
            metavar="TIME",
            help="Give up, with exit 7 and nothing half-made, after 90s, 45m or 2h.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Stop at the plan.")] = False,
    print_dockerfile: Annotated[
        bool, typer.Option("--print-dockerfile", help="Print what would be built, and stop.")
    ] = False,
    forge_clone: opt.ForgeClone = None,
    locked: opt.Locked = False,
    refresh: opt.Refresh = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Build the patched image, and verify it.  The last line of stdout names it by digest."""
    from builder.cli.image import ImageOptions, image_command

    image_command(
        ImageOptions(
            layers=layers,
            pulls=opt.pull_options(with_pr, forge_clone, locked),
            base=base,
            platform=platform,
            python=python,
            site_packages=site_packages,
            patches=patches,
            engine=engine,
            builder=builder or "",
            cache_from=tuple(cache_from or ()),
            cache_to=tuple(cache_to or ()),
            tag=tag,
            output=output,
            push=push,
            thin=thin,
            single_layer=single_layer,
            all_platforms=all_platforms,
            others=others,
            verify=not no_verify,
            compile_here=compile_here,
            toolkit=opt.toolkit_choice(toolkit, builder, compiling=compile_here),
            time_limit=time_limit or "",
            dry_run=dry_run,
            print_dockerfile=print_dockerfile,
            refresh=refresh,
            json=json,
        )
    )


@app.command(
    epilog="Examples:  spark-build verify oci:out   |   spark-build verify my/image:tag --level "
    "dispatch   |   spark-build verify pypi:vllm==0.20.1 --layers b12x-full   (fails: unpatched)"
)
def verify(
    target: Annotated[
        str, typer.Argument(help="IMAGE, oci:DIR, pypi:vllm==VERSION, or dir:SITE_PACKAGES.")
    ],
    layers: opt.OptionalLayers = None,
    with_pr: opt.WithPr = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            help="static, imports, dispatch (these by default), codegen, binaries, device, serve."
        ),
    ] = None,
    require: Annotated[
        list[str] | None, typer.Option("--require", help="Levels that must have run.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the evidence as one self-contained page too.")
    ] = None,
    summary: Annotated[
        Path | None, typer.Option(help="Append the evidence as Markdown, as CI summaries show it.")
    ] = None,
    prove_necessary: Annotated[
        bool,
        typer.Option(
            "--prove-necessary",
            help="Take each layer away in turn and show the check that then fails (adds codegen).",
        ),
    ] = False,
    bench: Annotated[
        bool, typer.Option("--bench", help="Level serve: measure tokens/s and first token too.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="Evidence (JSON) with a bench to compare this one with.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Level serve: this model, not the tiny generated ones.")
    ] = None,
    serve_args: Annotated[
        str, typer.Option(help="Level serve: more arguments for vllm serve, as one text.")
    ] = "",
    platform: opt.PlatformName = None,
    patches: opt.Patches = None,
    forge_clone: opt.ForgeClone = None,
    locked: opt.Locked = False,
    refresh: opt.Refresh = False,
    _plain_http: opt.PlainHttp = None,
    json: opt.Json = False,
) -> None:
    """Prove what a target is: files, imports, and the kernels that its own vLLM selects."""
    from builder.cli.verify import verify_command
    from builder.verify.ongpu import GpuOptions

    verify_command(
        target=target,
        layers=layers,
        pulls=opt.pull_options(with_pr, forge_clone, locked),
        levels=level or [],
        require=require or [],
        html=html,
        summary=summary,
        prove_necessary=prove_necessary,
        gpu=GpuOptions(bench=bench, against=against, model=model, serve_args=serve_args),
        platform=platform,
        patches=patches,
        refresh=refresh,
        json=json,
    )


@app.command(epilog="Example:  spark-build apply ~/vllm-env --layers b12x-full --dry-run")
def apply(
    directory: Directory,
    layers: opt.LayersOrPulls = None,
    with_pr: opt.WithPr = None,
    patches: opt.Patches = None,
    forge_clone: opt.ForgeClone = None,
    locked: opt.Locked = False,
    compile_here: opt.Compile = False,
    toolkit: opt.Toolkit = None,
    builder: opt.Builder = None,
    dry_run: DryRun = False,
    json: opt.Json = False,
) -> None:
    """Apply layers to an installed environment, all or nothing per layer."""
    from builder.cli.apply import apply_command

    apply_command(
        directory=directory,
        layers=layers,
        pulls=opt.pull_options(with_pr, forge_clone, locked),
        patches=patches,
        compile_here=compile_here,
        toolkit=opt.toolkit_choice(toolkit, builder, compiling=compile_here),
        dry_run=dry_run,
        json=json,
    )


@app.command(epilog="Example:  spark-build revert ~/vllm-env --layers b12x-full")
def revert(
    directory: Directory,
    layers: opt.OptionalLayers = None,
    patches: opt.Patches = None,
    force: Annotated[
        bool, typer.Option("--force", help="Put originals back over later edits too.")
    ] = False,
    dry_run: DryRun = False,
    json: opt.Json = False,
) -> None:
    """Put back the exact bytes from before (all layers, unless some are named)."""
    from builder.cli.apply import revert_command

    revert_command(
        directory=directory,
        layers=layers,
        patches=patches,
        force=force,
        dry_run=dry_run,
        json=json,
    )


@app.command(
    epilog="Examples:  docker logs NAME 2>&1 | spark-build diagnose -   |   spark-build diagnose "
    "server.log --vllm 0.25.0   Exit 5: the log shows an error; 0: warnings and notes at most."
)
def diagnose(
    log: Annotated[
        str | None, typer.Argument(help="A log of vLLM or TensorRT-LLM; - is standard input.")
    ] = None,
    vllm: Annotated[
        str | None,
        typer.Option(help="The vLLM release that wrote it (default: what the log says)."),
    ] = None,
    json: opt.Json = False,
) -> None:
    """Say which kernels a log selected, what is wrong, and what to do in that release."""
    from builder.cli.diagnose import diagnose_command

    diagnose_command(log=log, vllm=vllm, json=json)


@app.command(epilog="Example:  spark-build matrix -l b12x-full --releases 0.20.1,0.22.1,0.33.0")
def matrix(
    layers: opt.Layers,
    releases: Annotated[
        str | None,
        typer.Option(help="vLLM releases, comma-separated (default: every one since 0.17.0)."),
    ] = None,
    dispatch: Annotated[
        bool, typer.Option("--dispatch", help="Also ask each release what it selects on SM121.")
    ] = False,
    choices: Annotated[
        bool, typer.Option("--choices", help="Also ask for every choice that a release offers.")
    ] = False,
    evidence: Annotated[
        Path | None, typer.Option(help="Keep each release's evidence in this directory.")
    ] = None,
    platform: opt.PlatformName = None,
    patches: opt.Patches = None,
    refresh: opt.Refresh = False,
    json: opt.Json = False,
) -> None:
    """The state of every layer on every vLLM release, from the released wheels."""
    from builder.cli.matrix import matrix_command

    matrix_command(
        layers=layers,
        releases=releases,
        platform=platform,
        patches=patches,
        refresh=refresh,
        dispatch=dispatch,
        choices=choices,
        evidence=evidence,
        json=json,
    )


app.command(epilog=LOCK_EXAMPLES)(lock)


@mods_app.command("export")
def mods_export(
    names: Annotated[list[str] | None, typer.Argument(help="Mods (default: all of ours).")] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--in", help="Where mods go (default: mods/ of the checkout, or here)."),
    ] = None,
    layers: opt.OptionalLayers = None,
    with_pr: opt.WithPr = None,
    patches: opt.Patches = None,
    forge_clone: opt.ForgeClone = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether they are stale (exit 9).")
    ] = False,
) -> None:
    """Write self-contained mods/NAME/run.sh from the layers."""
    from builder.cli.mods import export_command

    pulls = opt.pull_options(with_pr, forge_clone)
    export_command(names or [], directory, layers, pulls, patches, check)


@app.command(
    epilog="Example:  spark-build schema verify > verify.json; check-jsonschema --schemafile "
    "verify.json evidence.json"
)
def schema(
    name: Annotated[
        str | None, typer.Argument(help="A document (default: list those that there are).")
    ] = None,
) -> None:
    """Print the JSON Schema of a document that --json prints."""
    from builder.cli.schema import schema_command

    schema_command(name)


@config_app.command("show")
def config_show(json: opt.Json = False) -> None:
    """Effective settings and where each comes from."""
    from builder.cli.config import show_command

    show_command(json)
