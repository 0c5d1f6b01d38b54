"""Downloads complete wheels and archives into the cache; interrupted downloads resume."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from builder.common.console import console
from builder.common.diskspace import Need, check_room
from builder.common.hints import CACHE, again, os_hint
from builder.common.locks import locked
from builder.common.net.messages import no_answer
from builder.common.paths import cache_dir
from builder.errors import BuildFailed, RemoteError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from builder.common.pypi.index import PackageIndex
    from builder.common.pypi.pages import WheelFile

#: Bytes of a file whose size the index does not give; the largest wheels have 2 GB.
_MOST_BYTES = 8 << 30


def downloaded(file: WheelFile) -> Path | None:
    """The whole wheel, if an earlier run has downloaded and checked it."""
    target = _place(file)
    return target if target.is_file() else None


def _place(file: WheelFile) -> Path:
    return cache_dir() / "wheels" / file.sha256 / file.filename


def download(file: WheelFile, index: PackageIndex) -> Path:
    """Download a whole wheel into the cache, resuming a partial one.

    Raises:
        RemoteError: the download fails, or its digest does not match.
    """
    import requests

    target = _place(file)
    with locked(file.filename):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file():
            return target
        partial = target.with_suffix(".part")
        have = partial.stat().st_size if partial.exists() else 0
        if have >= file.size:  # whole, or not of this file: there is nothing after it to ask for
            have = 0
        _check_room(file, have)
        url = index.address(file)
        try:
            _stream(url, file, index, partial, have)
        except (requests.RequestException, RemoteError) as error:
            raise RemoteError(
                f"{file.filename}: the download broke off: {no_answer(error, url)}; the next run "
                "resumes it",
                hint=again(),
            ) from error
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UsageError(
                f"{file.filename}: cannot write to {target.parent}: {error.strerror}",
                hint=os_hint(error, CACHE),
            ) from error
        with partial.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != file.sha256:
            partial.unlink()
            raise RemoteError(f"{file.filename}: sha256 is {digest}, pinned is {file.sha256}")
        partial.replace(target)
    return target


def _stream(url: str, file: WheelFile, index: PackageIndex, partial: Path, have: int) -> None:
    from builder.common.net.session import blocks

    headers = {"Range": f"bytes={have}-"} if have else {}
    with (
        console.progress(f"downloading {file.release}", file.size or None) as bar,
        index.session.get(url, headers=headers, stream=True) as answer,
    ):
        answer.raise_for_status()
        resumed = answer.status_code == 206
        bar.advance(have if resumed else 0)
        length = answer.headers.get("Content-Length", "")
        size = file.size or (int(length) if re.fullmatch(r"[0-9]{1,18}", length) else _MOST_BYTES)
        most = max(0, size - have) if resumed and file.size else size
        with partial.open("ab" if resumed else "wb") as out:
            for chunk in blocks(answer, most):
                out.write(chunk)
                index.bytes_read += len(chunk)
                bar.advance(len(chunk))


def _check_room(file: WheelFile, have: int) -> None:
    try:
        check_room([Need.cache(max(0, file.size - have), file.filename)])
    except BuildFailed as error:  # what is fetched is an input: nothing is being built yet
        raise UsageError(str(error), hint=error.hint) from None
