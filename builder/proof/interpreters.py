"""Runs probes with the target's own interpreter on changed files.

A target without one of its layers does not exist on disk.  In a container the changed files are put
over those of the image; for a local environment they are in a folder of links that replaces its
site-packages.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from builder.applier.trees import OverlayTree
from builder.common.document import Part, plain
from builder.common.programs import IN_CONTAINER
from builder.proof.isolation import SandboxUnavailable
from builder.proof.replies import CodegenRequest, DispatchRequest, ProbeReply, reply_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import IO

    from builder.applier.trees import Changes, Tree
    from builder.common.programs import Program
    from builder.images.subject import Subject

    Request = TypeVar("Request", DispatchRequest, CodegenRequest)

T = TypeVar("T", bound=ProbeReply)


def net_changes(tree: Tree) -> Changes:
    """The changes of a tree relative to its base tree."""
    merged: Changes = {}
    while isinstance(tree, OverlayTree):
        merged = {**tree.changes, **merged}
        tree = tree.base
    return {
        path: content
        for path, content in merged.items()
        if tree.digest(path) != (None if content is None else content.sha256)
    }


def unsetting(request: Request, outer: Mapping[str, str], env: Mapping[str, str]) -> Request:
    """A request that unsets variables which the queried files must not see."""
    off = dict.fromkeys(name for name in outer if name not in env)
    return replace(request, env={**off, **request.env})


# ------------------------------------------------------------------------- a local environment


def link_out(root: Path, changes: Changes, into: Path) -> None:
    """A directory tree with changes, with links to all unchanged parts."""
    folders = {Path(path).parents[depth] for path in changes for depth in range(path.count("/"))}
    for folder in sorted({Path(), *folders}):
        (into / folder).mkdir(exist_ok=True)
        for entry in _entries(root / folder):
            path = folder / entry.name
            if path not in folders and path.as_posix() not in changes:
                (into / path).symlink_to(entry.path)
    for name, content in changes.items():
        if content is not None:
            (into / name).write_bytes(content.read())
            (into / name).chmod(content.mode)
    for folder in sorted(folders, reverse=True):  # an empty one would be a namespace package
        if not any((into / folder).iterdir()):
            (into / folder).rmdir()


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    if folder.is_dir():
        with os.scandir(folder) as entries:
            yield from entries


# ---------------------------------------------------------------------------- an image's container


#: Runs the program in a container with its request from a variable.  For ``-c`` the first entry of
#: ``sys.path`` is the current folder, whose files are not to be run.
_STARTER = (
    f"import io, os, runpy, sys; sys.path[0] = {IN_CONTAINER!r}; "
    "sys.stdin = io.StringIO(os.environ.pop('SPARK_BUILD_REQUEST')); "
    f"runpy.run_path({IN_CONTAINER!r}, run_name='__main__')"
)
#: Files of the image to hide, only in this temporary container.
_REMOVER = (
    "import json, os; [os.path.lexists(p) and os.remove(p) "
    "for p in json.loads(os.environ.pop('SPARK_BUILD_GONE'))]; "
)


def ask_in_container(
    base: Subject, request: Part, form: type[T], program: Program, changes: Changes | None = None
) -> T:
    """Query the image's own interpreter, vLLM and extension modules, without network and GPU.

    Raises:
        SandboxUnavailable: the probe gave no result.
        MalformedReply: its result is malformed.
    """
    from builder.images.engines import docker

    site = base.identity.site_packages
    gone = [f"{site}/{path}" for path, content in (changes or {}).items() if content is None]
    env = {
        "SPARK_BUILD_REQUEST": json.dumps(plain(request)),
        **({"SPARK_BUILD_GONE": json.dumps(gone)} if gone else {}),
    }
    command = [base.identity.interpreter, "-B", "-c", (_REMOVER if gone else "") + _STARTER]
    client = docker.connect()
    try:
        with tempfile.TemporaryFile() as files:
            if changes:
                write_tar(files, site, changes)
            output = docker.run(
                client,
                base.identity.ref,
                command,
                env=env,
                user="0" if gone else None,
                files=files if changes else None,
                program=program,
            )
        result = json.loads(output)
    except ValueError as error:
        raise SandboxUnavailable(f"the probe gave no result in the container: {error}") from None
    finally:
        client.close()
    return reply_of(result, form)


def write_tar(out: IO[bytes], site: str, changes: Changes) -> None:
    """Changed files as a tar for the root of a container.

    Their timestamp is 0, so that no compiled file matches them.
    """
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, content in sorted(changes.items()):
            if content is None:
                continue
            data = content.read()
            info = tarfile.TarInfo(f"{site}/{path}".lstrip("/"))
            info.size, info.mode, info.mtime = len(data), content.mode, 1
            tar.addfile(info, io.BytesIO(data))
    out.seek(0)
