"""Checks that an output file can be written before the work starts."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.util.hints import ELSEWHERE, os_hint

if TYPE_CHECKING:
    from pathlib import Path


def refuse_unwritable(path: Path) -> None:
    """Refuse a file that could not be written; nothing is written yet.

    Raises:
        UsageError: it is a folder, lies below a file, or must not be written.
    """
    number = _problem(path.absolute())
    if number:
        error = OSError(number, os.strerror(number), str(path))
        raise UsageError(f"cannot write {path}: {error.strerror}", hint=os_hint(error, ELSEWHERE))


def _problem(path: Path) -> int:
    try:
        if path.is_dir():
            return errno.EISDIR
        above = path.parent
        while not above.exists():
            above = above.parent
    except OSError as error:  # a name that is too long, a folder that must not be looked into
        return error.errno or errno.EIO
    if not above.is_dir():
        return errno.ENOTDIR
    return 0 if os.access(above, os.W_OK | os.X_OK) else errno.EACCES
