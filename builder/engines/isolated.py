"""Runs a program in a container of an empty image: read-only local folders, no network."""

from __future__ import annotations

import io
import subprocess
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.engines import docker
from builder.engines.space import engine_root
from builder.errors import BuildFailed, EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from docker import DockerClient

#: Empty images by the links in their root; 1 kB each.
_IMAGE = "spark-build-empty"


@dataclass(frozen=True, kw_only=True)
class IsolatedEnvironment:
    """The environment of a program in such a container."""

    env: Mapping[str, str]
    #: links in the root
    links: Mapping[str, str]
    #: folders and files of this machine, mounted at the same paths
    shown: tuple[Path, ...]
    user: int
    #: bytes of ``/tmp``
    scratch: int
    processes: int
    #: limit of its output in bytes
    printed: int


def connect() -> DockerClient:
    """A client for a Docker Engine on this machine.

    Raises:
        EngineError: none responds, or it is on another machine.
    """
    client = docker.connect()
    if engine_root(client) is None:
        client.close()
        raise EngineError("the Docker Engine runs on another machine")
    return client


def run(
    client: DockerClient, words: Sequence[str], around: IsolatedEnvironment, timeout: float
) -> str:
    """Run a program; returns its output.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds.
        BuildFailed: it cannot be started.
    """
    import requests
    from docker.errors import APIError
    from docker.types import LogConfig, Mount

    mounts = [Mount(str(p), str(p), type="bind", read_only=True) for p in around.shown]
    try:
        container = client.containers.create(
            _empty_image(client, around.links),
            entrypoint=[words[0]],
            command=list(words[1:]),
            environment=dict(around.env),
            mounts=mounts,
            network_mode="none",
            read_only=True,
            tmpfs={"/tmp": f"rw,nosuid,nodev,mode=1777,size={around.scratch}"},  # noqa: S108
            user=f"{around.user}:{around.user}",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            pids_limit=around.processes,
            log_config=LogConfig(
                type="json-file", config={"max-size": str(around.printed), "max-file": "1"}
            ),
            working_dir="/tmp",  # noqa: S108
        )
    except APIError as error:
        raise BuildFailed(f"cannot create a container: {error.explanation}") from None
    try:
        container.start()
        container.wait(timeout=timeout)
        return container.logs(stdout=True, stderr=False).decode("utf-8", "replace")
    except APIError as error:
        raise BuildFailed(f"cannot start the container: {error.explanation}") from None
    except (requests.Timeout, requests.ConnectionError):
        raise subprocess.TimeoutExpired(list(words), timeout) from None
    finally:
        container.remove(force=True)


def _empty_image(client: DockerClient, links: Mapping[str, str]) -> str:
    """An image with only these links in its root, and an empty ``/tmp``."""
    from docker.errors import ImageNotFound

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        scratch = tarfile.TarInfo("tmp")  # what is mounted there has its mode
        scratch.type, scratch.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(scratch)
        for name, target in sorted(links.items()):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    tag = "-".join(sorted(links)) or "plain"
    try:
        client.images.get(f"{_IMAGE}:{tag}")
    except ImageNotFound:
        client.api.import_image_from_data(data.getvalue(), repository=_IMAGE, tag=tag)
    return f"{_IMAGE}:{tag}"
