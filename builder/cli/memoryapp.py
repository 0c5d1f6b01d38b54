"""Options of ``preflight``, ``memory`` and ``audit``; the implementation is imported later."""

from pathlib import Path
from typing import Annotated

import typer

from builder.cli import complete
from builder.cli import typed as opt
from builder.cli.command import CONTEXT, App, examples
from builder.cli.commands import SERVE

memory_app = App()


@memory_app.command(
    rich_help_panel=SERVE,
    epilog=examples(
        "spark-build memory nemotron-3-super",
        "spark-build memory ./checkpoint --context 131072 --sequences 4",
        "spark-build memory ./checkpoint --release 0.33.0 --json",
    ),
)
def memory(
    subject: Annotated[
        str,
        typer.Argument(
            help="A folder with a checkpoint; or a model's name, or its id on Hugging Face.",
            metavar="MODEL_OR_DIR",
            autocompletion=complete.models,
        ),
    ],
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each sequence (default: the maximum in config.json).",
            metavar="N",
            min=1,
        ),
    ] = None,
    sequences: Annotated[
        int, typer.Option(help="Sequences at the same time.", metavar="N", min=1)
    ] = 1,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto, fp8, bfloat16 or float16.", metavar="DTYPE")
    ] = "auto",
    release: Annotated[
        str | None,
        typer.Option(help="Show only flags that this vLLM release has.", metavar="VERSION"),
    ] = None,
    models: opt.ModelFolders = None,
    json: opt.Json = False,
) -> None:
    """Estimate whether a model fits into a GB10's memory.

    Only config.json and the headers of the safetensors files are read. Exit
    5: the model does not fit.
    """
    from builder.cli.memory import memory_command
    from builder.serving.memory import MemoryRequest

    memory_command(
        MemoryRequest(
            subject=subject,
            context=context,
            sequences=sequences,
            kv_cache_dtype=kv_cache_dtype,
            release=release,
            models=models or (),
        ),
        json=json,
    )


preflight_app = App()


@preflight_app.command(
    rich_help_panel=SERVE,
    context_settings={**CONTEXT, "ignore_unknown_options": True},
    epilog=examples(
        "spark-build preflight ./checkpoint --release 0.33.0",
        "spark-build preflight ./checkpoint --release 0.33.0 --layers b12x-full",
        "spark-build preflight ./checkpoint --release 0.33.0 --moe-backend marlin",
        "spark-build preflight openai/gpt-oss-120b --release 0.24.0",
        "spark-build preflight compose.yaml --checkpoint ./checkpoint",
        "spark-build preflight ./checkpoint --releases all --layers b12x-full",
    ),
)
def preflight(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder with a model's config.json; a model's name, or its id on Hugging Face; "
            "or a file with a serve command (FILE or FILE:LINE), or the command itself.",
            metavar="MODEL",
            autocompletion=complete.models,
        ),
    ],
    flags: Annotated[
        list[str] | None,
        typer.Argument(help="Flags of vllm serve.", metavar="FLAGS", show_default=False),
    ] = None,
    release: Annotated[str | None, typer.Option(help="A released vLLM.", metavar="VERSION")] = None,
    releases: Annotated[
        str | None,
        typer.Option(
            help="Several releases, as a table; all: every one since 0.17.0.",
            metavar="all|VERSION,...",
        ),
    ] = None,
    base: opt.BaseRef = None,
    layers: opt.OptionalLayers = None,
    profiles: Annotated[
        bool,
        typer.Option(
            "--profiles", help="Show what the model gets without flags, and with each profile."
        ),
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the model that a file with a serve command names.", metavar="DIR"
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="A variable of the server; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
    platform: opt.PlatformName = None,
    patches: opt.Patches = None,
    models: opt.ModelFolders = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page for people to this file.", metavar="FILE")
    ] = None,
    json: opt.Json = False,
) -> None:
    """Ask a vLLM release whether a model starts.

    The release's own code parses the flags and builds the whole model on a simulated GB10, from
    config.json alone. It names the kernel of each layer. Exit 5: it refuses; with --releases: each
    of them does.
    """
    from builder.cli.preflight import matrix_command, preflight_command
    from builder.pipeline.options import PlanOptions
    from builder.serving.preflightfile import Given

    plan = PlanOptions(
        layers=tuple(layers or ()), base=base, platform=platform, patches=tuple(patches or ()),
    )  # fmt: skip
    given = Given(
        model=model,
        flags=tuple(flags or ()),
        variables=tuple(env or ()),
        plan=plan,
        release=release,
        checkpoint=checkpoint,
        models=tuple(models or ()),
        profiles=profiles,
        several=releases is not None,
    )
    if releases is not None:
        matrix_command(given, releases, html=html, json=json)
    else:
        preflight_command(given, html=html, json=json)


audit_app = App()


@audit_app.command(
    rich_help_panel=SERVE,
    epilog=examples(
        "spark-build audit ./checkpoint",
        "spark-build audit nemotron-3-super",
        "spark-build audit --inside audit",
        "spark-build audit audit/audit.json --against ./checkpoint",
    ),
)
def audit(
    subject: Annotated[
        str | None,
        typer.Argument(
            help="A folder with a checkpoint; a file that spark_build_audit.py wrote; or a model's "
            "name, or its id on Hugging Face.",
            metavar="DIR_OR_FILE_OR_MODEL",
            autocompletion=complete.models,
            show_default=False,
        ),
    ] = None,
    inside: Annotated[
        Path | None,
        typer.Option(
            help="Write the files that audit a model inside vLLM, in an image or an environment.",
            metavar="DIR",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="The checkpoint to compare a loaded model with.", metavar="DIR"),
    ] = None,
    models: opt.ModelFolders = None,
    json: opt.Json = False,
) -> None:
    """Show how a model's modules are quantised.

    Reads the headers of a checkpoint, or the modules that vLLM has loaded. Unquantised modules
    often limit the speed. Exit 5: vLLM loaded layers in 16 bits that --against has quantised.
    """
    from builder.cli.audit import audit_command, inside_command
    from builder.serving.audit import audit_request

    if inside is not None and subject is None and against is None:
        inside_command(inside, json=json)
        return
    audit_command(audit_request(subject, inside, against, models or ()), json=json)
