"""The typer application.  Each command's module is imported when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from builder.cli import options as opt  # noqa: TC001 - typer reads annotations when it runs
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
layers_app = typer.Typer(help="Look at layers, check them, start a new one.", no_args_is_help=True)
mods_app = typer.Typer(help="Layers as start-time mods for sparkrun and spark-vllm-docker.")
config_app = typer.Typer(help="What spark-build would use, and where each value comes from.")
app.add_typer(layers_app, name="layers")
app.add_typer(mods_app, name="mods", no_args_is_help=True)
app.add_typer(config_app, name="config", no_args_is_help=True)


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
    "spark-build plan -l b12x-full -b vllm/vllm-openai:v0.20.1 --json"
)
def plan(
    layers: opt.Layers,
    base: opt.BaseRef = None,
    platform: opt.PlatformName = None,
    python: opt.PythonVersion = None,
    site_packages: opt.SitePackages = None,
    patches: opt.Patches = None,
    refresh: opt.Refresh = False,
    json: opt.Json = False,
) -> None:
    """Show what each layer would do to a base, and why.  Changes nothing."""
    from builder.cli.plan import plan_command

    plan_command(
        layers=layers,
        base=base,
        platform=platform,
        python=python,
        site_packages=site_packages,
        patches=patches,
        refresh=refresh,
        json=json,
    )


@app.command(
    epilog="Examples:  spark-build image --layers b12x-full   |   spark-build image -l b12x-full "
    "--engine oci --output oci:out   |   IMG=$(spark-build image -l marlin -q)"
)
def image(
    layers: opt.Layers,
    base: opt.BaseRef = None,
    platform: opt.PlatformName = None,
    python: opt.PythonVersion = None,
    site_packages: opt.SitePackages = None,
    patches: opt.Patches = None,
    engine: Annotated[
        str, typer.Option(help="auto (Docker when it answers), buildkit, or oci (no daemon).")
    ] = "auto",
    tag: Annotated[str | None, typer.Option("--tag", "-t", help="Name of the image.")] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="docker, oci:DIR, or registry.")
    ] = None,
    push: Annotated[bool, typer.Option("--push", help="Push the image after it is built.")] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not verify the image at the end.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Stop at the plan.")] = False,
    print_dockerfile: Annotated[
        bool, typer.Option("--print-dockerfile", help="Print what would be built, and stop.")
    ] = False,
    refresh: opt.Refresh = False,
    json: opt.Json = False,
) -> None:
    """Build the patched image, and verify it.  The last line of stdout names it by digest."""
    from builder.cli.image import ImageOptions, image_command

    image_command(
        ImageOptions(
            layers=layers,
            base=base,
            platform=platform,
            python=python,
            site_packages=site_packages,
            patches=patches,
            engine=engine,
            tag=tag,
            output=output,
            push=push,
            verify=not no_verify,
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
    level: Annotated[
        list[str] | None,
        typer.Option(help="static, imports, dispatch (these by default), codegen."),
    ] = None,
    require: Annotated[
        list[str] | None, typer.Option("--require", help="Levels that must have run.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the evidence as one self-contained page too.")
    ] = None,
    platform: opt.PlatformName = None,
    patches: opt.Patches = None,
    refresh: opt.Refresh = False,
    json: opt.Json = False,
) -> None:
    """Prove what a target is: files, imports, and the kernels that its own vLLM selects."""
    from builder.cli.verify import verify_command

    verify_command(
        target=target,
        layers=layers,
        levels=level or [],
        require=require or [],
        html=html,
        platform=platform,
        patches=patches,
        refresh=refresh,
        json=json,
    )


DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Say what would change; write nothing.")
]
Directory = Annotated[Path, typer.Argument(help="site-packages, or a virtual environment.")]


@app.command(epilog="Example:  spark-build apply ~/vllm-env --layers b12x-full --dry-run")
def apply(
    directory: Directory,
    layers: opt.Layers,
    patches: opt.Patches = None,
    dry_run: DryRun = False,
    json: opt.Json = False,
) -> None:
    """Apply layers to an installed environment, all or nothing per layer."""
    from builder.cli.apply import apply_command

    apply_command(directory=directory, layers=layers, patches=patches, dry_run=dry_run, json=json)


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
        evidence=evidence,
        json=json,
    )


@layers_app.command("list")
def layers_list(patches: opt.Patches = None, json: opt.Json = False) -> None:
    """Profiles and layers, a line each."""
    from builder.cli.layers import list_command

    list_command(patches, json)


LayerName = Annotated[str, typer.Argument(help="Name of a layer or profile.")]


@layers_app.command("show")
def layers_show(name: LayerName, patches: opt.Patches = None, json: opt.Json = False) -> None:
    """What a layer does, for which versions, and where it came from."""
    from builder.cli.layers import show_command

    show_command(name, patches, json)


@layers_app.command("check")
def layers_check(
    names: Annotated[list[str] | None, typer.Argument(help="Layers (default: all).")] = None,
    patches: opt.Patches = None,
    json: opt.Json = False,
) -> None:
    """Check layer files; no network."""
    from builder.cli.layers import check_command

    check_command(names or [], patches, json)


@layers_app.command("new")
def layers_new(
    name: Annotated[str, typer.Argument(help="Name of the new layer; also its folder.")],
    directory: Annotated[Path, typer.Option("--in", help="Where to make it.")] = Path(),
    package: Annotated[str, typer.Option(help="The distribution it changes.")] = "vllm",
) -> None:
    """Start a layer folder of your own."""
    from builder.cli.layers import new_command

    new_command(name, directory, package)


@layers_app.command("pin")
def layers_pin(name: LayerName, patches: opt.Patches = None, refresh: opt.Refresh = False) -> None:
    """Write a layer's pins.toml: sha256 of every wheel and donor file that its ops can need."""
    from builder.cli.layers import pin_command

    pin_command(name, patches, refresh)


@mods_app.command("export")
def mods_export(
    names: Annotated[list[str] | None, typer.Argument(help="Mods (default: all of ours).")] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--in", help="Where mods go (default: mods/ of the checkout, or here)."),
    ] = None,
    layers: opt.OptionalLayers = None,
    patches: opt.Patches = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether they are stale (exit 9).")
    ] = False,
) -> None:
    """Write self-contained mods/NAME/run.sh from the layers."""
    from builder.cli.mods import export_command

    export_command(names or [], directory, layers, patches, check)


@config_app.command("show")
def config_show(json: opt.Json = False) -> None:
    """Effective settings and where each comes from."""
    from builder.cli.config import show_command

    show_command(json)
