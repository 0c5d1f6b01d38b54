"""The Docker Engine: inspect, run, read files, tag and push through the SDK.

Images are not *built* through the SDK (it cannot drive BuildKit); see ``engines/buildkit.py``.
A program that is not trusted runs in a container of an empty image: read-only local folders, no
network.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from builder import settings
from builder.common.console import console, megabytes
from builder.common.diskspace import Need
from builder.common.programs import IN_CONTAINER
from builder.common.reference import Ref
from builder.errors import BuildFailed, EngineError, RemoteError, SparkBuildError, UsageError
from builder.images.registry.copy import Locations
from builder.images.registry.reference import Options
from builder.images.rootfs.image import find_image as stored_image

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import IO

    import docker
    from docker import DockerClient
    from docker.models.containers import Container
    from docker.models.images import Image

    from builder.common.console import Bar
    from builder.common.programs import Program
    from builder.images.registry.model import ImageConfig


#: Bytes of a chunk of ``docker save``.
_SAVED = 1 << 20


def connect() -> docker.DockerClient:
    """A client for the engine of ``DOCKER_HOST`` or the default socket.

    Raises:
        EngineError: no engine responds.
    """
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=600)
        client.ping()
    except DockerException as error:
        where = settings.DOCKER_HOST.value or "the default socket"
        raise EngineError(
            f"no Docker Engine is running at {where} ({_root_cause(error)})",
            hint="start Docker, or name the image as docker://NAME, which needs no Docker",
        ) from None
    return client


def answers() -> bool:
    """Whether a Docker Engine responds."""
    try:
        connect().close()
    except EngineError:
        return False
    return True


def without_engine(name: str, error: RemoteError, hint: str = "") -> RemoteError:
    """The error for an image that may be in a Docker Engine, while none is running."""
    return RemoteError(
        f"no Docker Engine is running, so the images of this machine cannot be seen, and {name} "
        f"could not be read from its registry: {error}",
        hint=hint or "start Docker; or name an image that needs none: docker://HOST/NAME, oci:DIR",
    )


def _root_cause(error: BaseException) -> str:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return str(error) or error.__class__.__name__


def find_image(
    client: docker.DockerClient, ref: str, platform: str | None, *, pull: bool = True
) -> Image:
    """The image in the engine, pulled if missing (unless told not to).

    Raises:
        RemoteError: it does not exist, and pulling failed or is not allowed.
        BuildFailed: the engine's disk is full.
    """
    from docker.errors import APIError, ImageNotFound

    with contextlib.suppress(ImageNotFound):
        return client.images.get(ref)
    if not pull:
        raise RemoteError(f"image {ref} is not in the Docker Engine", hint=f"docker pull {ref}")
    from builder.common.console import console
    from builder.common.diskspace import check_room

    check_room(pull_needs(client, ref, platform))
    try:
        with console.progress(f"pulling {ref}") as bar:
            _pull(client, ref, platform, bar)
        return client.images.get(ref)
    except APIError as error:
        raise RemoteError(
            f"image {ref} is not in the Docker Engine and cannot be pulled: "
            f"{error.explanation or error}",
            hint="docker pull it yourself, or use --base pypi:vllm==VERSION",
        ) from None


def _pull(client: docker.DockerClient, ref: str, platform: str | None, bar: Bar) -> None:
    """Pull an image, with progress; the layers' sizes become known one by one."""
    from docker.errors import APIError
    from docker.utils import parse_repository_tag

    repository, tag = parse_repository_tag(ref)
    layers: dict[str, tuple[int, int]] = {}
    events = client.api.pull(
        repository, tag=tag or "latest", platform=platform, stream=True, decode=True
    )
    for event in events:
        if event.get("error"):
            raise APIError(str(event["error"]))
        detail = event.get("progressDetail") or {}
        if event.get("status") == "Downloading" and detail.get("total"):
            layers[str(event.get("id"))] = (int(detail["current"]), int(detail["total"]))
            bar.total = sum(total for _, total in layers.values())
            bar.advance(sum(done for done, _ in layers.values()) - bar.done)


@contextlib.contextmanager
def pinned(ref: str, digest: str) -> Iterator[str]:
    """A temporary tag for an image by digest, independent of its own tag.

    The tag is removed afterwards; the image remains.

    Raises:
        BuildFailed: the tag moved during the run.
    """
    name = f"spark-build-base:{digest.removeprefix('sha256:')[:24]}"
    with contextlib.closing(connect()) as client:
        image = find_image(client, ref, None)
        if digest not in digests_of(image):
            raise BuildFailed(
                f"{ref} is no longer {digest}: the tag moved during the run",
                hint="run the same command again",
            )
        image.tag(name)
    try:
        yield name
    finally:
        with contextlib.closing(connect()) as client:
            if len(client.images.get(name).tags) > 1:
                client.images.remove(name, noprune=True)


