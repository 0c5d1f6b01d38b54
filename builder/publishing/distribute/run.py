"""Copies one image to several machines at once, and checks its digest there."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from builder.common.console import console, counted, megabytes
from builder.common.document import (
    Count,
    Digest,
    Document,
    Part,
    Problem,
    Seconds,
    Text,
    always,
)
from builder.errors import RemoteError, SparkBuildError
from builder.publishing.distribute.endpoint import Endpoint, parts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.publishing.distribute.node import Node, NodeFacts
    from builder.publishing.sources import StoredImage
    from builder.publishing.subject import Image

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
        images = self._stored.subject.images
        if len(images) == 1:
            return images[0]
        for image in images:
            if image.platform.split("/")[:2] == ["linux", survey.architecture]:
                return image
        raise RemoteError(
            f"{self._stored.subject.digest} has no image for linux/{survey.architecture}"
        )

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
