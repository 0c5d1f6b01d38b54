"""Reads a layer once, and writes its index and the content of small files of interest."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from builder.applier.receipts import STATE_DIR
from builder.errors import RemoteError
from builder.rootfs.index import OPAQUE, WHITEOUT, Contradiction, LayerWriter, Row, parent_of
from builder.rootfs.tar import DIR, FILE, LayerTar, Member

if TYPE_CHECKING:
    from builder.rootfs.unpack import Unpacked

#: Whiteouts of the OCI image specification, "Layer Filesystem Changeset".
_PREFIX, _OPAQUE_NAME = ".wh.", ".wh..wh..opq"
#: Files of a ``.dist-info`` that list a distribution's files.
_INFO = ("METADATA", "RECORD", "WHEEL", "INSTALLER", "entry_points.txt", ".json")
#: Packages whose text files layers patch and verification reads; others are fetched
#: on request.
_PATCHED = ("vllm", "flashinfer", "nvidia_cutlass_dsl", "b12x")
_TEXT = (".py", ".pth", ".json", ".toml")
_SMALL = 4 << 20


def scan(stream: Unpacked, writer: LayerWriter, where: str) -> None:
    """Add every member of a layer to its index.

    Raises:
        RemoteError: the layer is damaged, contradictory, or exceeds a limit.
    """
    tar = LayerTar(stream, where)
    try:
        for member in tar:
            _note(tar, member, writer, where)
    except Contradiction as error:
        raise RemoteError(
            f"{where}: {error}; image builders do not write such layers, and runtimes handle "
            f"them differently"
        ) from None


def worth_keeping(path: str, size: int) -> bool:
    """Whether a file's bytes are stored in the index, for identification and plans.

    This depends on the end of the path: packages may be in any folder, and installed files
    may be hard links to earlier files, for example in the cache of ``uv``.
    """
    folder, _, name = path.rpartition("/")
    folders = folder.split("/")
    if folders[-1].endswith("-packages"):
        wanted = name.endswith((".pth", ".py"))
    elif any(part.endswith(".dist-info") for part in folders):
        wanted = name.endswith(_INFO)
    elif any(part.startswith(_PATCHED) for part in folders):
        wanted = name.endswith(_TEXT)
    else:
        wanted = (
            name == "pyvenv.cfg"
            or name.endswith(".pth")
            or STATE_DIR in folders
            or folder == "usr/share/spark-build"
            or (name == "site.py" and folders[-1].startswith("python3"))
        )
    return wanted and size <= _SMALL


def is_text(path: str, size: int) -> bool:
    """Whether a file is a text file of a package that layers may patch."""
    return path.endswith(_TEXT) and size <= _SMALL


def _note(tar: LayerTar, member: Member, writer: LayerWriter, where: str) -> None:
    """Add one member to the index."""
    folder, name = parent_of(member.path), member.path.rpartition("/")[2]
    if name == _OPAQUE_NAME:
        writer.hide(folder, OPAQUE)
    elif name.startswith(_PREFIX):
        target = name.removeprefix(_PREFIX)
        if target in ("", ".", ".."):
            raise RemoteError(f"{where}: a whiteout without a name: {member.path!r}")
        writer.hide(f"{folder}/{target}" if folder else target, WHITEOUT)
    elif not member.path and member.kind != DIR:
        raise RemoteError(f"{where}: its root is not a directory")
    else:
        digest = _digest(tar, member, writer) if member.kind == FILE else ""
        writer.add(
            Row(
                path=member.path,
                kind=member.kind,
                size=member.size,
                mode=member.mode,
                uid=member.uid,
                gid=member.gid,
                link=member.link,
                sha256=digest,
            )
        )


def _digest(tar: LayerTar, member: Member, writer: LayerWriter) -> str:
    """The sha256 of a file; its bytes are stored if plans need them."""
    hasher = hashlib.sha256()
    kept: list[bytes] | None = [] if worth_keeping(member.path, member.size) else None
    for chunk in tar.chunks():
        hasher.update(chunk)
        if kept is not None:
            kept.append(chunk)
    digest = hasher.hexdigest()
    if kept is not None:
        writer.keep(digest, b"".join(kept))
    return digest
