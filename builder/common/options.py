"""An option of the command line, declared once: beside the dataclass field that it fills.

A field is an option if its annotation has an :class:`Option` or an :class:`Argument`; the command
line reads name, type, default and help from there. Modules with such fields do not import
annotations from the future: a string would have to be evaluated at every start.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from builder import settings


class Option:
    """What the command line needs besides the field's name, type and default."""

    def __init__(
        self,
        about: str,
        metavar: str | None = None,
        names: str = "",
        *,
        complete: tuple[str, ...] | str = (),
        envvar: str | None = None,
        least: int | None = None,
        most: int | None = None,
        callback: Callable[[Any], Any] | None = None,
    ) -> None:
        self.help, self.metavar = about, metavar
        #: names other than the field's, separated by spaces
        self.names = names
        #: the words that may follow, or the name of a function of ``builder.cli.complete``
        self.complete = complete
        #: the environment variable with the value
        self.envvar = envvar
        #: the limits of a number
        self.least, self.most = least, most
        #: called with the value, given or not
        self.callback = callback


class Argument(Option):
    """A word without a name."""


class Fields:
    """How a command takes the dataclass that it annotates: which fields, and other options."""

    def __init__(self, *only: str, without: tuple[str, ...] = (), **changed: Any) -> None:
        self.only, self.without, self.changed = only, without, changed

    @property
    def names(self) -> set[str]:
        """The fields that it names."""
        return {*self.only, *self.without, *self.changed}

    def has(self, name: str) -> bool:
        """Whether the command has this field as an option."""
        return name not in self.without and (not self.only or name in self.only)


Layers = Annotated[
    tuple[str, ...],
    Option(
        "Profiles and layers, comma-separated; may be repeated.",
        "L[,L...]",
        "--layers -l",
        complete="layers",
    ),
]
LayersOrPulls = Annotated[
    tuple[str, ...],
    Option(
        "Profiles and layers, comma-separated; may be repeated; or --with-pr.",
        "L[,L...]",
        "--layers -l",
        complete="layers",
    ),
]
OptionalLayers = Annotated[
    tuple[str, ...],
    Option(
        "Profiles and layers that the target should have (default: those of its plan).",
        "L[,L...]",
        "--layers -l",
        complete="layers",
    ),
]
TriedLayers = Annotated[
    tuple[str, ...],
    Option(
        "Profiles and layers to apply first (default: none).",
        "L[,L...]",
        "--layers -l",
        complete="layers",
    ),
]
WithPr = Annotated[
    tuple[str, ...],
    Option(
        "An extra pull request or commit to apply: OWNER/REPO#NUMBER[@COMMIT], "
        "OWNER/REPO@COMMIT or its page; may be repeated; the order is kept.",
        "PULL",
    ),
]
ForgeClone = Annotated[
    tuple[str, ...],
    Option("A local git clone to use instead of the forge.", "[OWNER/REPO=]DIR"),
]
Locked = Annotated[bool, Option("Fail (exit 9) unless spark-build.lock exists and is up to date.")]
PlatformName = Annotated[
    str | None,
    Option(
        "linux/arm64 or linux/amd64 (default: arm64, or the image's own).",
        "PLATFORM",
        complete=("linux/arm64", "linux/amd64"),
    ),
]
Releases = Annotated[
    str | None,
    Option("vLLM releases, comma-separated (default: every one since 0.17.0).", "VERSION[,...]"),
]
Patches = Annotated[
    tuple[Path, ...],
    Option("More layer folders of your own (also: SPARK_BUILD_PATCHES).", "DIR"),
]
Json = Annotated[bool, Option("Print JSON on stdout, errors included.")]
Compile = Annotated[
    bool,
    Option(
        "Compile kernels that a prebuilt base lacks (needs g++, several minutes and memory).",
        names="--compile",
    ),
]
Toolkit = Annotated[
    str | None,
    Option(
        "Compile in containers of this image (with nvcc 13 and g++) instead of on this machine.",
        "IMAGE",
    ),
]
Builder = Annotated[
    str,
    Option(
        "Build on this buildx builder, or on the BuildKit daemon at tcp://HOST:PORT, "
        "unix://SOCKET, docker-container://NAME or kube-pod://POD.",
        "NAME|ADDRESS",
        envvar=settings.BUILDER.name,
        complete="builders",
    ),
]
Refresh = Annotated[
    bool, Option("Ask the package index again, and verify again, instead of using the cache.")
]
TrustImage = Annotated[
    bool,
    Option(
        "Run the image's Python on this machine without isolation, even if its files are unknown."
    ),
]
ModelFolders = Annotated[
    tuple[Path, ...],
    Option("A folder with models of your own (NAME.toml); may be repeated.", "DIR", "--models"),
]