@contextlib.contextmanager
def created(
    client: docker.DockerClient, image: str, command: Sequence[str] = ("true",), **options: Any
) -> Iterator[Container]:
    """A container that is not started yet; removed in any case, unless it is to be kept.

    The SDK's own ``run`` leaves a container behind when it is interrupted.

    Raises:
        BuildFailed: the engine refuses to create the container.
    """
    from docker.errors import APIError

    try:
        container = client.containers.create(
            image, entrypoint=[command[0]], command=list(command[1:]), **options
        )
    except APIError as error:
        raise BuildFailed(f"{image}: cannot create a container: {error.explanation}") from None
    try:
        yield container
    finally:
        if not settings.KEEP_CONTAINER.value:
            container.remove(force=True)


def read_file(container: Container, path: str) -> bytes | None:
    """One regular file of a container, or None."""
    from docker.errors import NotFound

    try:
        stream, _ = container.get_archive(path)
    except NotFound:
        return None
    data = io.BytesIO(b"".join(stream))
    with tarfile.open(fileobj=data) as archive:
        member = archive.next()
        extracted = archive.extractfile(member) if member and member.isfile() else None
        return extracted.read() if extracted else None


def files_at(container: Container, path: str) -> dict[str, bytes]:
    """A file of a container, or the files below a folder, by absolute path.

    What is neither a file nor a folder has no bytes.
    """
    from docker.errors import NotFound

    try:
        stream, _ = container.get_archive(path)
    except NotFound:
        return {}
    above = path.rpartition("/")[0]
    files = {}
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
        for member in archive:
            extracted = archive.extractfile(member) if member.isfile() else None
            if not member.isdir():
                files[f"{above}/{member.name}"] = extracted.read() if extracted else b""
    return files


@contextlib.contextmanager
def open_file(container: Container, path: str) -> Iterator[io.BufferedReader | None]:
    """One regular file of a container as a stream, for large files; or None."""
    from docker.errors import NotFound

    try:
        chunks, _ = container.get_archive(path)
    except NotFound:
        yield None
        return
    stream = _IterStream(cast("Iterable[bytes]", chunks))
    with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20) as archive:
        member = archive.next()
        file = archive.extractfile(member) if member and member.isfile() else None
        yield cast("io.BufferedReader | None", file)


def export_files(container: Container) -> Iterator[tuple[str, bytes]]:
    """Every regular file of a container by absolute path, streamed."""
    stream = _IterStream(cast("Iterable[bytes]", container.export()))
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            extracted = archive.extractfile(member) if member.isfile() else None
            if extracted is not None:
                yield f"/{member.name.removeprefix('./')}", extracted.read()


def saved_files(client: DockerClient, image: str) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Every file of ``docker save``, streamed: name, size, and content to read before the next.

    Use it inside ``saving``, because reading a content fails too.
    """
    stream = _IterStream(client.api.get_image(image, chunk_size=_SAVED))
    # a block of the stream is a chunk of the engine's, so that no byte is copied twice
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_SAVED) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name.removeprefix("./"), member.size, content


@contextlib.contextmanager
def saving(image: str) -> Iterator[None]:
    """Turn failures of ``saved_files`` into errors.

    Raises:
        RemoteError: the engine fails, or its stream is no whole tar file.
    """
    from docker.errors import APIError
    from requests import RequestException

    try:
        yield
    except APIError as error:
        raise RemoteError(f"Docker Engine error for {image}: {error.explanation}") from None
    except (RequestException, tarfile.TarError) as error:
        raise RemoteError(f"Docker did not save all of {image}: {error}") from None


class _IterStream(io.RawIOBase):
    """A readable stream over an iterator of chunks."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        super().__init__()
        self._chunks, self._rest = iter(chunks), b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._rest) < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._rest += chunk
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


def config_of(image: Image) -> ImageConfig:
    """An image's configuration as the engine reports it; only its settings."""
    from builder.images.registry.model import ImageConfig

    return ImageConfig({"config": image.attrs.get("Config")})


def digests_of(image: Image) -> tuple[str, ...]:
    """Digests of an image: its ID, and its repository digests.

    The ID is the manifest's digest with the containerd image store, else the configuration's.
    """
    known = [str(entry).partition("@")[2] for entry in image.attrs.get("RepoDigests") or []]
    return tuple(dict.fromkeys([str(image.id), *filter(None, known)]))


def digest_of(attrs: dict[str, Any], ref: str) -> str:
    """The manifest digest in the reference's repository, else the image ID."""
    repository = ref.partition("@")[0]
    if ":" in repository.rsplit("/", 1)[-1]:
        repository = repository.rpartition(":")[0]
    for entry in attrs.get("RepoDigests") or []:
        name, _, digest = str(entry).partition("@")
        if name == repository:
            return digest
    return str(attrs["Id"])


