"""``spark-build layers list|show|check|new|pin``."""

from __future__ import annotations

import datetime
import shlex
from typing import TYPE_CHECKING

from builder.applier.opkinds import Compile
from builder.cli.pulllayer import print_pulls, pulls_of, write_layer
from builder.common.console import console, counted, print_json
from builder.errors import UsageError
from builder.layers.catalog import Catalog, order
from builder.layers.conversion.layers import write_drafts
from builder.layers.documents import (
    CheckedLayers,
    LayerList,
    LayerRow,
    LayerShown,
    NewLayer,
    PinnedLayer,
    ProfileRow,
    ProfileShown,
    ProfileValues,
)
from builder.layers.layerfile import description, load_layer
from builder.pipeline.layercheck import check_layer, check_name, unpinned
from builder.probes.dispatch_expect import describe

if TYPE_CHECKING:
    from pathlib import Path

    from builder.layers.conversion.layers import Reading, Source


def list_command(patches: list[Path] | None, json: bool) -> None:
    """Print profiles and layers."""
    catalog = Catalog.discover(patches or ())
    profiles = [catalog.profile(name) for name in catalog.profile_files]
    layers = order([catalog.layer(name) for name in catalog.folders])
    catalog.say_shadows()
    if json:
        found = (ProfileRow(name=p.name, summary=p.summary, layers=p.layers) for p in profiles)
        rows = (LayerRow(name=one.name, summary=one.summary) for one in layers)
        print_json(LayerList(profiles=tuple(found), layers=tuple(rows)))
        return
    print("profiles")
    for profile in profiles:
        print(f"  {profile.name:<29}{profile.summary}")
    print("layers, in order of application")
    for layer in layers:
        print(f"  {layer.name:<29}{layer.summary}")


def show_command(name: str, patches: list[Path] | None, refresh: bool, json: bool) -> None:
    """Print one layer or profile."""
    catalog = Catalog.discover(patches or ())
    if name in catalog.profile_files:
        _show_profile(catalog, name, json)
        return
    layer = catalog.layer(name, kind="layer or profile")
    catalog.say_shadows([name])
    pulls = pulls_of(layer, refresh=refresh)
    if json:
        print_json(LayerShown(digest=layer.digest, layer=layer.rendered, pulls=pulls))
        return
    print(f"{name}: {layer.summary}\n")
    print(f"{description(catalog.folders[name])}\n")
    print(f"  changes    {layer.package}")
    print(f"  after      {', '.join(layer.after) or 'nothing'}")
    for key, value in layer.provenance.items():
        print(f"  {key:<18} {', '.join(value) if isinstance(value, list) else value}")
    for variant in layer.variants:
        ranges = ", ".join(f"{p} {s}" for p, s in variant.when.items())
        print(f"\n  variant {variant.name}: {ranges}")
        for op in variant.ops:
            label = op.subject
            if isinstance(op, Compile) and op.change:
                label = f"{op.change_name} in {op.source}, for {op.arch}"
            print(f"    {op.kind:<8} {label}")
        for note in variant.notes:
            print(f"    note: {note}")
    for entry in layer.upstream:
        ranges = ", ".join(f"{p} {s}" for p, s in entry.when.items())
        print(f"\n  upstream for {ranges}, since {entry.since}: {entry.reason}")
    for entry in layer.not_applicable:
        ranges = ", ".join(f"{p} {s}" for p, s in entry.when.items())
        print(f"\n  not applicable for {ranges}: {entry.reason}")
    print_pulls(pulls)


def _show_profile(catalog: Catalog, name: str, json: bool) -> None:
    profile = catalog.profile(name)
    if json:
        values = ProfileValues(
            name=name,
            summary=profile.summary,
            layers=profile.layers,
            image=profile.image,
            pypi=profile.pypi,
            expect=profile.expect,
        )
        print_json(ProfileShown(profile=values))
        return
    print(f"{name}: {profile.summary}\n")
    print(f"  layers     {', '.join(profile.layers)}")
    print(f"  image      {profile.image}")
    print(f"  or         {profile.pypi}")
    for e in profile.expect:
        ranges = ", ".join(f"{p} {s}" for p, s in e.when.items())
        print(f"  expects    {e.kind}: {describe(e)}   ({ranges})")


def check_command(names: list[str], patches: list[Path] | None, json: bool) -> None:
    """Load and check every layer; the first one that is wrong raises an error."""
    catalog = Catalog.discover(patches or ())
    catalog.say_shadows(names)
    checked = names or list(catalog.folders)
    layers = [catalog.layer(name) for name in checked]
    for layer in layers:  # grows: what a layer comes after is checked too
        layers += [o for n in layer.after if (o := catalog.layer(n)) not in layers]
        check_name(layer.name, catalog.profile_files)
        check_layer(layer)
    order(layers)
    if json:
        print_json(CheckedLayers(checked=tuple(checked)))
    else:
        print(f"{counted(len(checked), 'layer')} well-formed")


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


