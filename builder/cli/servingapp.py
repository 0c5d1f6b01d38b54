"""Options of the commands that serve a model; the implementation is imported when they run."""

from pathlib import Path
from typing import Annotated

import typer

from builder.cli import complete
from builder.cli import typed as opt
from builder.cli.command import App, examples, running
from builder.cli.commands import SERVE

models_app = App(
    help="Show the known models.",
    cls=running("list"),
    epilog=examples("spark-build models list", "spark-build models show nemotron-3-super"),
)


@models_app.command("list", epilog=examples("spark-build models list"))
def models_list(models: opt.ModelFolders = None, json: opt.Json = False) -> None:
    """List models, one line each."""
    from builder.cli.models import list_command

    list_command(models, json=json)


@models_app.command(
    "show",
    epilog=examples(
        "spark-build models show nemotron-3-super",
        "spark-build models show my-model --models my-models --json",
    ),
)
def models_show(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of a model, or its id on Hugging Face.",
            metavar="MODEL",
            autocompletion=complete.models,
        ),
    ],
    models: opt.ModelFolders = None,
    json: opt.Json = False,
) -> None:
    """Show a model, with the source of each value."""
    from builder.cli.models import show_command

    show_command(name, models, json=json)


@models_app.command(
    "add",
    epilog=examples(
        "spark-build models add ./checkpoint --id me/mine --models my-models",
        "spark-build models add ./checkpoint --id me/mine --dry-run",
    ),
)
def models_add(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder with a checkpoint; its weights are not read.", metavar="DIR"),
    ],
    model_id: Annotated[
        str, typer.Option("--id", help="The model's id on Hugging Face.", metavar="OWNER/NAME")
    ],
    models: Annotated[
        Path, typer.Option(help="The folder to write NAME.toml to.", metavar="DIR")
    ] = Path("models"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print it, and write nothing.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """Write a model's file from its checkpoint.

    Reads config.json, hf_quant_config.json and the headers of safetensors files. What people
    measured is added by hand, with its source.
    """
    from builder.cli.models import add_command

    add_command(folder, model_id, models, dry_run=dry_run, json=json)


recipe_app = App()


@recipe_app.command(
    rich_help_panel=SERVE,
    epilog=examples(
        "spark-build recipe nemotron-3-super --profile marlin --release 0.33.0",
        "spark-build recipe nemotron-3-nano --release 0.33.0 --format compose",
        "spark-build recipe gpt-oss-120b --release 0.33.0 --explain",
        "spark-build recipe gemma-4-31b --image me/vllm:1 --set max-num-seqs=4",
    ),
)
def recipe(
    model: Annotated[
        str,
        typer.Argument(
            help="Name of a model, or its id on Hugging Face.",
            metavar="MODEL",
            autocompletion=complete.models,
        ),
    ],
    profile: Annotated[
        str | None,
        typer.Option(
            help="The profile (default: b12x-full).",
            metavar="PROFILE",
            autocompletion=complete.layer,
        ),
    ] = None,
    release: Annotated[str | None, typer.Option(help="A released vLLM.", metavar="VERSION")] = None,
    image: Annotated[
        str | None,
        typer.Option(
            help="The image to run; without --release, its vLLM release is read from it.",
            metavar="IMAGE",
        ),
    ] = None,
    topology: Annotated[
        str,
        typer.Option(
            help="solo; tp2 and tp2-ray (one model over two nodes); two-solos (behind LiteLLM).",
            metavar="|".join(complete.TOPOLOGIES),
            autocompletion=complete.one_of(*complete.TOPOLOGIES),
        ),
    ] = "solo",
    address: Annotated[
        list[str] | None,
        typer.Option(help="Address of a node, the head first; once for each.", metavar="IP"),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(help="Network interface between the nodes.", metavar="NAME"),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="The tool that starts the server.",
            metavar="|".join(complete.FORMATS),
            autocompletion=complete.one_of(*complete.FORMATS),
        ),
    ] = "docker",
    port: Annotated[
        int, typer.Option(help="Port of the server.", metavar="PORT", min=1, max=65535)
    ] = 8000,
    chosen: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Set a flag or variable: max-model-len=131072, enforce-eager, VLLM_X=1; "
            "an empty value removes it; may be repeated.",
            metavar="NAME[=VALUE]",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="The checkpoint's folder, to estimate the memory from its headers.",
            metavar="DIR",
        ),
    ] = None,
    speculate: Annotated[
        bool,
        typer.Option("--speculate", help="Use speculative decoding, if the model supports it."),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Explain where each value comes from, and list measurements."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write the main file there, and the others next to it.",
            metavar="FILE",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that have other content.")
    ] = False,
    models: opt.ModelFolders = None,
    patches: opt.Patches = None,
    json: opt.Json = False,
) -> None:
    """Print the command or file that serves a model.

    Flags and variables are checked against the release; unknown ones are left out.
    """
    from builder.cli.recipe import recipe_command

    recipe_command(
        model,
        profile=profile,
        release=release,
        image=image,
        topology=topology,
        addresses=address or (),
        interface=interface,
        form=form,
        port=port,
        chosen=chosen or (),
        speculate=speculate,
        checkpoint=checkpoint,
        explain=explain,
        output=output,
        force=force,
        models=models or (),
        patches=patches or (),
        json=json,
    )


