"""Overlays cannot run alone, so they are only published as overlays."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from builder.engines.overlay import find_dockerfile
from builder.errors import UsageError
from builder.registry.locations import layout_place
from builder.util.console import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.publish.sources import Opened


def check_overlay(opened: Opened, *, allowed: bool, to: Sequence[str]) -> None:
    """Refuse an overlay unless ``--overlay`` was given; ``to`` is the destination.

    Raises:
        UsageError: it is an overlay without the option, or the option without an overlay.
    """
    if opened.overlay and allowed:
        console.say(f"  {opened.text} is an overlay: it runs on {opened.recipe.base}, not alone")
    elif allowed:
        raise UsageError(f"{opened.text} is an image, but --overlay is for overlays")
    elif opened.overlay:
        lines, build = how_to_run(opened)
        published = shlex.join(["spark-build", "publish", opened.recipe.image, *to])
        asked = shlex.join(["spark-build", "publish", opened.text, *to, "--overlay"])
        raise UsageError(
            f"{opened.text} is an overlay with only the changed files, without Python and vLLM. "
            f"It is not published as an image.\n{lines}\n"
            f"  Publish that: {published}\n  Or publish the overlay itself: {asked}",
            hint=build,
        )


def how_to_run(opened: Opened) -> tuple[str, str]:
    """How to build an image from an overlay: the Dockerfile, if no file has it, and the command."""
    recipe = opened.recipe
    found = None
    if opened.text.startswith("oci:"):
        found = find_dockerfile(layout_place(opened.text)[0], opened.claims[0].digest)
    build = recipe.command(found)
    lines = [f"The image consists of {recipe.base} and the overlay: {build}"]
    if found is None:
        lines += ["with this Dockerfile:", *(f"  {x}" for x in recipe.dockerfile.splitlines())]
    return "\n".join(f"  {line}" for line in lines), build
