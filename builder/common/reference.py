"""What a person named (image, layout, released wheels, environment), and its kind of base."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

# ----------------------------------------------------------------------------------- kinds of base

#: The newest vLLM release whose kernels are recorded (``docs/evidence``; a test compares them).
NEWEST_VLLM = "0.33.0"
#: Name in images of a base that was a local layout.
LAYOUT = "oci:layout"


def image_of(release: str) -> str:
    """The official image of a release, which has torch with CUDA on both architectures."""
    return f"docker://vllm/vllm-openai:v{release}"


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


# -------------------------------------------------------------------------------------- references

#: Between the scheme and the rest of a reference to an image in its registry.
_REGISTRY = "docker://"
_DIGEST = re.compile(r".*@(sha256:[0-9a-f]{64})", re.DOTALL)


@dataclass(frozen=True)
class Ref:
    """A reference as given: its scheme is read here, and nowhere else.

    Without a scheme it is an image, which a Docker Engine or its registry may have.
    """

    text: str

    @cached_property
    def _parts(self) -> tuple[str, str]:
        """The scheme as written and what follows it; ``""`` without a known scheme."""
        if self.text.startswith(_REGISTRY):
            return "docker", self.text.removeprefix(_REGISTRY)
        scheme, colon, rest = self.text.partition(":")
        known = colon and scheme != "docker" and scheme in schemes()  # docker:24 is an image
        return (scheme, rest) if known else ("", self.text)

    @property
    def scheme(self) -> str:
        """The scheme, also where it was left out."""
        return self._parts[0] or "docker"

    @property
    def place(self) -> str:
        """What follows the scheme: a name in a registry, a folder, or releases."""
        return self._parts[1]

    @property
    def has_scheme(self) -> bool:
        """Whether its scheme is written."""
        return bool(self._parts[0])

    @property
    def kind(self) -> BaseKind:
        """What it is, as a base."""
        return schemes().get(self.scheme, KINDS["image"])

    @property
    def in_layout(self) -> bool:
        """Whether it is an image in an OCI layout."""
        return self.scheme == "oci"

    @property
    def has_name(self) -> bool:
        """Whether it is an image by a name, which a Docker Engine or a registry can have."""
        return self.scheme == "docker"

    @property
    def in_registry(self) -> bool:
        """Whether its registry is meant, and no Docker Engine."""
        return self.has_name and self.has_scheme

    @property
    def digest(self) -> str:
        """The digest at its end, or ``""``."""
        match = _DIGEST.fullmatch(self.text)
        return match[1] if match else ""

    def at(self, digest: str) -> Ref:
        """The image with this digest, in the same repository or layout."""
        name = self.text.partition("@")[0]
        has_tag = ":" in name.rsplit("/", 1)[-1] and not self.in_layout
        return Ref(f"{name.rpartition(':')[0] if has_tag else name}@{digest}")

    def __str__(self) -> str:
        return self.text
