"""The headers of a checkpoint's safetensors files, as bytes; no weights are read.

A file begins with the length of its header (8 bytes, little-endian), and the header, which is JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from builder.applier.files import open_regular, read_regular
from builder.common.hints import reason

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: The longest header that the safetensors library reads, and of all files together.
_LONGEST, _ALL = 100_000_000, 256 << 20
_INDEX = "model.safetensors.index.json"
_MOST_INDEX = 64 << 20


@dataclass(frozen=True, kw_only=True)
class WeightHeaders:
    """Length and header of each file by its name, or why they are not known."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    unknown: str = ""


#: Nobody asks for them.
NO_WEIGHTS = WeightHeaders()


class _UnknownError(Exception):
    """The headers are not known; the message says why."""


def weight_headers(folder: Path) -> WeightHeaders:
    """The headers of a folder's files; a release finds them by the end of their names."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        return WeightHeaders(unknown="no safetensors files are beside config.json")
    try:
        _refuse_missing(folder, {path.name for path in paths})
        files: dict[str, bytes] = {}
        for path in paths:
            files[path.name] = _header(path)
            if sum(map(len, files.values())) > _ALL:
                raise _UnknownError(f"the headers have more than {_ALL >> 20} MiB")
    except _UnknownError as error:
        return WeightHeaders(unknown=str(error))
    return WeightHeaders(files=files)


def _refuse_missing(folder: Path, present: set[str]) -> None:
    """Refuse a folder that lacks a file of its index: such a download is not complete."""
    try:
        index = json.loads(read_regular(folder / _INDEX, _MOST_INDEX))
        named = sorted({str(name) for name in index["weight_map"].values()})
    except FileNotFoundError:
        return
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _UnknownError(f"{_INDEX} cannot be read: {reason(error)}") from None
    missing = [name for name in named if name not in present]
    if missing:
        raise _UnknownError(
            f"{len(missing)} of {len(named)} files are not there, {missing[0]!r} first"
        )


def _header(path: Path) -> bytes:
    """The length and the header of one file."""
    try:
        with open_regular(path) as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            header = file.read(length) if length <= _LONGEST else b""
    except OSError as error:
        raise _UnknownError(f"{path.name} cannot be read: {reason(error)}") from None
    if len(prefix) < 8 or len(header) < length:
        raise _UnknownError(f"{path.name} is truncated, or is no safetensors file")
    return prefix + header
