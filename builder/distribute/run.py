"""Bring one image to several nodes at once, and know by digest that it arrived."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.distribute.endpoint import Endpoint
from builder.distribute.parts import parts_of
from builder.errors import RemoteError, SparkBuildError
from builder.publish.subject import read_json
from builder.util.console import console, counted, megabytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.distribute.node import Node, Survey
    from builder.publish.sources import StoredImage
    from builder.publish.subject import Image

#: Seconds between lines of progress.
_EVERY = 10.0


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What became of one node.  ``missing`` counts layers and bytes that it lacked before."""

    host: str
    status: str
    missing: int = 0
    missing_bytes: int = 0
    sent_blobs: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    error: SparkBuildError | None = None

    def as_json(self) -> dict[str, Any]:
        """The delivery in the document of the command."""
        value: dict[str, Any] = {
            "host": self.host,
            "status": self.status,
            "missing_layers": self.missing,
            "missing_bytes": self.missing_bytes,
            "sent_blobs": self.sent_blobs,
            "sent_bytes": self.sent_bytes,
            "seconds": round(self.seconds, 3),
        }
        if self.error is not None:
            error = {"code": self.error.code, "message": str(self.error), "hint": self.error.hint}
            value["error"] = error
        return value


class Distribution:
    """One image, served to many."""

    def __init__(self, stored: StoredImage, name: str, *, dry_run: bool) -> None:
        self._stored, self._name, self._dry_run = stored, name, dry_run
        self._configs = {
            image.digest: read_json(stored.source, image.config) for image in stored.subject.images
        }

    def image_for(self, survey: Survey) -> Image:
        """The image that a node's engine will choose.

        Raises:
            RemoteError: there is none for its architecture.
        """
        images = self._stored.subject.images
        if len(images) == 1:
            return images[0]
        for image in images:
            if image.platform.split("/")[:2] == ["linux", survey.architecture]:
                return image
        raise RemoteError(
            f"{self._stored.subject.digest} has no image for linux/{survey.architecture}"
        )

    def missing(self, image: Image, survey: Survey) -> list[int]:
        """Bytes of each layer that a node lacks."""
        ids = diff_ids(self._configs[image.digest])
        if len(ids) != len(image.layers):
            raise RemoteError(f"{image.digest}: {len(image.layers)} layers and {len(ids)} diff_ids")
        pairs = zip(image.layers, ids, strict=True)
        return [layer.size for layer, known in pairs if known not in survey.layers]

    def run(self, nodes: Sequence[Node], jobs: int) -> list[Delivery]:
        """Serve every node, at most ``jobs`` at once; one that fails stops no other."""
        with Endpoint(self._stored.source, self._stored.subject) as endpoint:
            stop = threading.Event()
            watcher = threading.Thread(target=_watch, args=(endpoint, stop), daemon=True)
            watcher.start()
            try:
                with ThreadPoolExecutor(jobs) as pool:
                    return list(pool.map(lambda node: self._deliver(node, endpoint), nodes))
            finally:
                stop.set()

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
                    host=node.host, status="dry run", missing=number, missing_bytes=size
                )
            parts = parts_of(image, self._configs[image.digest], survey.layers)
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
                seconds=time.monotonic() - began,
                error=reason,
            )
        sent = endpoint.counted(repository)
        return Delivery(
            host=node.host,
            status="fetched" if sent.blobs else "up to date",
            missing=number,
            missing_bytes=size,
            sent_blobs=sent.blobs,
            sent_bytes=sent.bytes,
            seconds=time.monotonic() - began,
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


def diff_ids(config: Mapping[str, Any]) -> list[str]:
    """The digests of an image's uncompressed layers, which is how engines know them."""
    rootfs = config.get("rootfs")
    ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    return [str(value) for value in ids] if isinstance(ids, list) else []


def _with_problems(error: SparkBuildError, endpoint: Endpoint) -> SparkBuildError:
    """The error with what went wrong at our end, which the node cannot know."""
    if not endpoint.problems:
        return error
    return RemoteError(f"{error}\n  {endpoint.problems[-1]}", hint=error.hint)


def _watch(endpoint: Endpoint, stop: threading.Event) -> None:
    """Say now and then how much has travelled."""
    last = 0
    while not stop.wait(_EVERY):
        total = sum(sent.bytes for sent in endpoint.sent.values())
        if total != last:
            console.say(f"  {megabytes(total)} sent")
            last = total
