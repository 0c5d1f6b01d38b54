"""``spark-build layers list|show|check|new|pin|diff|export``, and ``mods export``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from builder.cli.command import Group
from builder.common.console import console, counted, one_line, print_json, tell
from builder.common.options import Argument, ForgeClone, Json, Option, Patches, Refresh
from builder.errors import UsageError
from builder.pipeline.options import DiffOptions, LayerExportOptions, ModOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from builder.layers.catalog import Catalog, NewLayer
    from builder.layers.conversion import Draft
    from builder.pipeline.checking import LayerFinding

_layers = Group(
    "layers", "spark-build layers list", "spark-build layers show b12x-full", default="list"
)
_mods = Group("mods", "spark-build mods export")

LayerName = Annotated[str, Argument("Name of a layer or profile.", "NAME", complete="layer")]


@_layers.sub("list", "spark-build layers list")
def list_all(patches: Patches = (), *, json: Json = False) -> None:
    """List profiles and layers, one line each."""
    from builder.layers.catalog import Catalog, LayerList, LayerRow, ProfileRow, order

    catalog = Catalog.discover(patches)
    profiles = [catalog.profile(name) for name in catalog.profile_files]
    layers = order([catalog.layer(name) for name in catalog.folders])
    catalog.say_shadows()
    if json:
        profile_rows = (
            ProfileRow(name=p.name, summary=p.summary, layers=p.layers) for p in profiles
        )
        rows = (LayerRow(name=one.name, summary=one.summary) for one in layers)
        print_json(LayerList(profiles=tuple(profile_rows), layers=tuple(rows)))
        return
    tell("profiles")
    for profile in profiles:
        tell(f"  {profile.name:<29}{one_line(profile.summary)}")
    tell("layers, in order of application")
    for layer in layers:
        tell(f"  {layer.name:<29}{one_line(layer.summary)}")


@_layers.sub("show", "spark-build layers show b12x-full", "spark-build layers show b12x-env --json")
def show(
    name: LayerName,
    patches: Patches = (),
    *,
    refresh: Annotated[
        bool, Option("Also look up the current state of its pull requests.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what a layer or profile does, and for which versions."""
    from builder.applier.layers import Compile
    from builder.layers.catalog import Catalog, LayerShown
    from builder.layers.layerfile import description
    from builder.pipeline.show import print_pulls, pulls_of

    catalog = Catalog.discover(patches)
    if name in catalog.profile_files:
        _show_profile(catalog, name, json)
        return
    layer = catalog.layer(name, kind="layer or profile")
    catalog.say_shadows([name])
    pulls = pulls_of(layer, refresh=refresh)
    if json:
        print_json(LayerShown(digest=layer.digest, layer=layer.rendered, pulls=pulls))
        return
    tell(f"{name}: {one_line(layer.summary)}\n")
    tell(f"{description(catalog.folders[name])}\n")
    tell(f"  changes    {layer.package}")
    tell(f"  after      {', '.join(layer.after) or 'nothing'}")
    for key, value in layer.provenance.items():
        tell(f"  {key:<18} {', '.join(value) if isinstance(value, list) else value}")
    for variant in layer.variants:
        ranges = ", ".join(f"{p} {s}" for p, s in variant.when.items())
        tell(f"\n  variant {variant.name}: {ranges}")
        for op in variant.ops:
            label = op.subject
            if isinstance(op, Compile) and op.change:
                label = f"{op.change_name} in {op.source}, for {op.arch}"
            tell(f"    {op.kind:<8} {label}")
        for note in variant.notes:
            tell(f"    note: {note}")
    for entry in layer.upstream:
        ranges = ", ".join(f"{p} {s}" for p, s in entry.when.items())
        tell(f"\n  upstream for {ranges}, since {entry.since}: {entry.reason}")
    for entry in layer.not_applicable:
        ranges = ", ".join(f"{p} {s}" for p, s in entry.when.items())
        tell(f"\n  not applicable for {ranges}: {entry.reason}")
    print_pulls(pulls)


def _show_profile(catalog: "Catalog", name: str, json: bool) -> None:
    from builder.layers.catalog import ProfileShown, ProfileValues
    from builder.probes.dispatch_expect import describe

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
    tell(f"{name}: {profile.summary}\n")
    tell(f"  layers     {', '.join(profile.layers)}")
    tell(f"  image      {profile.image}")
    tell(f"  or         {profile.pypi}")
    for e in profile.expect:
        ranges = ", ".join(f"{p} {s}" for p, s in e.when.items())
        tell(f"  expects    {e.kind}: {describe(e)}   ({ranges})")