def run(
    client: docker.DockerClient,
    image: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    platform: str | None = None,
    user: str | None = None,
    files: IO[bytes] | None = None,
    program: Program | None = None,
) -> str:
    """Run a command in a new container without network; returns its stdout.

    ``files`` is a tar that is unpacked over the container's root before it starts; ``program`` is
    put into its root, as `IN_CONTAINER`.

    Raises:
        BuildFailed: it cannot start, or exits non-zero.
    """
    from docker.errors import APIError

    options = {"platform": platform, "user": user}
    with created(
        client,
        image,
        command,
        environment=dict(env or {}),
        network_mode="none",
        **{name: value for name, value in options.items() if value is not None},
    ) as container:
        try:
            if files is not None:
                container.put_archive("/", files)
            if program is not None:
                container.put_archive("/", tar_of({IN_CONTAINER: program.data}))
            container.start()
            status = int(container.wait()["StatusCode"])
            output = container.logs(stdout=True, stderr=False)
            errors = container.logs(stdout=False, stderr=True)
        except APIError as error:
            raise _cannot_start(image, command[0], str(error.explanation)) from None
    if status != 0:
        tail = errors.decode("utf-8", "replace")[-2000:]
        raise BuildFailed(f"{image}: {command[0]} exited {status}: {tail}")
    return output.decode("utf-8", "replace")


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """Files by their absolute paths, as a tar for the root of a container."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path, data in files.items():
            info = tarfile.TarInfo(path.lstrip("/"))
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def _cannot_start(image: str, program: str, words: str) -> Exception:
    if "exec format error" in words:
        return EngineError(
            f"{image} is for another architecture, and this machine has no emulator for it",
            hint="install qemu-user-static and binfmt-support, or use a pypi: base",
        )
    if "no such file or directory" in words or "not found" in words:
        return UsageError(f"image {image} has no {program}, so vLLM cannot run in it")
    return BuildFailed(f"{image}: cannot run {program}: {words}")


def push(client: docker.DockerClient, ref: str) -> str:
    """Push a tag; returns the manifest digest.

    Raises:
        RemoteError: the registry refuses; the engine reports this in its stream.
    """
    digest = ""
    for item in client.images.push(ref, stream=True, decode=True):
        if "error" in item:
            raise RemoteError(f"pushing {ref} failed: {item['error']}", hint="docker login")
        digest = item.get("aux", {}).get("Digest", digest)
    return digest


# --------------------------------------------------------------------------------------- disk space


_ENGINE = "docker system prune, or --engine oci, which needs no Docker Engine"
#: Bytes in an engine for each byte of an image's layers in a registry, at least: measured
#: 4.1 on a vLLM image (1202 MB compressed); an engine with the containerd store keeps both.
_UNPACKED = 2


def engine_root(client: DockerClient) -> Path | None:
    """A Docker Engine's data folder, if the engine is on this machine."""
    address = settings.DOCKER_HOST.value or "unix://"
    if not address.startswith("unix://"):
        return None
    root = Path(str(client.info().get("DockerRootDir") or "/nonexistent"))
    return root if root.is_dir() else None


def engine_needs(client: DockerClient, size: int, what: str) -> list[Need]:
    """Space needed in a Docker Engine's data folder, if it is on this machine."""
    root = engine_root(client)
    return [Need(root, size, what, _ENGINE)] if root else []


def pull_needs(client: DockerClient, ref: str, platform: str | None) -> list[Need]:
    """Space needed for a pull; nothing if the registry does not give the size."""
    hurried = replace(Options.from_environment(), attempts=1, connect_timeout=5, read_timeout=10)
    try:
        with Locations(hurried) as locations:
            place = locations.open(Ref(f"docker://{ref}"))
            image = stored_image(place.image, place.reference, platform)
            packed = sum(layer.size for layer in image.layers)
    except SparkBuildError as error:  # the engine may have another way there
        console.detail(f"the size of {ref} is unknown: {error}")
        return []
    what = f"{ref}, {megabytes(packed)} packed"
    return engine_needs(client, _UNPACKED * packed, what)


# ---------------------------------------------------------------------- a program in an empty image


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


def connect_here() -> DockerClient:
    """A client for a Docker Engine on this machine.

    Raises:
        EngineError: none responds, or it is on another machine.
    """
    client = connect()
    if engine_root(client) is None:
        client.close()
        raise EngineError("the Docker Engine runs on another machine")
    return client


def run_isolated(
    client: DockerClient, words: Sequence[str], around: IsolatedEnvironment, timeout: float
) -> str:
    """Run a program; returns its output.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds.
        BuildFailed: the container cannot be started.
    """
    import requests
    from docker.errors import APIError
    from docker.types import LogConfig, Mount

    mounts = [Mount(str(p), str(p), type="bind", read_only=True) for p in around.shown]
    with created(
        client,
        _empty_image(client, around.links),
        words,
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
    ) as container:
        try:
            container.start()
            container.wait(timeout=timeout)
            return container.logs(stdout=True, stderr=False).decode("utf-8", "replace")
        except APIError as error:
            raise BuildFailed(f"cannot start the container: {error.explanation}") from None
        except (requests.Timeout, requests.ConnectionError):
            raise subprocess.TimeoutExpired(list(words), timeout) from None


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
