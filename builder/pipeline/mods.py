"""Mods: layers that are applied when a container starts (sparkrun, spark-vllm-docker).

A mod is a folder with a ``run.sh`` that is called without arguments in its own folder.  Ours
has the applier and the rendered layers and needs nothing else: no git, no dotfile, no package of
ours.  ``run.sh`` names the applier and how to read its source.  The layers' pinned inputs are
downloaded from the package index in the container's pip configuration, into a persistent cache
if there is one (``builder/applier/sources.py``), or come with the mod.
"""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from builder import __version__
from builder.applier.files import read_regular
from builder.applier.layers import DonorPin
from builder.applier.sources import VENDORED, donor_name
from builder.applier.states import AMBIGUOUS, DRIFT
from builder.applier.values import all_match, sha256_hex
from builder.common.console import console
from builder.common.files import write_atomically
from builder.common.hints import again
from builder.common.paths import data_dir, in_checkout, project_file
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.errors import Exit, SparkBuildError, UsageError, did_you_mean
from builder.images.engines.maker import APPLIER, applier_bundle
from builder.layers.catalog import Catalog, ExportedMods, Selection
from builder.layers.lock import lock_path, read_lock
from builder.layers.pinned import IndexSources
from builder.layers.planner import make_plan
from builder.layers.pulls import without_pulls
from builder.pipeline.bases import identify_base
from builder.pipeline.pins import check_layer, check_name, check_together
from builder.probes import TERMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.applier.layers import InputPin
    from builder.applier.sources import Member
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


# ------------------------------------------------------------------------------ the files of a mod


_RUN = r"""#!/bin/sh
# {name}: {summary}
# Generated by `spark-build mods export`; edit the layers, not this.
# Runs once per container start, before vLLM; a second run changes nothing. Fails loudly on drift.
#
# What runs: {applier}, the applier of spark-build {version} (builder/applier),
#   sha256 {digest}
# What it changes: layers.json. To read the program (a zip archive of plain text):
#   python3 -m zipfile --list {applier}
#   unzip -p {applier} builder/applier/commandline.py
set -eu
for python in "${{VLLM_PYTHON:-}}" "${{VIRTUAL_ENV:-/nonexistent}}/bin/python" python3 python \
    /opt/venv/bin/python3 /usr/local/bin/python3 /usr/bin/python3; do
  command -v "$python" >/dev/null 2>&1 || continue
  "$python" -c 'import importlib.metadata as m; m.version("vllm")' >/dev/null 2>&1 || continue
  exec "$python" -B ./{applier} apply --layers ./layers.json
done
echo "{name}: no Python here has vllm; set VLLM_PYTHON to the one that has" >&2
exit 6
"""


#: The files of a mod: path in it -> bytes and mode.
ModFiles = dict[str, tuple[bytes, int]]


def mod_files(name: str, selection: Selection) -> ModFiles:
    """The files of a mod that downloads its layers' pinned inputs."""
    profile = selection.profiles[0] if selection.profiles else None
    bundle = {
        "schema": 1,
        "name": name,
        "needs": dict(profile.needs) if profile else {},
        "needs_reason": profile.needs_reason if profile else "",
        "layers": [layer.rendered for layer in selection.layers],
    }
    summary = profile.summary if profile else ", ".join(x.name for x in selection.layers)
    applier = applier_bundle()
    script = _RUN.format(
        name=name,
        summary=summary,
        applier=APPLIER,
        version=__version__,
        digest=sha256_hex(applier),
    )
    return {
        "run.sh": (script.encode(), 0o755),
        "layers.json": (json.dumps(bundle, indent=1, sort_keys=True).encode() + b"\n", 0o644),
        APPLIER: (applier, 0o644),
        **{term: (project_file(term).read_bytes(), 0o644) for term in TERMS},
    }


def mod_zip(files: ModFiles) -> bytes:
    """A mod as one zip file with ``run.sh`` at its root, reproducible.

    It is uncompressed, because zlib versions compress differently and wheels are already
    compressed.
    """
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            data, mode = files[name]
            member = zipfile.ZipInfo(name)  # of 1980, the earliest that the format has
            member.create_system, member.external_attr = 3, (0o100000 | mode) << 16
            archive.writestr(member, data)
    return stream.getvalue()


