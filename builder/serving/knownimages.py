"""What is known of the images that people serve with: release or fork, entrypoint, packages."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated

import msgspec
from msgspec import Meta

from builder.common.document import Part, Text
from builder.common.paths import package_file

#: Held against the newest release of the package index.
NEWEST = "newest"
#: A release in the tag of an image of vLLM that nothing else is known of.
_IN_TAG = re.compile(r"vllm[^:]*:(?:v|.*[-_v])?(\d+\.\d+\.\d+)", re.IGNORECASE)


class KnownImage(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of ``builder/data/images.toml``."""

    name: Text
    image: Annotated[Text, Meta(description="a regular expression on the name with its tag")]
    source: Text
    fork: Annotated[str, Meta(description="of what it is a build; empty: of a release")] = ""
    near: Annotated[str, Meta(description="the release that it is held against")] = ""
    #: the release of each tag
    releases: dict[str, str] = msgspec.field(default_factory=dict)
    #: whether its entrypoint is ``vllm serve``
    serves: bool = False
    #: why its entrypoint must run; empty: it may be replaced
    keeps: str = ""
    python: str = ""
    packages: tuple[Text, ...] = ()
    lacks: tuple[Text, ...] = ()
    flags: tuple[Text, ...] = ()
    values: dict[str, tuple[Text, ...]] = msgspec.field(default_factory=dict)
    #: keys of the draft's configuration
    keys: tuple[Text, ...] = ()
    variables: tuple[Text, ...] = ()
    driver: str = ""

    def release(self, image: str) -> str:
        """The release that an image of this kind has exactly; empty if it has none, or any."""
        match = re.search(self.image, _plain(image))
        parts = match.groupdict() if match else {}
        return parts.get("vllm") or self.releases.get(parts.get("tag") or "", "")

    def has_flag(self, name: str, value: str | None) -> bool:
        """Whether it adds a flag, or this value to one."""
        return name in self.flags or (value is not None and value in self.values.get(name, ()))

    def has_variable(self, name: str) -> bool:
        """Whether its code reads a variable that releases do not."""
        return any(fnmatchcase(name, pattern) for pattern in self.variables)


def known_image(image: str) -> KnownImage | None:
    """What is known of an image; None: nothing is."""
    if not image:
        return None
    return next((one for one in _images() if re.search(one.image, _plain(image))), None)


def release_in_tag(image: str) -> str:
    """The release that the tag of another image of vLLM names; empty if it names none."""
    match = _IN_TAG.search(_plain(image).rpartition("/")[2])
    return match[1] if match else ""


def _plain(image: str) -> str:
    return image.partition("@")[0]


@cache
def _images() -> tuple[KnownImage, ...]:
    raw = tomllib.loads(package_file("data", "images.toml").read_text("utf-8"))
    return msgspec.convert(raw["image"], tuple[KnownImage, ...])
