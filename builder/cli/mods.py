"""``spark-build mods export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from builder.errors import Exit, SparkBuildError, UsageError, did_you_mean
from builder.layers.catalog import Catalog, Selection
from builder.layers.documents import ExportedMods
from builder.layers.mods import mod_files, stale_files, write_mod
from builder.lock.file import lock_path, read_lock
from builder.pipeline.select import without_pulls
from builder.util.console import console, print_json
from builder.util.paths import data_dir, in_checkout

if TYPE_CHECKING:
    from collections.abc import Sequence


def export_command(
    names: list[str],
    directory: Path | None,
    layers: list[str] | None,
    with_pr: Sequence[str],
    forge_clone: Sequence[str],
    patches: list[Path] | None,
    *,
    check: bool,
    json: bool,
) -> None:
    """Write mods, or with ``check`` only compare.

    Raises:
        UsageError: a mod is unknown, or ``--layers`` comes without one name.
        SparkBuildError: ``check`` found stale files (exit 9).
    """
    catalog = Catalog.discover(patches or ())
    if layers or with_pr:
        if len(names) != 1:
            raise UsageError(
                "--layers exports one mod and needs its name", hint="mods export NAME --layers L"
            )
        wanted = {names[0]: layers or []}
    else:
        ours = {catalog.profile(p).mod: [p] for p in catalog.profile_files}
        for name in names:
            if name not in ours:
                raise UsageError(
                    f"unknown mod {name!r}{did_you_mean(name, ours)}",
                    hint="spark-build mods export NAME --layers L[,L...]",
                )
        wanted = {name: ours[name] for name in names or ours}
    root = directory or (data_dir("mods") if check or in_checkout() else Path("mods"))
    stale: list[str] = []
    for name, selected in wanted.items():
        files = mod_files(name, _selection(catalog, selected, with_pr, forge_clone))
        if check:
            stale += [f"{name}/{file}" for file in stale_files(root / name, files)]
        else:
            write_mod(root / name, files)
            console.say(f"  wrote {root / name}")
    if stale:
        raise SparkBuildError(
            f"stale below {root}: {', '.join(stale)}", Exit.STALE, hint="spark-build mods export"
        )
    if json:
        print_json(ExportedMods(directory=str(root), mods=tuple(wanted), written=not check))
        return
    print(f"{len(wanted)} mods {'are up to date' if check else 'written'} in {root}")


def _selection(
    catalog: Catalog, layers: list[str], with_pr: Sequence[str], forge_clone: Sequence[str]
) -> Selection:
    """What a mod is made of, with the pull requests that the project's lock pins as it does."""
    chosen = catalog.select(layers) if layers else Selection((), ())
    lock = read_lock(lock_path(Path.cwd())) if with_pr else None
    return without_pulls(chosen, with_pr, forge_clone, lock.pulls if lock else {})