_TEMPLATE = '''\
summary = "what this layer does, in one line"
description = """
Why it exists, and what goes wrong without it.
"""
order = 50
package = "{package}"

[provenance]
origin = "vendor, our own"
forwarded = "no"
applied-upstream = "no"
last-update = {today}

# Releases that already have the change: the range selects them, the probe then checks the file.
# [[upstream]]
# when = {{ "{package}" = ">=1.2.0rc0" }}
# since = "{package} 1.2.0"
# reason = "merged as #123"
# probe = [{{ file = "{module}/example.py", contains = "def fixed" }}]

[[variant]]
name = "first"
when = {{ "{package}" = ">=1.0.0,<1.2.0rc0" }}

[[variant.op]]
op = "replace"
file = "{module}/example.py"
old = \'\'\'the exact text before\'\'\'
new = \'\'\'the exact text after\'\'\'
count = 1
'''


def new_command(
    name: str,
    directory: Path,
    package: str,
    pull: str | None,
    project: str,
    forge_clone: list[str] | None,
    *,
    json: bool,
) -> None:
    """Write a layer folder: with an example to edit, or with a pull request.

    Raises:
        UsageError: the name is not valid, or the folder exists.
        RemoteError: the forge does not answer, or has no such pull request.
    """
    check_name(name, Catalog.discover().profile_files)
    folder = directory / name
    if folder.exists():
        raise UsageError(f"{folder} already exists", hint="--in DIR")
    if pull is not None:
        write_layer(folder, pull, project, forge_clone or ())
    else:
        folder.mkdir(parents=True)
        text = _TEMPLATE.format(
            package=package, module=package.replace("-", "_"), today=_today().isoformat()
        )
        (folder / "layer.toml").write_text(text)
    _print_new(NewLayer(name=name, directory=str(folder)), directory, json=json)


def convert_command(
    name: str, directory: Path, source: Source, reading: Reading, *, json: bool
) -> None:
    """Write layer folders out of patch files, a patch series or a mod.

    Raises:
        UsageError: the name is not valid, a folder exists, or the source cannot be converted.
    """
    check_name(name, Catalog.discover().profile_files)
    drafts = source.drafts(name, reading)
    folders = write_drafts(drafts, directory, _today())
    dropped = tuple(text for draft in drafts for text in draft.dropped)
    unconverted = tuple(text for draft in drafts for text in draft.unconverted)
    for text in dropped:
        console.say(f"  left out       {text}")
    for text in unconverted:
        console.warn(f"not converted: {text}")
    series = tuple(folder.name for folder in folders) if source.series else ()
    made = NewLayer(
        name=name,
        directory=str(directory if series else folders[0]),
        series=series,
        dropped=dropped,
        unconverted=unconverted,
    )
    _print_new(made, directory, json=json)


def _print_new(made: NewLayer, directory: Path, *, json: bool) -> None:
    names = made.series or (made.name,)
    for name in names:
        if unpinned(load_layer(directory / name)):
            console.say(
                f"pin its inputs: spark-build layers pin {name} "
                f"--patches {shlex.quote(str(directory))}"
            )
    console.say(
        f"edit {directory / names[0] / 'layer.toml'}, then: "
        f"spark-build layers check {' '.join(names)} --patches {directory}"
    )
    console.say(
        f"see where it applies: spark-build matrix -l {','.join(names)} --patches {directory}"
    )
    if json:
        print_json(made)
    else:
        print("\n".join(str(directory / name) for name in names))


def pin_command(
    name: str,
    patches: list[Path] | None,
    refresh: bool,
    forge_clone: list[str] | None,
    *,
    json: bool,
) -> None:
    """Write ``pins.toml`` from the package index and the forge."""
    from builder.common.forge import Forges, PullStore
    from builder.common.pypi import PackageIndex
    from builder.pipeline.pins import write_pins

    catalog = Catalog.discover(patches or ())
    layer = catalog.layer(name)
    store = PullStore(Forges(forge_clone or ()))
    count = write_pins(catalog.folders[name], layer, PackageIndex(refresh=refresh), store)
    file = catalog.folders[name] / "pins.toml"
    if json:
        print_json(PinnedLayer(name=name, file=str(file), inputs=count))
    else:
        print(f"{file}: {count} inputs pinned")
