"""Options that several commands share, and what they come to.

Imports of the heavy modules stay inside functions: ``--help`` must not pay for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from builder import settings
from builder.cli import complete
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.bases.model import Base, FactsOf
    from builder.catalog import Catalog, Selection
    from builder.forge.pin import Pin
    from builder.index import PackageIndex
    from builder.native.container import ToolkitChoice

    Identify = Callable[[str], Base]


Layers = Annotated[
    list[str],
    typer.Option(
        "--layers",
        "-l",
        help="Profiles and layers, comma-separated; may be repeated.",
        autocompletion=complete.layers,
        metavar="L[,L...]",
    ),
]
LayersOrPulls = Annotated[
    list[str] | None,
    typer.Option(
        "--layers",
        "-l",
        help="Profiles and layers, comma-separated; may be repeated; or --with-pr.",
        autocompletion=complete.layers,
        metavar="L[,L...]",
    ),
]
WithPr = Annotated[
    list[str] | None,
    typer.Option(
        "--with-pr",
        help="A pull request or commit to apply too: OWNER/REPO#NUMBER[@COMMIT], "
        "OWNER/REPO@COMMIT or its page; may be repeated, and keeps its order.",
        metavar="PULL",
    ),
]
ForgeClone = Annotated[
    list[str] | None,
    typer.Option(
        "--forge-clone",
        help="A local git clone that answers for its repository instead of the forge.",
        metavar="[OWNER/REPO=]DIR",
    ),
]
Locked = Annotated[
    bool,
    typer.Option("--locked", help="Fail (exit 9) unless spark-build.lock is there and holds."),
]
OptionalLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--layers",
        "-l",
        help="Profiles and layers that the target should have (default: what its plan says).",
        autocompletion=complete.layers,
        metavar="L[,L...]",
    ),
]
BaseRef = Annotated[
    str | None,
    typer.Option(
        "--base",
        "-b",
        help="IMAGE, docker://IMAGE (read from its registry, not pulled), oci:DIR[:NAME], "
        "pypi:vllm==VERSION[,NAME==VERSION...], or dir:SITE_PACKAGES (default: the profile's).",
        metavar="BASE",
    ),
]
PlatformName = Annotated[
    str | None,
    typer.Option(
        help="linux/arm64 or linux/amd64 (default: arm64, or the image's own).",
        metavar="PLATFORM",
        autocompletion=complete.one_of(*complete.PLATFORMS),
    ),
]
PythonVersion = Annotated[
    str | None,
    typer.Option("--python", help="Python of a pypi: base (default: 3.12).", metavar="VERSION"),
]
SitePackages = Annotated[
    str | None,
    typer.Option(help="Where the overlay's files go in the image it is meant for.", metavar="DIR"),
]
Level = Annotated[
    list[str] | None,
    typer.Option(
        help="static, imports, dispatch (by default), codegen, binaries, device, serve. "
        "One that is named must run.",
        metavar="LEVEL[,LEVEL...]",
        autocompletion=complete.levels,
    ),
]
Releases = Annotated[
    str | None,
    typer.Option(
        help="vLLM releases, comma-separated (default: every one since 0.17.0).",
        metavar="VERSION[,...]",
    ),
]
Patches = Annotated[
    list[Path] | None,
    typer.Option(
        "--patches",
        help="More layer folders of your own (also: SPARK_BUILD_PATCHES).",
        metavar="DIR",
    ),
]


def _plain_http(hosts: list[str] | None) -> list[str] | None:
    """Called for every command that has the option, also without it: each run starts anew."""
    from builder.registry.options import ask_for_plain_http

    ask_for_plain_http(hosts or ())
    return hosts


#: Its callback takes it; what opens a registry finds it in ``Options.from_environment``.
PlainHttp = Annotated[
    list[str] | None,
    typer.Option(
        "--plain-http",
        callback=_plain_http,
        help="A registry to speak to without TLS; may be repeated (also: SPARK_BUILD_PLAIN_HTTP).",
        metavar="HOST[:PORT]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, errors included.")]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile here what a prebuilt base lacks (needs g++, minutes and memory).",
    ),
]
Toolkit = Annotated[
    str | None,
    typer.Option(
        help="Compile in containers of this image, which has nvcc 13 and g++, in place of here.",
        metavar="IMAGE",
    ),
]
Builder = Annotated[
    str | None,
    typer.Option(
        envvar=settings.BUILDER.name,
        help="Build on this buildx builder, or on the BuildKit daemon at tcp://HOST:PORT, "
        "unix://SOCKET, docker-container://NAME or kube-pod://POD.",
        metavar="NAME|ADDRESS",
        autocompletion=complete.builders,
    ),
]
Refresh = Annotated[
    bool, typer.Option("--refresh", help="Ask the package index again instead of the cache.")
]


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    """What the command line said about pull requests and the lock."""

    with_pr: Sequence[str] = ()
    forge_clone: Sequence[str] = ()
    locked: bool = False


def pull_options(
    with_pr: list[str] | None, forge_clone: list[str] | None, locked: bool = False
) -> PullOptions:
    """The options of a command as one value."""
    return PullOptions(with_pr=with_pr or (), forge_clone=forge_clone or (), locked=locked)


def select(layers: list[str], patches: list[Path] | None) -> tuple[Catalog, Selection]:
    """The catalogue and what ``--layers`` selects from it, its pull requests fetched."""
    from builder.catalog import Catalog

    catalog = Catalog.discover(patches or ())
    return catalog, without_pulls(catalog.select(layers))


def without_pulls(
    selection: Selection, pulls: PullOptions | None = None, held: Mapping[str, Pin] | None = None
) -> Selection:
    """A selection whose pull requests, and those named beside it, are turned into diffs."""
    from builder.pulls.resolve import has_pulls

    pulls = pulls or PullOptions()
    if not pulls.with_pr and not any(has_pulls(layer) for layer in selection.layers):
        return selection
    from builder.forge.store import Forges, PullStore
    from builder.index import PackageIndex
    from builder.pulls.resolve import Resolver

    resolver = Resolver(PullStore(Forges(pulls.forge_clone)), PackageIndex(), held or {})
    return resolver.resolve(selection, pulls.with_pr).selection


def toolkit_choice(
    image: str | None, builder: str | None, *, compiling: bool = True
) -> ToolkitChoice | None:
    """What ``--toolkit`` and ``--builder`` say about where to compile; None: on this machine.

    Raises:
        UsageError: an image to compile in, and nothing is to be compiled; or no such builder.
    """
    if not image:
        return None
    if not compiling:
        raise UsageError(f"--toolkit {image} says where to compile", hint="add --compile")
    from builder.engines.builders import check_name
    from builder.engines.containers import Containers
    from builder.native.container import ToolkitChoice

    return ToolkitChoice(image, Containers(check_name(builder) if builder else ""))


def default_base(selection: Selection, engine: str, *, pull: bool) -> str:
    """The profile's image where a Docker Engine has or can pull it, else its released wheels.

    Raises:
        UsageError: no profile is named, so there is no default.
    """
    from builder.console import console

    if not selection.profiles:
        raise UsageError("no --base, and no profile that has one", hint="--base pypi:vllm==0.20.1")
    profile = selection.profiles[0]
    if engine != "oci":
        from builder.engines import docker
        from builder.errors import SparkBuildError

        try:
            client = docker.connect()
        except SparkBuildError as error:
            console.say(f"  {error}; the base is {profile.pypi}")
            return profile.pypi
        try:
            name = profile.image.removeprefix("docker://")
            docker.find_image(client, name, "linux/arm64", pull=pull)
        except SparkBuildError as error:
            console.say(f"  {error}")
            console.say(f"  using {profile.pypi} instead")
            return profile.pypi
        finally:
            client.close()
        return name
    return profile.pypi


def identify_base(
    ref: str,
    selection: Selection,
    index: PackageIndex,
    *,
    platform: str | None,
    python: str | None = None,
    site_packages: str | None = None,
    engine: str = "auto",
    pins: Mapping[str, str] | None = None,
    libraries: Sequence[str] = (),
    facts_of: FactsOf | None = None,
    noting: bool = False,
) -> Base:
    """Identify a base, following also the packages that user layers name.

    ``pins`` are versions that go before those of the profiles where the base leaves one open.
    ``libraries`` are distributions whose files an image's tree must have too: it knows only those
    of distributions that are asked for.  They are no part of what identifies it.  ``facts_of`` and
    ``noting`` are as in :class:`builder.bases.model.BaseRequest`.
    """
    from builder.applier.versions import normalize
    from builder.bases.identify import identify
    from builder.bases.model import TRACKED, BaseRequest, no_facts

    named = {layer["package"] for layer in selection.layers}
    for variant in (v for layer in selection.layers for v in layer["variants"]):
        named.update(variant["when"])
        for op in variant["ops"]:
            named.update(op.get("if", ()))
            named.update(normalize(op[k]) for k in ("distribution", "version-of") if k in op)
    tracked = (*TRACKED, *sorted(named - set(TRACKED)))
    also = [] if ref.startswith(("pypi:", "dir:")) else [n for n in libraries if n not in tracked]
    base = identify(
        BaseRequest(
            ref=ref,
            platform=platform,
            python=python,
            site_packages=site_packages,
            pins={**selection.pins(), **(pins or {})},
            tracked=(*tracked, *also),
            index=index,
            engine=engine,
            facts_of=facts_of or no_facts,
            noting=noting,
        )
    )
    if not also:
        return base
    packages = {n: v for n, v in base.identity.packages.items() if n not in also}
    return replace(base, identity=replace(base.identity, packages=packages))
