"""Kinds of base, and a pinned base."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from builder.common.documents.plan import PlannedBase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.common.documents.compiled import PinnedWheel
    from builder.common.model.platform import Platform

#: The newest vLLM release whose kernels are recorded (``docs/evidence``; a test compares them).
NEWEST_VLLM = "0.33.0"
#: Name in images of a base that was a local layout.
LAYOUT = "oci:layout"


@dataclass(frozen=True, kw_only=True)
class BaseKind:
    """The capabilities of a kind of base."""

    name: str
    #: scheme of its references
    schemes: tuple[str, ...] = ()
    #: an image, to which a build adds layers
    is_image: bool = False
    #: released wheels, from which a build makes an overlay for any image
    is_wheels: bool = False
    #: a local environment, which ``apply`` patches in place
    is_installed: bool = False

    @property
    def is_built(self) -> bool:
        """Whether an engine builds an image from it."""
        return self.is_image or self.is_wheels


#: Every kind, by its name in plans.
KINDS = {
    kind.name: kind
    for kind in (
        BaseKind(name="image", schemes=("docker", "oci"), is_image=True),
        BaseKind(name="pypi", schemes=("pypi",), is_wheels=True),
        BaseKind(name="dir", schemes=("dir",), is_installed=True),
    )
}


def base_kind(name: str) -> BaseKind:
    """The kind with a name; an unknown name in a plan gives a kind without capabilities."""
    return KINDS.get(name) or BaseKind(name=name)


def schemes() -> dict[str, BaseKind]:
    """The kind of base for each scheme."""
    return {scheme: kind for kind in KINDS.values() for scheme in kind.schemes}


@dataclass(frozen=True, kw_only=True)
class BaseIdentity:
    """A pinned base: everything that a plan may depend on.

    ``digest`` identifies the content: an image's manifest or config digest, or the sha256 over
    the wheels' file names and hashes.  ``site_packages`` is absolute inside the image.
    """

    kind: str
    ref: str
    digest: str
    platform: Platform
    site_packages: str
    packages: Mapping[str, str]
    wheels: tuple[PinnedWheel, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    interpreter: str = "python3"
    #: absolute path -> [mode, uid, gid] of folders, except root's with mode 0755
    folders: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: absolute path of a folder that is a symbolic link -> its target
    links: Mapping[str, str] = field(default_factory=dict)
    #: path below site-packages -> [uid, gid] of files not owned by root
    owners: Mapping[str, Sequence[int]] = field(default_factory=dict)
    user: str = ""
    created: str = ""

    @property
    def is_image(self) -> bool:
        """Whether it is an image, to which a build adds layers."""
        return base_kind(self.kind).is_image

    @property
    def is_wheels(self) -> bool:
        """Whether it consists of released wheels, from which a build makes an overlay."""
        return base_kind(self.kind).is_wheels

    @property
    def is_installed(self) -> bool:
        """Whether it is a local environment, which is patched in place."""
        return base_kind(self.kind).is_installed

    @property
    def in_layout(self) -> bool:
        """Whether it is an image in an OCI layout."""
        return self.is_image and self.ref.partition(":")[0] == "oci"

    @property
    def name(self) -> str:
        """``ref`` as recorded in images, without a layout's local path."""
        return LAYOUT if self.in_layout else self.ref

    @property
    def document(self) -> PlannedBase:
        """The base as recorded in the plan."""
        return PlannedBase(
            kind=self.kind,
            ref=self.name,
            digest=self.digest,
            platform=self.platform.oci,
            python=".".join(map(str, self.platform.python_version)),
            site_packages=self.site_packages,
            interpreter=self.interpreter,
            packages=dict(sorted(self.packages.items())),
            wheels=self.wheels,
        )