@_layers.sub(
    "check",
    "spark-build layers check",
    "spark-build layers check my-fix --patches my-layers",
    "spark-build layers check my-fix --patches my-layers --releases all --strict",
)
def check(
    names: Annotated[
        tuple[str, ...], Argument("Layers (default: all).", "NAME", complete="layer")
    ] = (),
    patches: Patches = (),
    *,
    releases: Annotated[
        str | None,
        Option(
            "Also try these releases of each layer's package, or all (default: no network).",
            "VERSION[,...]|all",
        ),
    ] = None,
    strict: Annotated[bool, Option("Fail (exit 2) if there is a warning.")] = False,
    refresh: Refresh = False,
    json: Json = False,
) -> None:
    """Check layer files, and warn of what they will fail by later."""
    from builder.pipeline.checking import check_layers

    done = check_layers(names, patches, releases, refresh=refresh)
    if json:
        print_json(done)
    else:
        tell(f"{counted(len(done.checked), 'layer')} well-formed")
    _print_findings(done.findings)
    if strict and done.findings:
        count = counted(len(done.findings), "warning")
        raise UsageError(f"{count}, and --strict allows none", hint="docs/layers.md explains each")


def _print_findings(findings: "Iterable[LayerFinding]") -> None:
    for one in findings:
        console.warn(str(one))


@_layers.sub(
    "new",
    "spark-build layers new my-fix --in my-layers",
    "spark-build layers new my-fix --from-pr vllm-project/vllm#40082",
    "spark-build layers new my-fix --from-patch fix.patch --in my-layers",
    "spark-build layers new qwen --from-series docker/patches/qwen3.8/vllm",
    "spark-build layers new my-mod --from-mod mods/my-mod",
)
def new(
    name: Annotated[str, Argument("Name of the new layer; also its folder.", "NAME")],
    directory: Annotated[Path, Option("Parent folder.", "DIR", "--in")] = Path(),
    package: Annotated[
        str,
        Option(
            "The Python distribution that it changes (default: found in the paths, or vllm).",
            "PACKAGE",
        ),
    ] = "",
    from_pr: Annotated[
        str | None, Option("Create it from a pull request or commit, pinned.", "PULL")
    ] = None,
    from_patch: Annotated[
        tuple[Path, ...], Option("Create it from a patch file; may be repeated.", "FILE")
    ] = (),
    from_series: Annotated[
        Path | None,
        Option("Create a layer for each patch of a folder with a 'series' file.", "DIR"),
    ] = None,
    from_mod: Annotated[
        Path | None,
        Option("Create it from a mod, a folder or zip with run.sh, which runs isolated.", "DIR"),
    ] = None,
    base: Annotated[
        str,
        Option(
            "With --from-mod: the base that the mod is for (default: the newest release).",
            "BASE",
            "--base -b",
        ),
    ] = "",
    project: Annotated[
        str,
        Option("The repository that a patch is for, or that a fork is a fork of.", "OWNER/REPO"),
    ] = "",
    exclude: Annotated[
        tuple[str, ...],
        Option("Leave out files of the change that match; may be repeated.", "PATTERN"),
    ] = (),
    forge_clone: ForgeClone = (),
    *,
    json: Json = False,
) -> None:
    """Create a layer: an example, or from an existing change."""
    from builder.layers.catalog import Catalog, NewLayer
    from builder.layers.conversion import Reading, Source
    from builder.pipeline.newlayer import write_example, write_layer
    from builder.pipeline.pins import check_name

    source = Source(pull=from_pr or "", patches=from_patch, series=from_series, mod=from_mod)
    if base and from_mod is None:
        raise UsageError("--base is for --from-mod", hint="--from-mod DIR")
    check_name(name, Catalog.discover().profile_files)
    folder = directory / name
    if source.converts:
        reading = Reading(repository=project, package=package, exclude=exclude)
        drafts = source.drafts(name, reading)
        made = _written(name, directory, drafts, is_series=from_series is not None)
        _print_new(made, directory, json=json)
        return
    if folder.exists():
        raise UsageError(f"{folder} already exists", hint="--in DIR")
    if from_mod is not None:
        from builder.pipeline.modlayer import mod_draft

        drafts = [mod_draft(name, from_mod, base, package)]
        made = _written(name, directory, drafts, is_series=False)
        _print_new(made, directory, json=json)
        return
    if from_pr is not None:
        write_layer(folder, from_pr, project, forge_clone, exclude)
    else:
        write_example(folder, package or "vllm")
    _print_new(NewLayer(name=name, directory=str(folder)), directory, json=json)


