"""Caches the launches that a target's host code made, by everything that they depend on.

Their kernels need not be compiled again where only `builder.ptx` has changed, or where somebody
asks for the files.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from builder.common.document import plain, read
from builder.common.programs import LAUNCH
from builder.common.pypi import write_atomically
from builder.proof.replies import LaunchReply
from builder.proof.results import Results

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Those of one release take 5 MB.
RECORDINGS = Results("launches", (LAUNCH,), 20, suffix=".zip")
_REPLY = "reply.json"


def restore(inputs: Sequence[object], folder: Path) -> LaunchReply | None:
    """Write the cached launches for the same inputs into a folder; None where there are none."""
    file = RECORDINGS.file(inputs)
    try:
        with zipfile.ZipFile(file) as archive:
            reply = read(json.loads(archive.read(_REPLY)), LaunchReply)
            archive.extractall(folder, [n for n in archive.namelist() if n != _REPLY])
        os.utime(file)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
    return _moved(reply, lambda name: str(folder / name))


def keep(inputs: Sequence[object], folder: Path, reply: LaunchReply) -> None:
    """Cache the launches in a folder; the oldest ones are removed."""
    held = _moved(reply, lambda path: Path(path).relative_to(folder).as_posix())
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_REPLY, json.dumps(plain(held)))
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder).as_posix())
    write_atomically(RECORDINGS.file(inputs), packed.getvalue())
    RECORDINGS.remove_oldest()


def _moved(reply: LaunchReply, move: Callable[[str], str]) -> LaunchReply:
    """The reply with another name for each folder."""
    kernels = tuple(
        replace(
            kernel,
            launches=tuple(
                replace(call, folders=tuple(map(move, call.folders))) for call in kernel.launches
            ),
        )
        for kernel in reply.kernels
    )
    return replace(reply, kernels=kernels)
