"""Copy an image to machines, each on its own."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import TYPE_CHECKING

from builder.common.console import console
from builder.common.reference import Ref
from builder.errors import UsageError
from builder.images.registry.copy import Locations
from builder.images.registry.reference import parse_reference
from builder.publishing.distribute import Distribution, Node, layers_of_all, saved
from builder.publishing.sources import EngineImage, StoredImage, how_to_run, open_source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from builder.publishing.distribute import Deliveries
    from builder.publishing.options import DistributeOptions
    from builder.publishing.sources import Opened

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
