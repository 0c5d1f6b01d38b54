"""What a reference leads to, opened once, and how it is asked for.

It is an identified base, or what is verified or published.  Its packages are a tree.  An image has
more: its metadata, and files outside of the packages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from builder.applier.layers import Remove, Wheel
from builder.applier.values import normalize, sha256_hex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.applier.trees import Tree
    from builder.common.plan import BaseIdentity
    from builder.common.pypi import PackageIndex
    from builder.common.reference import Ref
    from builder.images.registry.model import Descriptor
    from builder.images.rootfs.facts import RecordedFiles
    from builder.images.rootfs.view import InLayers


class OpenImage(Protocol):
    """An image, or an overlay: what it says of itself, and its files by absolute path."""

    @property
    def in_engine(self) -> bool:
        """Whether a Docker Engine has it, and can start it."""

    @property
    def runs_as(self) -> str:
        """Its name for ``docker run``, if that is not the name that was given; else ``""``."""

    @property
    def in_layers(self) -> InLayers | None:
        """Itself, if its layers are at hand: in a registry or a layout."""

    @property
    def brought(self) -> tuple[str, ...]:
        """Absolute paths that an overlay adds to its base; else none."""

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels in its configuration."""

    @property
    def env(self) -> Mapping[str, str]:
        """The environment in its configuration."""

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests that evidence may use for it."""

    def read(self, path: str) -> bytes | None:
        """The bytes of a file, or None."""

    def has(self, path: str) -> bool:
        """Whether a path exists."""

    def digest(self, path: str) -> str | None:
        """The sha256 of a file, ``""`` of what is neither file nor folder; or None."""

    def files_at(self, path: str) -> Mapping[str, bytes]:
        """A file, or the files below a folder, by the path that was asked for.

        What is neither file nor folder has no bytes.
        """

    def all_files(self, name: str) -> Mapping[str, bytes]:
        """Every file of an overlay, which is called ``name`` in errors."""

    def close(self) -> None:
        """Release it."""


@dataclass(frozen=True)
class Subject:
    """What was opened; ``close`` releases it."""

    identity: BaseIdentity
    #: its site-packages
    tree: Tree
    #: all of it, where more than its packages can be read
    image: OpenImage | None = None
    #: whether the tree and the environment are planned, and the image has others
    is_planned: bool = False
    close: Callable[[], None] = lambda: None

    @property
    def in_layers(self) -> InLayers | None:
        """The image, if its layers are at hand."""
        return None if self.image is None else self.image.in_layers

    @property
    def in_engine(self) -> bool:
        """Whether its own interpreter runs in a container."""
        return self.image is not None and self.image.in_engine

    @property
    def is_here(self) -> bool:
        """Whether all its files are local, so that reading them needs no download."""
        return self.in_engine or self.identity.is_installed

    def planned(self, tree: Tree, env: Mapping[str, str]) -> Subject:
        """The same with other files and another environment."""
        identity = replace(self.identity, env=dict(env))
        return replace(self, identity=identity, tree=tree, is_planned=True)


@dataclass(frozen=True, kw_only=True)
class InFiles:
    """An overlay: the files that it adds to its base, all read."""

    files: Mapping[str, bytes]
    env: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    digests: tuple[str, ...] = ()
    runs_as: str = ""

    in_engine = False
    in_layers = None

    @property
    def brought(self) -> tuple[str, ...]:
        return tuple(self.files)

    def read(self, path: str) -> bytes | None:
        return self.files.get(path)

    def has(self, path: str) -> bool:
        return path in self.files

    def digest(self, path: str) -> str | None:
        return sha256_hex(self.files[path]) if path in self.files else None

    def files_at(self, path: str) -> dict[str, bytes]:
        return {p: d for p, d in self.files.items() if p == path or p.startswith(f"{path}/")}

    def all_files(self, name: str) -> Mapping[str, bytes]:  # noqa: ARG002
        return self.files

    def close(self) -> None:
        """Does nothing: nothing is open."""


if TYPE_CHECKING:
    FactsOf = Callable[[Sequence[Descriptor]], RecordedFiles | None]


# --------------------------------------------------------------------------- the request for a base


#: Distributions that layers use; those of user layers are added.
TRACKED = (
    "vllm",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "b12x",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)


def tracked_for(layers: Iterable[Layer]) -> tuple[str, ...]:
    """Those that layers use, with what these layers name."""
    named: set[str] = set()
    for layer in layers:
        named.add(layer.package)
        for variant in layer.variants:
            named.update(variant.when)
            for op in variant.ops:
                named.update(op.when)
                if isinstance(op, (Wheel, Remove)):
                    named.add(normalize(op.distribution))
                if isinstance(op, Wheel) and op.version_of:
                    named.add(normalize(op.version_of))
    return (*TRACKED, *sorted(named - set(TRACKED)))


def no_facts(_layers: Sequence[Descriptor]) -> RecordedFiles | None:
    """No known facts of layers: they are read."""
    return None


@dataclass(frozen=True, kw_only=True)
class BaseRequest:
    """How to identify a base, from the command line and the profile."""

    ref: Ref
    platform: str | None = None
    python: str | None = None
    site_packages: str | None = None
    pins: Mapping[str, str]
    tracked: tuple[str, ...] = TRACKED
    index: PackageIndex
    #: whether an image by name is in a Docker Engine; None: if one responds, unless its registry is
    #: meant
    in_engine: bool | None = None
    #: known facts of an image's lowest layers, given all its layers, bottom first
    facts_of: FactsOf = no_facts
    #: whether reads of an image in a registry or layout are recorded (``Rootfs.notes``)
    noting: bool = False
