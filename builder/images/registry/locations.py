"""Parses image locations: ``docker://REFERENCE`` or ``oci:DIR[:NAME|@DIGEST]``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from builder.common.hints import instead
from builder.errors import UsageError
from builder.images.registry.client import Registry
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.options import Options, Traffic
from builder.images.registry.reference import is_digest, parse_reference, refuse_wrong_kind

if TYPE_CHECKING:
    from types import TracebackType

    from builder.common.model.reference import Ref
    from builder.images.registry.client import Repository


@dataclass(frozen=True, kw_only=True)
class Location:
    """A repository or layout, and the tag, name or digest in it."""

    image: Repository | LayoutDirectory
    reference: str


class Locations:
    """Opens locations, sharing connections per registry, and counts all bytes."""

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or Options.from_environment()
        self._registries: dict[str, Registry] = {}
        self.traffic = Traffic()

    def open(self, ref: Ref) -> Location:
        """The location that a user names; sends no request.

        Raises:
            UsageError: it is not a place.
        """
        if ref.in_layout:
            path, name = layout_place(ref)
            return Location(image=LayoutDirectory(path), reference=name)
        refuse_wrong_kind(ref)
        reference = parse_reference(ref.text)
        return Location(
            image=self.registry(reference.host).repository(reference.repository),
            reference=reference.identifier,
        )

    def registry(self, host: str) -> Registry:
        """A registry by the host name used in references."""
        if host not in self._registries:
            self._registries[host] = Registry(host, self._options, self.traffic)
        return self._registries[host]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for registry in self._registries.values():
            registry.close()


def layout_place(ref: Ref) -> tuple[Path, str]:
    """The layout's folder and the name or digest in it that ``oci:DIR[:NAME|@DIGEST]`` means.

    A directory that exists is meant as a whole, whatever colons it has.

    Raises:
        UsageError: it names no directory.
    """
    text, path, reference = ref.text, ref.place, ""
    if not Path(path).is_dir():
        before, mark, digest = path.rpartition("@")
        if mark and is_digest(digest):
            path, reference = before, digest
        else:
            ends = [at for at, letter in enumerate(path) if letter == ":"]
            end = next((at for at in ends if Path(path[:at]).is_dir()), None)
            if end is None and not (mark and "/" not in digest):
                end = path.find(":") if ":" in path else len(path)
            if end is None or "@" in path[end:]:
                raise UsageError(f"{text!r}: a sha256 digest must follow '@'")
            path, reference = path[:end], path[end + 1 :]
    if not path:
        raise UsageError(f"{text!r} names no directory", hint=instead(text, "oci:DIR"))
    return Path(path), reference
