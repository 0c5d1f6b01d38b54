"""``spark-build recipe``, ``recipes export``, and ``models list``, ``add`` and ``show``."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from builder.cli.command import Group, command
from builder.common.console import console, counted, print_json, tell
from builder.common.hints import again
from builder.common.options import Argument, Json, ModelFolders, Option
from builder.serving.options import ModelName, RecipeOptions

if TYPE_CHECKING:
    from builder.common.document import Part

_models = Group(
    "models",
    "spark-build models list",
    "spark-build models show nemotron-3-super",
    default="list",
)
_recipes = Group("recipes", "spark-build recipes export")


@command(
    "recipe",
    "spark-build recipe nemotron-3-super --profile marlin --release 0.33.0",
    "spark-build recipe nemotron-3-nano --release 0.33.0 --format compose",
    "spark-build recipe gpt-oss-120b --release 0.33.0 --explain",
    "spark-build recipe gemma-4-31b --image me/vllm:1 --set max-num-seqs=4",
    detail="Flags and variables are checked against the release; unknown ones are left out.",
)
def recipe(options: RecipeOptions, *, json: Json = False) -> None:
    """Make a recipe, then print it, explain it, or name the files that were written."""
    from builder.serving.recipe import explanation
    from builder.serving.recipefiles import recipe_text

    output = recipe_text(options)
    if json:
        print_json(output)
    elif options.explain and output.recipe is not None:
        print(explanation(output.recipe), end="")
    elif output.written:
        tell("\n".join(output.written))
    else:
        _print_files(output.files)
    if output.recipe is not None and not options.ask:
        vllm = output.recipe.vllm
        console.say(f"note: only vLLM {vllm}'s source was read; to ask vLLM: {again('--ask')}")


def _print_files(files: Mapping[str, str]) -> None:
    first, *_ = files
    for name, text in files.items():
        if name != first:
            tell(f"# --- {name}")
        print(text, end="")
    if len(files) > 1:
        console.say(f"{len(files)} files; -o {first} writes all of them to one folder")


@_recipes.sub(
    "export",
    "spark-build recipes export",
    "spark-build recipes export --check",
    "spark-build recipes export --in my-registry --tags tags.json",
)
def export(
    directory: Annotated[
        Path | None,
        Option(
            "The registry's folder (default: the checkout, or the current directory).",
            "DIR",
            "--in",
        ),
    ] = None,
    release: Annotated[
        str | None, Option("A released vLLM (default: the newest recorded).", "VERSION")
    ] = None,
    tags: Annotated[
        Path | None,
        Option("The output of `tags --json`: use your images by digest instead of mods.", "FILE"),
    ] = None,
    *,
    ask: Annotated[
        bool,
        Option(
            "Ask the release about each (preflight): no recipe that it refuses, and no patches "
            "that change nothing for the model."
        ),
    ] = False,
    check: Annotated[bool, Option("Write nothing; exit 9 if files are stale.")] = False,
    models: ModelFolders = (),
    json: Json = False,
) -> None:
    """Write a recipe for each model, and sparkrun's registry file.

    Each model gets b12x-full if that can serve it, else marlin, on one Spark.
    """
    from builder.serving.models import Models
    from builder.serving.recipefiles import export_recipes
    from builder.serving.release import served_profile

    exported = export_recipes(
        Models.discover(models),
        served_profile,
        release=release,
        directory=directory,
        tags=tags,
        check=check,
        folders=models,
        ask=ask,
    )
    for one in exported.without:
        console.say(f"  no recipe for {one.model}: {one.reason}")
    if json:
        print_json(exported)
        return
    for recipe in exported.recipes:
        tell(f"{recipe.model:<24}{recipe.topology:<6}{recipe.profile:<12}{recipe.container}")
    what = counted(len(exported.recipes), "recipe")
    tell(f"{what} {'up to date' if check else 'written'} in {exported.directory}")


@_models.sub("list", "spark-build models list")
def list_all(models: ModelFolders = (), *, json: Json = False) -> None:
    """List models, one line each."""
    from builder.serving.models import Models

    listed = Models.discover(models).listed()
    if json:
        print_json(listed)
        return
    for row in listed.models:
        tell(f"{row.name:<24}{row.id}\n  {row.summary}")


@_models.sub(
    "show",
    "spark-build models show nemotron-3-super",
    "spark-build models show my-model --models my-models --json",
)
def show(name: ModelName, models: ModelFolders = (), *, json: Json = False) -> None:
    """Show a model, with the source of each value."""
    from msgspec.structs import fields

    from builder.serving.models import Models

    shown = Models.discover(models).shown(name)
    if json:
        print_json(shown)
        return
    tell(f"{shown.model.name}: {shown.model.summary}")
    for field in fields(shown.model):
        value = getattr(shown.model, field.name)
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts if field.name not in ("name", "summary") else ():
            if part is not None:
                tell("\n".join(_lines(field.encode_name, part)))
    if shown.unknown:
        tell(f"\nunknown: {', '.join(shown.unknown)}")


@_models.sub(
    "add",
    "spark-build models add Qwen/Qwen3-30B-A3B --models my-models",
    "spark-build models add ./checkpoint --id me/mine --models my-models",
    "spark-build models add ./checkpoint --id me/mine --dry-run",
)
def add(
    checkpoint: Annotated[
        str,
        Argument(
            "A model's id on Hugging Face, or a folder with a checkpoint; weights are not read.",
            "ID_OR_DIR",
        ),
    ],
    model_id: Annotated[
        str | None,
        Option("The model's id on Hugging Face, if a folder is named.", "OWNER/NAME", "--id"),
    ] = None,
    models: Annotated[Path, Option("The folder to write NAME.toml to.", "DIR")] = Path("models"),
    *,
    force: Annotated[bool, Option("Replace a file that exists.")] = False,
    dry_run: Annotated[bool, Option("Print it, and write nothing.")] = False,
    json: Json = False,
) -> None:
    """Write a model's file from its checkpoint.

    Reads config.json, hf_quant_config.json and the headers of safetensors files. What people
    measured is added by hand, with its source.
    """
    from builder.serving.modelfile import added_model
    from builder.serving.models import ModelShown

    added = added_model(checkpoint, model_id, models, force=force, dry_run=dry_run)
    if json:
        unknown = tuple(added.model.unknown())
        print_json(ModelShown(file=str(added.file), model=added.model, unknown=unknown))
    elif dry_run:
        print(added.text, end="")
    else:
        tell(str(added.file))


def _lines(name: str, part: "Part") -> Iterator[str]:
    """The known values, each with its source below it."""
    from msgspec.structs import fields

    known = {
        field.encode_name: value
        for field in fields(part)
        if (value := getattr(part, field.name)) not in (None, "")
    }
    source = known.pop("source")
    if name == "config":
        known = {"value": f"{len(known['value'])} values of config.json (--json shows them)"}
    tables = {key: value for key, value in known.items() if isinstance(value, dict)}
    plain = {key: _text(value) for key, value in known.items() if key not in tables}
    text = ", ".join(f"{key} {value}" for key, value in plain.items())
    yield f"  {name:<24}{plain['value'] if set(known) == {'value'} else text}"
    for key, table in tables.items():
        for place, value in _entries(table):
            yield f"  {'':<24}{key} {place} {_text(value)}".rstrip()
    yield f"  {'':<24}  ({source})"


def _entries(table: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """The values of a table; values of nested tables have dotted keys."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _text(value: object) -> str:
    """A value as written in a model's file."""
    return str(value).lower() if isinstance(value, bool) else str(value)
