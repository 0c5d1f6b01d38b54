"""Copies an image to machines over SSH; each fetches only the layers that it lacks."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, Self

from msgspec import Meta

from builder.common.console import console, counted, megabytes
from builder.common.diskspace import Need, check_room
from builder.common.document import Count, Digest, Document, Part, Problem, Seconds, Text, always
from builder.common.reference import Ref
from builder.errors import RemoteError, SparkBuildError, UsageError
from builder.images.engines import docker
from builder.images.registry.copy import Locations
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    Descriptor,
    RawManifest,
    parse_json,
    sha256_digest,
)
from builder.images.registry.reference import parse_reference
from builder.publishing.sources import EngineImage, StoredImage, how_to_run, open_source
from builder.publishing.subject import read_subject

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from builder.images.registry.model import ImageSource
    from builder.publishing.options import DistributeOptions
    from builder.publishing.sources import Opened
    from builder.publishing.subject import Image, ImageSet


# ---------------------------------------------------------------------------------------- machines

#: A host name or address for SSH, with an optional user; never an option.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]*")
_ALLOCATED = re.compile(r"Allocated port (\d+) for remote forward")
_OPTIONS = (
    "-o", "BatchMode=yes",
    "-o", "ConnectTimeout=15",
    "-o", "ServerAliveInterval=15",
    "-o", "ServerAliveCountMax=4",
)  # fmt: skip
#: Timeout in seconds for a node's first response; pulls have only SSH's limits.
_ANSWER = 60.0
_LINES = 6
#: Seconds to wait for the remaining output of a closed connection.
_LAST_WORDS = 5.0

#: Script: print the node's facts, then each image's diff_ids on a line.
_SURVEY = """
docker version --format 'arch {{.Server.Arch}}' || exit 90
df -Pk "$(docker info --format '{{.DockerRootDir}}')" 2>/dev/null | awk 'NR==2 {print "free", $4}'
docker image ls --quiet --no-trunc | sort -u | while read -r id; do
  docker image inspect --format '{{json .RootFS.Layers}}' "$id" 2>/dev/null || true
done
"""
#: Script: pull by digest (the engine reuses and checks layers), tag, remove the tunnel's tag.
#: The last line has the status, because SSH waits for connections that the engine keeps open.
_FETCH = """
from=127.0.0.1:{port}/{repository}
pull() {{
  for wait in 1 3 0; do
    docker pull --quiet "$from@$1" >/dev/null && break
    [ "$wait" = 0 ] && return 91
    sleep "$wait"
  done
  docker tag "$from@$1" "$2" || return 92
  docker image rm "$from@$1" >/dev/null || return 93
}}
fetch() {{
  for part in {parts}; do
    pull "$part" "{partial}:${{part#sha256:}}" || return
  done
  pull {digest} {name} || return
  docker image ls --format '{{{{.Repository}}}}:{{{{.Tag}}}}' {partial} | while read -r part; do
    docker image rm "$part" >/dev/null
  done
  docker image inspect --format '{{{{.Id}}}}' {name} || return 94
}}
fetch
echo "ended $?"
"""
#: Tag prefix of an image's parts on a node during a transfer.
_PARTIAL = "spark-build-partial"
_ENDED = re.compile(r"ended (\d+)")


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A node's facts: layers by diff_id, and free bytes in the engine's folder (0: unknown)."""

    architecture: str
    layers: frozenset[str]
    free: int


