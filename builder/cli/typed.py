"""Options that several commands share.

Heavy modules are imported inside functions, to keep ``--help`` fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from builder import settings
from builder.cli import complete

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.images.rootfs.base import Base

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
        help="An extra pull request or commit to apply: OWNER/REPO#NUMBER[@COMMIT], "
        "OWNER/REPO@COMMIT or its page; may be repeated; the order is kept.",
        metavar="PULL",
    ),
]
ForgeClone = Annotated[
    list[str] | None,
    typer.Option(
        "--forge-clone",
        help="A local git clone to use instead of the forge.",
        metavar="[OWNER/REPO=]DIR",
    ),
]
Locked = Annotated[
    bool,
    typer.Option(
        "--locked", help="Fail (exit 9) unless spark-build.lock exists and is up to date."
    ),
]
OptionalLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--layers",
        "-l",
        help="Profiles and layers that the target should have (default: those of its plan).",
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
        autocompletion=complete.one_of("linux/arm64", "linux/amd64"),
    ),
]
PythonVersion = Annotated[
    str | None,
    typer.Option("--python", help="Python of a pypi: base (default: 3.12).", metavar="VERSION"),
]
SitePackages = Annotated[
    str | None,
    typer.Option(
        help="The site-packages path in the image that the overlay is for.", metavar="DIR"
    ),
]
Level = Annotated[
    list[str] | None,
    typer.Option(
        help="static, imports, dispatch (by default), codegen, numbers, binaries, device, serve. "
        "Named levels must run.",
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
    """Called for every command that has the option, given or not: each run starts afresh."""
    from builder.images.registry.reference import ask_for_plain_http

    ask_for_plain_http(hosts or ())
    return hosts


#: Its callback stores it; registry clients read it from ``Options.from_environment``.
PlainHttp = Annotated[
    list[str] | None,
    typer.Option(
        "--plain-http",
        callback=_plain_http,
        help="A registry to contact over plain HTTP; may be repeated (also: "
        "SPARK_BUILD_PLAIN_HTTP).",
        metavar="HOST[:PORT]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, errors included.")]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile kernels that a prebuilt base lacks (needs g++, several minutes and memory).",
    ),
]
Toolkit = Annotated[
    str | None,
    typer.Option(
        help="Compile in containers of this image (with nvcc 13 and g++) instead of on this "
        "machine.",
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
    bool,
    typer.Option("--refresh", help="Query the package index again instead of using the cache."),
]
TrustImage = Annotated[
    bool,
    typer.Option(
        "--trust-image",
        help="Run the image's Python on this machine without isolation, even if its files are "
        "unknown.",
    ),
]
ModelFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--models",
        help="A folder with models of your own (NAME.toml); may be repeated.",
        metavar="DIR",
    ),
]
