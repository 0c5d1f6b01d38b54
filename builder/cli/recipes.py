"""``spark-build recipes export``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.console import console, counted, print_json
from builder.serving.models import Models
from builder.serving.registry import export_recipes
from builder.serving.release import served_profile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def export_command(
    directory: Path | None,
    *,
    release: str | None,
    tags: Path | None,
    check: bool,
    models: Sequence[Path],
    json: bool,
) -> None:
    """Write a registry, or with ``check`` only compare it, and list its recipes."""
    made = export_recipes(
        Models.discover(models),
        served_profile,
        release=release,
        directory=directory,
        tags=tags,
        check=check,
        folders=models,
    )
    for one in made.without:
        console.say(f"  no recipe for {one.model}: {one.reason}")
    if json:
        print_json(made)
        return
    for recipe in made.recipes:
        print(f"{recipe.model:<24}{recipe.topology:<6}{recipe.profile:<12}{recipe.container}")
    what = counted(len(made.recipes), "recipe")
    print(f"{what} {'up to date' if check else 'written'} in {made.directory}")
