"""``spark-build recipe``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.pypi.index import write_atomically
from builder.serving.documents import RecipeText
from builder.serving.explain import explanation
from builder.serving.formats.all import TRTLLM, refuse_format, rendered
from builder.serving.formats.trtllm import refuse_settings, trtllm
from builder.serving.models import Models
from builder.serving.profile import served_profile
from builder.serving.recipe import RecipeRequest, recipe_of
from builder.serving.topology import Place, topology_named
from builder.util.console import console, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from builder.serving.documents import Recipe


def recipe_command(
    name: str,
    *,
    profile: str,
    release: str | None,
    image: str | None,
    topology: str,
    addresses: Sequence[str],
    interface: str | None,
    form: str,
    port: int,
    chosen: Sequence[str],
    speculate: bool,
    explain: bool,
    output: Path | None,
    models: Sequence[Path],
    patches: Sequence[Path],
    json: bool,
) -> None:
    """Make a recipe, then print it, explain it, or write its files."""
    place = Place(
        topology=topology_named(topology), addresses=tuple(addresses), interface=interface or ""
    )
    model = Models.discover(models).model(name)
    made: Recipe | None = None
    if form == TRTLLM:
        refuse_settings(release, image, place, chosen, speculate=speculate, explain=explain)
        files = trtllm(model, port)
    else:
        refuse_format(form)
        served = served_profile(profile, release, image, patches)
        made = recipe_of(
            RecipeRequest(
                model=model,
                served=served,
                place=place,
                port=port,
                chosen=tuple(chosen),
                speculate=speculate,
            )
        )
        files = rendered(made, form)
    written = _write(files, output) if output else []
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
        console.say(f"{len(files)} files; -o {first} writes each beside it")


def _write(files: dict[str, str], output: Path) -> list[Path]:
    """The main file under the given name, the others beside it.

    Raises:
        UsageError: the place is a folder, or cannot be written.
    """
    if output.is_dir():
        raise UsageError(
            f"{output} is a folder", hint=f"-o {shlex.quote(str(output / next(iter(files))))}"
        )
    places = [output, *(output.with_name(name) for name in list(files)[1:])]
    for place, text in zip(places, files.values(), strict=True):
        write_atomically(place, text.encode())
        if text.startswith("#!"):
            place.chmod(0o755)
    return places
