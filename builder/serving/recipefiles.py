"""Make a recipe's files from the options, and write them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import console
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
from builder.serving.recipe import Place, RecipeRequest, RecipeText, topology_named
from builder.serving.recipeasked import Refusal, asked_recipe
from builder.serving.registry import PROFILES
from builder.serving.release import served_profile

if TYPE_CHECKING:
    from builder.serving.options import RecipeOptions
    from builder.serving.recipe import Recipe
    from builder.serving.release import ServedProfile

#: The default profile of a recipe, and the one that is tried if a release refuses that.
DEFAULT, NEXT = PROFILES


def recipe_text(options: RecipeOptions) -> RecipeText:
    """Make a recipe, and write its files if ``--output`` names a place.

    Raises:
        UsageError: options contradict each other, or a file exists with other content.
    """
    place = Place(
        topology=topology_named(options.topology),
        addresses=options.address,
        interface=options.interface or "",
        launcher=options.form
        if options.form in LAUNCHERS and options.topology != "two-solos"
        else "",
    )
    if "/" in options.model and Path(options.model).is_dir():
        raise UsageError(
            f"{options.model} is a folder: name the model, and the folder with --checkpoint",
            hint=f"spark-build recipe MODEL --checkpoint {shlex.quote(options.model)}",
        )
    model = Models.discover(options.models).model_or_generic(options.model)
    made: Recipe | None = None
    if options.form == TRTLLM:
        given = {
            "--profile": options.profile, "--release": options.release,
            "--image": options.image, "--set": options.chosen,
            "--speculate": options.speculate, "--explain": options.explain,
            "--patches": options.patches,
            "--topology": None if options.topology == "solo" else options.topology,
            "--address": options.address, "--interface": options.interface,
            "--checkpoint": options.checkpoint,
        }  # fmt: skip
        refuse_settings(given)
        files = trtllm(model, options.port)
    else:
        refuse_format(options.form)
        refuse_topology(options.form, place.topology)
        request = RecipeRequest(
            model=model,
            served=_served(options, options.profile or DEFAULT),
            place=place,
            port=options.port,
            chosen=options.chosen,
            speculate=options.speculate,
            checkpoint=options.checkpoint,
            models=options.models,
            patches=options.patches,
        )
        made = _taken(options, request) if options.ask else linted_recipe(request)
        files = rendered(made, options.form)
    written = _write(files, options.output, force=options.force) if options.output else []
    return RecipeText(
        format=options.form, recipe=made, files=files, written=tuple(map(str, written))
    )


def _served(options: RecipeOptions, profile: str) -> ServedProfile:
    return served_profile(profile, options.release, options.image, options.patches)


def _taken(options: RecipeOptions, request: RecipeRequest) -> Recipe:
    """The recipe that the release takes; without ``--profile`` that of the next one, if refused.

    Raises:
        SparkBuildError: the release refuses it (exit 5).
    """
    try:
        return asked_recipe(request, linted_recipe(request))
    except Refusal:
        if options.profile is not None or options.image is not None:
            raise
        other = replace(request, served=_served(options, NEXT))
        made = asked_recipe(other, linted_recipe(other))
        console.say(f"  {DEFAULT} is refused; this recipe has the profile {NEXT}")
        return made


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
