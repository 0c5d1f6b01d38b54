"""What a person named: an image, a layout, released wheels, or an environment."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from builder.common.model.base import KINDS, BaseKind, schemes

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