def _holds(path: Path, data: bytes) -> bool:
    """Whether a file has these bytes."""
    return path.stat().st_size == len(data) and read_regular(path, len(data)) == data


def stale_files(folder: Path, files: ModFiles) -> list[str]:
    """Files of a mod that are missing, differ, or should not be there."""
    wrong = []
    for name, (data, mode) in files.items():
        path = folder / name
        if (
            not path.is_file()
            or not _holds(path, data)
            or bool(path.stat().st_mode & 0o111) != bool(mode & 0o111)
        ):
            wrong.append(name)
    return sorted([*wrong, *_extra(folder, files)])


def _extra(folder: Path, files: ModFiles) -> set[str]:
    """Unexpected files; a folder without files of a mod is named as a whole."""
    within = {name.partition("/")[0] for name in files if "/" in name}
    extra = _names(folder) - set(files) - within - {"__pycache__"}
    for name in within:
        if (folder / name).is_dir():
            extra |= {f"{name}/{file}" for file in _names(folder / name)} - set(files)
        elif (folder / name).exists():
            extra.add(name)
    return extra


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def write_mod(folder: Path, files: ModFiles) -> None:
    """Write a mod's folder."""
    for name in _extra(folder, files):
        extra = folder / name
        shutil.rmtree(extra) if extra.is_dir() else extra.unlink()
    for name, (data, mode) in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(mode)


def outdated(target: Path, files: ModFiles) -> list[str]:
    """Stale files of a mod's folder or zip file, by path."""
    if target.suffix == ".zip":
        same = target.is_file() and _holds(target, mod_zip(files))
        return [] if same else [target.name]
    return [f"{target.name}/{file}" for file in stale_files(target, files)]


def export(target: Path, files: ModFiles) -> None:
    """Write a mod as a folder, or as a zip file if the name ends so."""
    if target.suffix == ".zip":
        write_atomically(target, mod_zip(files))
    else:
        write_mod(target, files)


# ------------------------------------------------------------------ the files that a mod downloads


#: The platform of a DGX Spark.
_PLATFORM = "linux/arm64"


class _Asking(IndexSources):
    """Records requests, by the names that the applier caches them under.

    These are more than a plan's inputs: the applier also reads a wheel to see that it is already
    installed.
    """

    def __init__(self, index: PackageIndex) -> None:
        super().__init__(index)
        self.asked: dict[str, InputPin] = {}

    def donor(self, pin: DonorPin) -> bytes:
        self.asked[donor_name(pin)] = pin
        return super().donor(pin)

    def members(self, pin: InputPin) -> list[Member]:
        self.asked[pin.filename] = pin
        return super().members(pin)

    def content(self, name: str) -> bytes:
        """The requested bytes, checked against their pin."""
        pin = self.asked[name]
        return (
            self.donor(pin)
            if isinstance(pin, DonorPin)
            else self._wheel(pin).download().read_bytes()
        )


def vendored_files(selection: Selection, named: str, index: PackageIndex) -> ModFiles:
    """The files that layers take from the package index on the given vLLM releases, for arm64.

    Raises:
        UsageError: no release is given, or the profile does not support one.
        SparkBuildError: a layer drifted on one (exit 4).
    """
    releases = [word.strip() for word in named.split(",") if word.strip()]
    if not releases:
        raise UsageError("no vLLM release named", hint="--vendor 0.22.1")
    sources = _Asking(index)
    for release in releases:
        base = identify_base(Ref(f"pypi:vllm=={release}"), selection, index, platform=_PLATFORM)
        for profile in selection.profiles:
            if not all_match(profile.needs, base.identity.packages):
                raise UsageError(
                    f"{profile.name} does not support vllm {release}: {profile.needs_reason}",
                    hint="spark-build matrix -l " + profile.name,
                )
        for decision in make_plan(base, selection, sources).decisions:
            if decision.outcome.state in (DRIFT, AMBIGUOUS):
                raise SparkBuildError(
                    f"{decision.name} on vllm {release}: {decision.outcome.reason}",
                    Exit.DRIFT,
                    hint=f"spark-build layers show {decision.name}",
                )
    return {f"{VENDORED}/{name}": (sources.content(name), 0o644) for name in sorted(sources.asked)}