recipes_app = App(
    help="Export recipes for sparkrun and spark-vllm-docker.",
    epilog=examples("spark-build recipes export"),
)


@recipes_app.command(
    "export",
    epilog=examples(
        "spark-build recipes export",
        "spark-build recipes export --check",
        "spark-build recipes export --in my-registry --tags tags.json",
    ),
)
def recipes_export(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--in",
            help="The registry's folder (default: the checkout, or the current directory).",
            metavar="DIR",
        ),
    ] = None,
    release: Annotated[
        str | None,
        typer.Option(help="A released vLLM (default: the newest recorded).", metavar="VERSION"),
    ] = None,
    tags: Annotated[
        Path | None,
        typer.Option(
            help="The output of `tags --json`: use your images by digest instead of mods.",
            metavar="FILE",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 9 if files are stale.")
    ] = False,
    models: opt.ModelFolders = None,
    json: opt.Json = False,
) -> None:
    """Write a recipe for each model, and sparkrun's registry file.

    Each model gets b12x-full if that can serve it, else marlin, on one Spark.
    """
    from builder.cli.recipes import export_command

    export_command(
        directory, release=release, tags=tags, check=check, models=models or (), json=json
    )


lint_app = App()


@lint_app.command(
    rich_help_panel=SERVE,
    epilog=examples(
        "spark-build lint serve.sh --release 0.33.0",
        "spark-build lint compose.yaml recipe.yaml --image me/vllm:1",
        "spark-build lint serve.sh --release 0.33.0 --ask",
        "spark-build lint k8s/*.yaml --sarif > lint.sarif",
        "spark-build lint --rules",
    ),
)
def lint(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Shell scripts, compose files, Kubernetes manifests, recipes of sparkrun or "
            "eugr, Dockerfiles; - is a shell script on stdin.",
            metavar="FILE",
        ),
    ] = None,
    release: Annotated[
        str | None,
        typer.Option(
            help="The vLLM release that they run (default: from the tag of an official image).",
            metavar="VERSION",
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            help="The image that they run; its vLLM release is read from it.", metavar="IMAGE"
        ),
    ] = None,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask",
            help="Let the release's own code parse the flags and build the model, as preflight "
            "does.",
        ),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF 2.1.0.")] = False,
    rules: Annotated[
        bool, typer.Option("--rules", help="Print the rules and their sources.")
    ] = False,
    models: opt.ModelFolders = None,
    json: opt.Json = False,
) -> None:
    """Check serve commands in files against a release.

    Reads scripts, compose files, recipes and manifests. Exit 5: a server
    would not start, or not as configured. A comment
    "# spark-build: ignore[rule]" keeps a line as it is.
    """
    from builder.cli.lint import lint_command, rules_command
    from builder.serving.lint import Linter
    from builder.serving.preflight import preflight

    if rules:
        rules_command(files or [], as_sarif=sarif, json=json)
        return
    linter = Linter(release=release, image=image, ask=preflight if ask else None)
    lint_command(files or [], linter, models, strict=strict, as_sarif=sarif, json=json)


bench_app = App()


@bench_app.command(
    rich_help_panel=SERVE,
    epilog=examples(
        "spark-build bench http://localhost:8000",
        "spark-build bench http://spark:8000 --log server.log -o marlin.json",
        "spark-build bench http://spark:8000 --against marlin.json --plot bench.svg",
    ),
)
def bench(
    url: Annotated[
        str, typer.Argument(help="The server, such as http://localhost:8000.", metavar="URL")
    ],
    model: Annotated[
        str, typer.Option(help="Name of the model, if the server has several.", metavar="NAME")
    ] = "",
    tokens: Annotated[
        int, typer.Option(help="Tokens of each answer.", metavar="TOKENS", min=1)
    ] = 200,
    concurrency: Annotated[
        str,
        typer.Option(
            help="Numbers of parallel requests, measured one after another.", metavar="N[,N...]"
        ),
    ] = "1,2,4,8,16",
    prefill: Annotated[
        int,
        typer.Option(
            help="Length of the long prompt, in words: about as many tokens; 0 for none.",
            metavar="TOKENS",
            min=0,
            max=1_000_000,
        ),
    ] = 4096,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Log of the server; the selected kernels are read from it.", metavar="FILE"
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="An earlier bench of the same model and settings, to compare with.", metavar="FILE"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Write the bench to this file, as JSON.", metavar="FILE"
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a diagram to this file, as SVG.", metavar="FILE")
    ] = None,
    json: opt.Json = False,
) -> None:
    """Measure tokens/s and prefill of a running server.

    Sends chat completions at temperature 0: a warm-up, then three rounds, whose median
    counts. The server's API key, if any, is read from SPARK_BUILD_API_KEY.
    """
    from builder.cli.bench import bench_command
    from builder.serving.bench import BenchRequest, settings_of

    settings = settings_of(tokens, concurrency, prefill)
    request = BenchRequest(url=url, model=model, settings=settings, log=log, against=against)
    bench_command(request, output=output, picture=plot, json=json)