def _written(
    name: str, directory: Path, drafts: "Sequence[Draft]", *, is_series: bool
) -> "NewLayer":
    """Write layer folders out of patch files, a patch series or a mod."""
    import datetime

    from builder.layers.catalog import NewLayer
    from builder.layers.conversion import write_drafts

    folders = write_drafts(drafts, directory, datetime.datetime.now(datetime.UTC).date())
    dropped = tuple(text for draft in drafts for text in draft.dropped)
    unconverted = tuple(text for draft in drafts for text in draft.unconverted)
    for text in dropped:
        console.say(f"  left out       {text}")
    for text in unconverted:
        console.warn(f"not converted: {text}")
    series = tuple(folder.name for folder in folders) if is_series else ()
    return NewLayer(
        name=name,
        directory=str(directory if series else folders[0]),
        series=series,
        dropped=dropped,
        unconverted=unconverted,
    )


def _print_new(layer: "NewLayer", directory: Path, *, json: bool) -> None:
    names = layer.series or (layer.name,)
    console.say(
        f"edit {directory / names[0] / 'layer.toml'}, then: "
        f"spark-build layers check {' '.join(names)} --patches {directory}"
    )
    console.say(
        f"see where it applies: spark-build matrix -l {','.join(names)} --patches {directory}"
    )
    if json:
        print_json(layer)
    else:
        tell("\n".join(str(directory / name) for name in names))


@_layers.sub("pin", "spark-build layers pin my-fix --patches my-layers")
def pin(
    name: LayerName,
    patches: Patches = (),
    *,
    refresh: Refresh = False,
    forge_clone: ForgeClone = (),
    json: Json = False,
) -> None:
    """Write a layer's pins.toml with the sha256 of its inputs.

    Inputs are wheels, donor files and pull requests.
    """
    from builder.common.forge import Forges, PullStore
    from builder.common.pypi import PackageIndex
    from builder.layers.catalog import Catalog, PinnedLayer
    from builder.pipeline.pins import write_pins

    catalog = Catalog.discover(patches)
    layer = catalog.layer(name)
    store = PullStore(Forges(forge_clone))
    count = write_pins(catalog.folders[name], layer, PackageIndex(refresh=refresh), store)
    file = catalog.folders[name] / "pins.toml"
    if json:
        print_json(PinnedLayer(name=name, file=str(file), inputs=count))
    else:
        tell(f"{file}: {count} inputs pinned")


@_layers.sub(
    "diff",
    "spark-build layers diff my-fix --patches my-layers -b pypi:vllm==0.33.0",
    "spark-build layers diff b12x-env -b pypi:vllm==0.33.0 --edit work",
)
def diff(options: DiffOptions, *, json: Json = False) -> None:
    """Fix a layer that does not fit a release: edit its files there.

    The edit becomes a variant of the layer, for the releases that it fits.
    """
    from builder.pipeline.layerfix import fix_layer, follows_from

    done = fix_layer(options)
    _print_findings(done.findings)
    if done.state == "unpacked":
        console.say("edit them, then run the same command again")
    elif command := follows_from(Path(done.folder)):
        console.say(f"write what follows from it: {command}")
    if json:
        print_json(done)
    else:
        tell("\n".join(done.lines()))


@_layers.sub(
    "export",
    "spark-build layers export flashinfer-w4a16-store-wait > change.patch",
    "spark-build layers export my-fix --patches my-layers --format pr",
)
def export_one(options: LayerExportOptions, *, json: Json = False) -> None:
    """Print a layer as a patch of its project, or as a pull request.

    The patch has the paths of the project's repository.
    """
    from builder.pipeline.layerexport import export_layer

    done = export_layer(options)
    console.say(f"{done.name} for {done.repository}, made on {done.release}")
    if json:
        print_json(done)
    else:
        print(done.text, end="")


@_mods.sub(
    "export",
    "spark-build mods export",
    "spark-build mods export --check",
    "spark-build mods export my-mod --layers b12x-full,my-fix --in mods",
    "spark-build mods export my-mod -l b12x-full --vendor 0.22.1 --in out",
)
def export(options: ModOptions, *, json: Json = False) -> None:
    """Write self-contained mods/NAME/run.sh from the layers."""
    from builder.pipeline.mods import export_mods

    done = export_mods(options)
    if json:
        print_json(done)
        return
    state = "up to date" if options.check else "written"
    tell(f"{counted(len(done.mods), 'mod')} {state} in {done.directory}")
