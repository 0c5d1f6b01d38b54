"""Export mods: from profiles, or one from layers and pull requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import console
from builder.common.hints import again
from builder.common.paths import data_dir, in_checkout
from builder.common.pypi import PackageIndex
from builder.errors import Exit, SparkBuildError, UsageError, did_you_mean
from builder.layers.catalog import Catalog, ExportedMods, Selection
from builder.layers.lock import lock_path, read_lock
from builder.layers.mods import export, mod_files, outdated
from builder.layers.pulls import without_pulls
from builder.pipeline.pins import check_layer, check_name, check_together
from builder.pipeline.vendored import vendored_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.pipeline.options import ModOptions


def export_mods(options: ModOptions) -> ExportedMods:
    """Write mods, or with ``--check`` only compare.

    Raises:
        UsageError: a mod is unknown, ``--layers`` has no name for its mod, or ``--vendor`` or
            ``--zip`` has no directory: the mods of the checkout are folders without wheels.
        SparkBuildError: ``--check`` found stale files (exit 9).
    """
    if (options.vendor is not None or options.zipped) and options.directory is None:
        raise UsageError("--vendor and --zip need a directory to write to", hint="--in DIR")
    catalog = Catalog.discover(options.patches)
    wanted = _wanted(catalog, options.names, options.layers, options.with_pr)
    root = options.directory or (
        data_dir("mods") if options.check or in_checkout() else Path("mods")
    )
    index = PackageIndex()
    stale: list[str] = []
    for name, selected in wanted.items():
        selection = _selection(catalog, selected, options.with_pr, options.forge_clone)
        for layer in selection.layers:
            check_layer(layer)
        check_together(selection.layers)
        files = mod_files(name, selection)
        if options.vendor is not None:
            files |= vendored_files(selection, options.vendor, index)
        target = root / (f"{name}.zip" if options.zipped else name)
        if options.check:
            stale += outdated(target, files)
        else:
            export(target, files)
            console.say(f"  wrote {target}")
    if stale:
        raise SparkBuildError(
            f"stale below {root}: {', '.join(stale)}",
            Exit.STALE,
            hint=again(without=("--check",)),
        )
    return ExportedMods(directory=str(root), mods=tuple(wanted), written=not options.check)


def _wanted(
    catalog: Catalog, names: Sequence[str], layers: Sequence[str], with_pr: Sequence[str]
) -> dict[str, Sequence[str]]:
    """Mods, each with its profiles or layers."""
    if layers or with_pr:
        if len(names) != 1:
            raise UsageError(
                "--layers exports one mod and needs its name",
                hint="spark-build mods export NAME --layers L[,L...]",
            )
        check_name(names[0], {})
        return {names[0]: layers}
    ours: dict[str, Sequence[str]] = {catalog.profile(p).mod: [p] for p in catalog.profile_files}
    for name in names:
        if name not in ours:
            raise UsageError(
                f"unknown mod {name!r}{did_you_mean(name, ours)}",
                hint="spark-build mods export NAME --layers L[,L...]",
            )
    return {name: ours[name] for name in names or ours}


def _selection(
    catalog: Catalog, layers: Sequence[str], with_pr: Sequence[str], forge_clone: Sequence[str]
) -> Selection:
    """The layers of a mod, with pull requests as the project's lock pins them."""
    chosen = catalog.select(layers) if layers else Selection((), ())
    lock = read_lock(lock_path(Path.cwd())) if with_pr else None
    return without_pulls(chosen, with_pr, forge_clone, lock.pulls if lock else {})
