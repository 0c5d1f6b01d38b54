"""``spark-build recipe``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import console, print_json
from builder.common.hints import again
from builder.common.pypi import write_atomically
from builder.errors import UsageError
from builder.serving.formats import (
    LAUNCHERS,
    TRTLLM,
    refuse_format,
    refuse_settings,
    refuse_topology,
    rendered,
    trtllm,
)
from builder.serving.lint import linted_recipe
from builder.serving.models import Models
from builder.serving.recipe import Place, RecipeRequest, RecipeText, explanation, topology_named
from builder.serving.release import served_profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.serving.recipe import Recipe

#: The default profile of a recipe.
DEFAULT = "b12x-full"


def recipe_command(
    name: str,
    *,
    profile: str | None,
    release: str | None,
    image: str | None,
    topology: str,
    addresses: Sequence[str],
    interface: str | None,
    form: str,
    port: int,
    chosen: Sequence[str],
    speculate: bool,
    checkpoint: Path | None,
    explain: bool,
    output: Path | None,
    force: bool,
    models: Sequence[Path],
    patches: Sequence[Path],
    json: bool,
) -> None:
    """Make a recipe, then print it, explain it, or write its files."""
    place = Place(
        topology=topology_named(topology),
        addresses=tuple(addresses),
        interface=interface or "",
        launcher=form if form in LAUNCHERS and topology != "two-solos" else "",
    )
    if "/" in name and Path(name).is_dir():
        raise UsageError(
            f"{name} is a folder: name the model, and the folder with --checkpoint",
            hint=f"spark-build recipe MODEL --checkpoint {shlex.quote(name)}",
        )
    model = Models.discover(models).model_or_generic(name)
    made: Recipe | None = None
    if form == TRTLLM:
        given = {
            "--profile": profile, "--release": release, "--image": image, "--set": tuple(chosen),
            "--speculate": speculate, "--explain": explain, "--patches": tuple(patches),
            "--topology": None if topology == "solo" else topology,
            "--address": tuple(addresses), "--interface": interface,
            "--checkpoint": checkpoint,
        }  # fmt: skip
        refuse_settings(given)
        files = trtllm(model, port)
    else:
        refuse_format(form)
        refuse_topology(form, place.topology)
        served = served_profile(DEFAULT if profile is None else profile, release, image, patches)
        made = linted_recipe(
            RecipeRequest(
                model=model,
                served=served,
                place=place,
                port=port,
                chosen=tuple(chosen),
                speculate=speculate,
                checkpoint=checkpoint,
                models=tuple(models),
                patches=tuple(patches),
            )
        )
        files = rendered(made, form)
    written = _write(files, output, force=force) if output else []
    if json:
        print_json(
            RecipeText(format=form, recipe=made, files=files, written=tuple(map(str, written)))
        )
    elif explain and made is not None:
        print(explanation(made), end="")
    elif written:
        print("\n".join(map(str, written)))
    else:
        _print(files)


def _print(files: dict[str, str]) -> None:
    first, *_ = files
    for name, text in files.items():
        if name != first:
            print(f"# --- {name}")
        print(text, end="")
    if len(files) > 1:
        console.say(f"{len(files)} files; -o {first} writes all of them to one folder")


def _write(files: dict[str, str], output: Path, *, force: bool) -> list[Path]:
    """Write the main file to the given path and the others next to it.

    Raises:
        UsageError: the path is a folder, has no parent folder, cannot be written, or exists.
    """
    if output.is_dir():
        raise UsageError(
            f"{output} is a folder", hint=f"-o {shlex.quote(str(output / next(iter(files))))}"
        )
    if not output.parent.is_dir():
        raise UsageError(
            f"-o {output} is in a folder that does not exist",
            hint=f"mkdir -p {shlex.quote(str(output.parent))} && {again()}",
        )
    places = [output, *(output.with_name(name) for name in list(files)[1:])]
    written = dict(zip(places, files.values(), strict=True))
    other = [str(place) for place, text in written.items() if _differs(place, text)]
    if other and not force:
        raise UsageError(
            f"already exists with other content: {', '.join(other)}; --force replaces it",
            hint="--force",
        )
    for place, text in written.items():
        write_atomically(place, text.encode())
        if text.startswith("#!"):
            place.chmod(0o755)
    return places


def _differs(place: Path, text: str) -> bool:
    """Whether the path exists with other content."""
    try:
        return place.read_bytes() != text.encode()
    except FileNotFoundError:
        return False
    except OSError:
        return True