@dataclass(frozen=True)
class Node:
    """A machine reached over SSH.  ``ssh`` is the program with the user's options."""

    host: str
    ssh: tuple[str, ...] = ("ssh",)

    @classmethod
    def parse(cls, host: str, ssh: str) -> Node:
        """Parse a host from the command line.

        Raises:
            UsageError: the host's name could be taken for an option.
        """
        if not _HOST.fullmatch(host):
            raise UsageError(f"{host!r} is not a host", hint="spark-1, or user@spark-1")
        try:
            words = tuple(shlex.split(ssh))
        except ValueError as error:
            raise UsageError(f"--ssh {ssh!r}: {error}") from None
        if not words:
            raise UsageError("--ssh names no program")
        return cls(host, words)

    def survey(self) -> NodeFacts:
        """Query the node's engine.

        Raises:
            RemoteError: the node does not respond, or has no usable Docker Engine.
        """
        try:
            done = subprocess.run(
                [*self.ssh, *_OPTIONS, self.host, "sh", "-s"],
                input=_SURVEY,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_ANSWER,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RemoteError(f"{self.host} did not answer in {_ANSWER:.0f} s") from None
        except OSError as error:
            raise UsageError(f"{self.ssh[0]} cannot be run: {error.strerror}") from None
        if done.returncode:
            raise self.failed(done.returncode, done.stderr)
        return _parse_survey(done.stdout)

    @contextlib.contextmanager
    def tunnel(self, port: int) -> Iterator[Tunnel]:
        """A shell on the node with ``port`` forwarded.

        Raises:
            RemoteError: the node does not respond, or does not allow port forwarding.
        """
        command = [*self.ssh, *_OPTIONS, "-o", "ExitOnForwardFailure=yes", "-o", "LogLevel=INFO"]
        command += ["-R", f"127.0.0.1:0:127.0.0.1:{port}", self.host, "sh", "-s"]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            tunnel = Tunnel(self, process)
            try:
                yield tunnel
            finally:
                process.terminate()

    def failed(self, status: int, output: str) -> RemoteError:
        """The error for a failed command on the node, with the end of its output."""
        lines = [line for line in output.splitlines() if line.strip() and "Allocated" not in line]
        words = "\n  ".join(lines[-_LINES:])
        hints = {
            255: f"{shlex.join(self.ssh)} {self.host} docker version; it must not prompt",
            90: f"add the user to the docker group on {self.host}, or start Docker there",
            91: "run the same command again; completed parts are reused",
        }
        return RemoteError(
            f"{self.host}: failed with status {status}:\n  {words}", hint=hints.get(status, "")
        )


class Tunnel:
    """A shell on a node that waits for a script."""

    def __init__(self, node: Node, process: subprocess.Popen[str]) -> None:
        self._node, self._process = node, process
        self._said: list[str] = []
        self._port: int | None = None
        self._ready = threading.Event()
        assert process.stderr is not None
        self._reader = threading.Thread(target=self._listen, args=(process.stderr,), daemon=True)
        self._reader.start()

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            match = _ALLOCATED.search(line)
            if match:
                self._port = int(match[1])
                self._ready.set()
            self._said.append(line)
        self._ready.set()

    def fetch(self, repository: str, digest: str, name: str, parts: Sequence[str]) -> str:
        """Let the node's engine pull and tag an image; returns its ID there.

        ``parts`` are digests of images with its lowest layers, to pull first.

        Raises:
            RemoteError: the node's engine failed to pull the image.
        """
        self._ready.wait(_ANSWER)
        if self._port is None:
            self._process.kill()
            self._process.communicate()
            raise self._node.failed(255, "".join(self._said) or "it did not answer")
        script = _FETCH.format(
            port=self._port,
            repository=repository,
            digest=digest,
            name=shlex.quote(name),
            parts=" ".join(parts),
            partial=_PARTIAL,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(script)
            self._process.stdin.close()
        lines: list[str] = []
        for line in self._process.stdout:
            ended = _ENDED.fullmatch(line.strip())
            if ended is None:
                lines.append(line.strip())
            elif ended[1] == "0" and lines:
                return lines[-1]
            else:
                time.sleep(0.2)  # what docker said of it comes on another way
                raise self._node.failed(int(ended[1]), "".join(self._said))
        status = self._process.wait()
        self._reader.join(_LAST_WORDS)
        raise self._node.failed(status, "".join(self._said))


_NUMBER = re.compile(r"[0-9]{1,18}")


def _parse_survey(output: str) -> NodeFacts:
    layers: set[str] = set()
    architecture, free = "", 0
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        if word == "arch":
            architecture = rest
        elif word == "free" and _NUMBER.fullmatch(rest):
            free = int(rest) * 1024
        with contextlib.suppress(ValueError):
            value: object = parse_json(line)
            layers.update(_strings(value))
    return NodeFacts(architecture=architecture, layers=frozenset(layers), free=free)


def _strings(value: object) -> Sequence[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


# ------------------------------------------------------------------------------------ the endpoint
#
# A node's Docker Engine pulls from it through a tunnel, so the engine that will run the image
# decides what is transferred, resumed and checked.  The repository's name is a random secret
# of this run, so other users of the machine cannot read the image through the port.
#
# A Docker Engine discards the layers of a failed pull.  So a node first pulls images of the
# lowest layers, each with a few more than the one before: the engine keeps their layers, and
# the next run reuses them.  When the whole image has arrived, their tags are removed.

# -------------------------------------------------------------------------------- parts of an image


#: Missing bytes in a part: a few seconds on a slow connection.
PART_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class ImagePart:
    """The lowest layers of an image, as an image."""

    manifest: RawManifest
    config: bytes

    @property
    def config_digest(self) -> str:
        """Digest of its configuration."""
        return sha256_digest(self.config)


def parts_of(
    image: Image, present: Collection[str], limit: int = PART_BYTES
) -> Iterator[ImagePart]:
    """Parts that each add about ``limit`` bytes that are not ``present`` (by diff_id).

    The last layers are not a part: they come with the image itself.
    """
    diff_ids = image.settings.diff_ids or ()
    waiting = 0
    for number, (layer, diff_id) in enumerate(zip(image.layers, diff_ids, strict=True), start=1):
        waiting += 0 if diff_id in present else layer.size
        if waiting >= limit and number < len(diff_ids):
            waiting = 0
            yield _part(image, diff_ids[:number])


def _part(image: Image, diff_ids: Sequence[str]) -> ImagePart:
    platform = image.settings.platform
    small = {**platform, "config": {}, "rootfs": {"type": "layers", "diff_ids": list(diff_ids)}}
    data = json.dumps(small, sort_keys=True, separators=(",", ":")).encode()
    layers = image.manifest.json()["layers"][: len(diff_ids)]
    document = {
        "schemaVersion": 2,
        "mediaType": image.manifest.media_type,
        "config": {
            "mediaType": image.config.media_type,
            "digest": sha256_digest(data),
            "size": len(data),
        },
        "layers": layers,
    }
    raw = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return ImagePart(
        manifest=RawManifest(data=raw, media_type=image.manifest.media_type), config=data
    )


# ------------------------------------------------------------------------------------- the registry


_PATH = re.compile(r"/v2/([a-z0-9]+)/([a-z0-9-]+)/(manifests|blobs)/(sha256:[0-9a-f]{64})")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_BLOCK = 1 << 20
#: First byte of a TLS connection (RFC 8446, section 5.1).
_TLS_HANDSHAKE = b"\x16"


@dataclass
class Sent:
    """Blobs and bytes that one node has fetched, counted during transfer."""

    blobs: int = 0
    bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, count: int, *, blob: bool = False) -> None:
        """Add to the counts; thread-safe."""
        with self._lock:
            self.bytes += count
            self.blobs += blob


class Endpoint:
    """Serves an image; each node has its own secret repository name."""

    def __init__(self, source: ImageSource, subject: ImageSet) -> None:
        self.source = source
        self.manifests = {image.digest: image.manifest for image in subject.images}
        self.manifests[subject.digest] = subject.root
        self.blobs = {blob.digest: blob for blob in subject.blobs()}
        self.documents: dict[str, bytes] = {}
        self.sent: dict[str, Sent] = {}
        self.problems: list[str] = []
        endpoint = self

        class Handler(_Handler):
            owner = endpoint

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def port(self) -> int:
        """The port on this machine's loopback interface."""
        return int(self._server.server_address[1])

    def add_part(self, part: ImagePart) -> str:
        """Also serve a part of the image; returns its digest."""
        self.documents[part.config_digest] = part.config
        self.manifests[part.manifest.digest] = part.manifest
        return part.manifest.digest

    def repository(self) -> str:
        """A new repository name for the same image."""
        name = secrets.token_hex(16)
        self.sent[name] = Sent()
        return f"{name}/image"

    def counted(self, repository: str) -> Sent:
        """The counts of a repository so far."""
        return self.sent[repository.partition("/")[0]]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Handles requests for manifests and blobs by digest, whole or from an offset."""

    protocol_version = "HTTP/1.1"
    owner: Endpoint

    def handle(self) -> None:
        """Reply to a TLS handshake with the response by which engines detect plain HTTP."""
        with contextlib.suppress(OSError):  # a connection that is cut is the engine's to handle
            if self.connection.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE:
                self.connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                return
            super().handle()

    def log_message(self, *_words: object) -> None:
        """No log: the node's engine reports progress, and this side counts."""

    def do_HEAD(self) -> None:
        """Like GET, without the body."""
        self._answer(send=False)

    def do_GET(self) -> None:
        """A manifest or a blob."""
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        if self.path in ("/v2", "/v2/"):
            self._bytes(b"{}", "application/json", send=send)
            return
        match = _PATH.fullmatch(self.path)
        sent = self.owner.sent.get(match[1]) if match else None
        if match is None or sent is None or match[2] != "image":
            self._absent()
            return
        digest = match[4]
        if match[3] == "manifests" and digest in self.owner.manifests:
            manifest = self.owner.manifests[digest]
            self._bytes(manifest.data, manifest.media_type, digest=digest, send=send)
        elif match[3] == "blobs" and digest in self.owner.documents:
            data = self.owner.documents[digest]
            self._bytes(data, "application/octet-stream", digest=digest, send=send)
        elif match[3] == "blobs" and digest in self.owner.blobs:
            self._blob(self.owner.blobs[digest], sent, send=send)
        else:
            self._absent()

    def _bytes(self, data: bytes, media_type: str, *, send: bool, digest: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Docker-Distribution-API-Version", "registry/2.0")
        if digest:
            self.send_header("Docker-Content-Digest", digest)
        self.end_headers()
        if send:
            self.wfile.write(data)

    def _absent(self) -> None:
        data = json.dumps({"errors": [{"code": "NOT_FOUND", "message": "not here"}]}).encode()
        self.send_response(404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _blob(self, blob: Descriptor, sent: Sent, *, send: bool) -> None:
        start, stop = self._range(blob.size)
        if start > stop:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{blob.size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        whole = (start, stop) == (0, blob.size - 1) and "Range" not in self.headers
        self.send_response(200 if whole else 206)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(stop - start + 1))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Docker-Content-Digest", blob.digest)
        if not whole:
            self.send_header("Content-Range", f"bytes {start}-{stop}/{blob.size}")
        self.end_headers()
        if send:
            self._stream(blob, start, stop, sent)

    def _range(self, size: int) -> tuple[int, int]:
        """First and last requested byte; first > last for an invalid range."""
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if match is None:
            return 0, max(size - 1, 0)
        stop = int(match[2]) if match[2] else size - 1
        return int(match[1]), min(stop, size - 1)

    def _stream(self, blob: Descriptor, start: int, stop: int, sent: Sent) -> None:
        """Send a range; preceding bytes are read and discarded, so that the digest is checked."""
        position = 0
        sent.add(0, blob=start == 0)
        try:
            with self.owner.source.open(blob) as stream:
                while position <= stop and (data := stream.read(_BLOCK)):
                    part = data[max(0, start - position) : stop + 1 - position]
                    position += len(data)
                    if part:
                        sent.add(len(part))  # first: who has the last byte may ask for the count
                        self.wfile.write(part)
        except RemoteError as error:
            self.owner.problems.append(str(error))
            self.close_connection = True
            self.connection.close()
        except OSError:  # the node has gone; it asks again, or its command fails
            self.close_connection = True


# ---------------------------------------------------------- images in this machine's Docker Engine
#
# The engine writes whole images as one stream (``docker save``), an OCI layout from Docker 25 on.
# Layers that every node has are read past and not stored.

_BLOB = re.compile(r"blobs/sha256/([0-9a-f]{64})")
_INDEX = "index.json"
#: Larger blobs are layers, so they are no manifest.
_LIMIT = 4 << 20
_UNKNOWN = "application/octet-stream"


def layers_of_all(nodes: Sequence[Node], jobs: int) -> frozenset[str]:
    """Layers, by diff_id, that every node that answers has."""

    def survey(node: Node) -> frozenset[str] | None:
        try:
            return node.survey().layers
        except SparkBuildError:
            return None  # the transfer to it says why

    with ThreadPoolExecutor(jobs) as pool:
        present = [layers for layers in pool.map(survey, nodes) if layers is not None]
    return frozenset.intersection(*present) if present else frozenset()


@contextmanager
def saved(opened: EngineImage, present: Collection[str]) -> Iterator[StoredImage]:
    """The image as a layout in a temporary folder, without the layers in ``present``.

    Raises:
        EngineError: the engine fails.
        UsageError: it is too old, or the disk has no room.
    """
    size = int(opened.image.image.attrs.get("Size") or 0)
    if not present:
        check_room([Need.temporary(size, f"the layers of {opened.ref}")])
    console.say(f"  reading {opened.ref} from Docker, {megabytes(size)}")
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
        layout = LayoutDirectory(Path(folder))
        image = opened.image.id
        with docker.saving(opened.ref.text):
            files = docker.saved_files(opened.image.client, image)
            manifest = store(layout, files, image, present)
        layout.put_manifest(manifest, "")
        yield StoredImage(
            ref=opened.ref, source=layout, subject=read_subject(layout, manifest.digest)
        )


def store(
    layout: LayoutDirectory,
    files: Iterable[tuple[str, int, IO[bytes]]],
    image: str,
    present: Collection[str],
) -> RawManifest:
    """Store the files of a saved image, and return the manifest of the image with this ID.

    ``files`` are names, sizes and contents; ``present`` are digests that are not stored.

    Raises:
        UsageError: the stream is not an OCI layout.
        RemoteError: it is damaged, or does not have the image.
    """
    index, blobs = b"", 0
    for name, size, content in files:
        match = _BLOB.fullmatch(name)
        digest = f"sha256:{match[1]}" if match else ""
        if digest:
            blobs += 1
        if digest and digest not in present:
            layout.put_blob(Descriptor(media_type=_UNKNOWN, digest=digest, size=size), content)
        elif name == _INDEX:
            index = content.read(_LIMIT)
    if not index or not blobs:
        raise UsageError(
            "this Docker Engine does not save images as OCI layouts: Docker 25 and later do",
            hint="build the image with --output oci:DIR, and distribute oci:DIR",
        )
    manifests = [
        m for m in _manifests(layout, _document(index, _INDEX), 2) if _is(layout, m, image)
    ]
    if len(manifests) != 1:
        raise RemoteError(f"Docker saved {len(manifests)} images for {image}, not one")
    return manifests[0]


def _document(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = parse_json(data)
    except ValueError as error:
        raise RemoteError(f"Docker saved a malformed {what}: {error}") from None
    return value if isinstance(value, dict) else {}


def _manifests(
    layout: LayoutDirectory, document: dict[str, Any], depth: int
) -> Iterator[RawManifest]:
    """The manifests of an index that were saved; those of other platforms were not."""
    entries = document.get("manifests")
    for entry in entries if isinstance(entries, list) else ():
        descriptor = Descriptor.parse(entry, _INDEX)
        if descriptor.size > _LIMIT or not layout.has(descriptor.digest):
            continue
        manifest = layout.manifest(descriptor.digest)
        kind = manifest.json().get("mediaType") or descriptor.media_type
        if kind in INDEX_TYPES and depth:
            yield from _manifests(layout, manifest.json(), depth - 1)
        elif kind in MANIFEST_TYPES:
            yield RawManifest(data=manifest.data, media_type=str(kind))


def _is(layout: LayoutDirectory, manifest: RawManifest, image: str) -> bool:
    """Whether a manifest is the image, and not an attestation beside it.

    An image's ID is the digest of its configuration, or of its manifest or index if containerd
    stores it.
    """
    subject = read_subject(layout, manifest.digest)
    (one,) = subject.images
    platform = one.settings.platform
    return image in (manifest.digest, one.config.digest) or (
        bool(one.settings.diff_ids) and platform.get("os") == "linux"
    )


# ------------------------------------------------------------------------------------------ copies

#: Seconds between lines of progress.
_EVERY = 10.0


class Delivery(Part, frozen=True, kw_only=True):
    """The result for one node; "missing" is what it lacked before."""

    host: Text
    status: Literal["fetched", "up to date", "dry run", "failed"]
    missing_layers: Count = always(0)
    missing_bytes: Count = always(0)
    sent_blobs: Count = always(0)
    sent_bytes: Count = always(0)
    seconds: Seconds = always(0.0)
    error: Problem | None = None


class Deliveries(Document, frozen=True, kw_only=True):
    """What each node lacked, and what it fetched."""

    image: Annotated[Text, Meta(description="its name on the nodes")]
    digest: Digest
    dry_run: bool
    nodes: Annotated[tuple[Delivery, ...], Meta(min_length=1)]


class Distribution:
    """The copy of one image to several nodes."""

    def __init__(self, stored: StoredImage, name: str, *, dry_run: bool) -> None:
        self._stored, self._name, self._dry_run = stored, name, dry_run

    def image_for(self, survey: NodeFacts) -> Image:
        """The image that a node's engine will select.

        Raises:
            RemoteError: no image for its architecture.
        """
        subject, wanted = self._stored.subject, f"linux/{survey.architecture}"
        if len(subject.images) == 1:
            return subject.images[0]
        images = {i.digest: i for i in subject.images if i.is_for(wanted) and not i.attests}
        exact = {d: i for d, i in images.items() if i.is_for(wanted, exactly=True)}
        if len(exact) > 1:  # the tag must not name what another runtime would not take
            raise RemoteError(
                f"{subject.digest} has {len(exact)} images for {wanted}: {', '.join(exact)}",
                hint="name one of them by its own digest",
            )
        for image in (*exact.values(), *images.values()):
            return image
        raise RemoteError(f"{subject.digest} has no image for {wanted}")

    def missing(self, image: Image, survey: NodeFacts) -> list[int]:
        """Bytes of each layer that a node lacks."""
        ids = image.settings.diff_ids or ()
        if len(ids) != len(image.layers):
            raise RemoteError(f"{image.digest}: {len(image.layers)} layers and {len(ids)} diff_ids")
        pairs = zip(image.layers, ids, strict=True)
        return [layer.size for layer, known in pairs if known not in survey.layers]

    def run(self, nodes: Sequence[Node], jobs: int) -> Deliveries:
        """Serve every node, at most ``jobs`` in parallel; a failure does not stop the others."""
        with Endpoint(self._stored.source, self._stored.subject) as endpoint:
            stop = threading.Event()
            watcher = threading.Thread(target=_watch, args=(endpoint, stop), daemon=True)
            watcher.start()
            try:
                with ThreadPoolExecutor(jobs) as pool:
                    done = tuple(pool.map(lambda node: self._deliver(node, endpoint), nodes))
            finally:
                stop.set()
        digest = self._stored.subject.digest
        return Deliveries(image=self._name, digest=digest, dry_run=self._dry_run, nodes=done)

    def _deliver(self, node: Node, endpoint: Endpoint) -> Delivery:
        began = time.monotonic()
        repository = endpoint.repository()
        try:
            survey = node.survey()
            image = self.image_for(survey)
            sizes = self.missing(image, survey)
            number, size = len(sizes), sum(sizes)
            console.say(f"  {node.host} lacks {counted(number, 'layer')}, {megabytes(size)}")
            if survey.free and survey.free < 2 * size:
                console.warn(
                    f"{node.host} has {megabytes(survey.free)} free; unpacked, these layers may "
                    "need more"
                )
            if self._dry_run:
                return Delivery(
                    host=node.host, status="dry run", missing_layers=number, missing_bytes=size
                )
            parts = parts_of(image, survey.layers)
            self._fetch(node, endpoint, repository, [endpoint.add_part(part) for part in parts])
        except SparkBuildError as error:
            sent = endpoint.counted(repository)
            reason = _with_problems(error, endpoint)
            console.warn(str(reason))
            return Delivery(
                host=node.host,
                status="failed",
                sent_blobs=sent.blobs,
                sent_bytes=sent.bytes,
                seconds=_since(began),
                error=Problem(code=reason.code, message=str(reason), hint=reason.hint),
            )
        sent = endpoint.counted(repository)
        return Delivery(
            host=node.host,
            status="fetched" if sent.blobs else "up to date",
            missing_layers=number,
            missing_bytes=size,
            sent_blobs=sent.blobs,
            sent_bytes=sent.bytes,
            seconds=_since(began),
        )

    def _fetch(self, node: Node, endpoint: Endpoint, repository: str, parts: Sequence[str]) -> None:
        subject = self._stored.subject
        with node.tunnel(endpoint.port) as tunnel:
            seen = tunnel.fetch(repository, subject.digest, self._name, parts)
        known = {subject.digest, *(d for image in subject.images for d in image.digests)}
        if seen not in known:
            raise RemoteError(
                f"{node.host}: {self._name} is {seen} there, which is not the image that was sent "
                f"({subject.digest})"
            )


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)


def _with_problems(error: SparkBuildError, endpoint: Endpoint) -> SparkBuildError:
    """The error with problems on this side, which the node cannot report."""
    if not endpoint.problems:
        return error
    return RemoteError(f"{error}\n  {endpoint.problems[-1]}", hint=error.hint)


def _watch(endpoint: Endpoint, stop: threading.Event) -> None:
    """Print progress regularly."""
    last = 0
    while not stop.wait(_EVERY):
        total = sum(sent.bytes for sent in endpoint.sent.values())
        if total != last:
            console.say(f"  {megabytes(total)} sent")
            last = total


# -------------------------------------------------------------------------------------- the command


#: What Docker takes for the ID of an image, whole or its beginning.
_IMAGE_ID = re.compile(r"(sha256:)?[0-9a-f]{12,64}")


def distribute(options: DistributeOptions) -> tuple[Deliveries, str]:
    """Copy an image to nodes, and give what each fetched, and the image's name there."""
    nodes = [Node.parse(host, options.ssh) for host in options.hosts]
    if len(set(options.hosts)) != len(options.hosts):
        raise UsageError("a host is named twice")
    if options.jobs < 1:
        raise UsageError("--jobs must be 1 or more")
    with Locations() as places, open_source(Ref(options.image), places) as opened:
        name = name_on_nodes(opened, options.image, options.tag)
        if opened.overlay:
            message, _ = how_to_run(opened)
            console.warn(f"{options.image} is an overlay, which cannot run alone.\n{message}")
        with (
            _stored(opened, nodes, options.jobs) as stored,
            console.step(f"distribute {stored.subject.digest} as {name}"),
        ):
            done = Distribution(stored, name, dry_run=options.dry_run).run(nodes, options.jobs)
    return done, name


def _stored(
    opened: Opened, nodes: Sequence[Node], jobs: int
) -> AbstractContextManager[StoredImage]:
    """The image with its layers; of one in a Docker Engine, those that a node lacks."""
    if isinstance(opened, EngineImage):
        return saved(opened, layers_of_all(nodes, jobs))
    return nullcontext(opened)


def name_on_nodes(opened: Opened, text: str, tag: str | None) -> str:
    """The image's name on the nodes: from ``--tag``, from the source, or from its plan.

    Raises:
        UsageError: the name is not valid, or an image of another tool has no name.
    """
    if tag:
        reference = parse_reference(tag)
        if reference.digest:
            raise UsageError(f"--tag {tag}: do not give a digest here; it is taken from the image")
        return tag
    if isinstance(opened, EngineImage):
        if _IMAGE_ID.fullmatch(text):
            raise UsageError(f"{text} is an image ID: the hosts need a name", hint="--tag NAME")
        return text if ":" in text.rpartition("/")[2] else f"{text}:latest"
    if not opened.ref.in_layout:
        reference = parse_reference(text)
        if reference.tag:
            return f"{reference.name}:{reference.tag}"
    name = opened.name
    return f"spark-build/{name.profile}:{name.tag(verified=True)}"
