"""``spark-build distribute``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.distribute.node import Node
from builder.distribute.run import Delivery, Distribution
from builder.errors import Exit, SparkBuildError, UsageError
from builder.publish.overlays import how_to_run
from builder.publish.sources import EngineImage, StoredImage, open_source
from builder.registry.locations import Locations
from builder.registry.reference import parse_reference
from builder.util.console import console, counted, megabytes, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence


def distribute_command(
    *,
    image: str,
    hosts: Sequence[str],
    tag: str | None,
    ssh: str,
    jobs: int,
    dry_run: bool,
    json: bool,
) -> None:
    """Bring an image to nodes; every node is served by itself, and exit 8 says one failed."""
    nodes = [Node.parse(host, ssh) for host in hosts]
    if len(set(hosts)) != len(hosts):
        raise UsageError("a host is named twice")
    if jobs < 1:
        raise UsageError("--jobs must be 1 or more")
    with Locations() as places, open_source(image, places) as opened:
        if isinstance(opened, EngineImage):
            raise UsageError(
                f"{image} is in a Docker Engine, which gives its layers only all together",
                hint="publish it and name it by its registry, or build it with --output oci:DIR",
            )
        name = name_on_nodes(opened, image, tag)
        if opened.overlay:
            said, _ = how_to_run(opened)
            console.warn(f"{image} is an overlay, which does not run alone.\n{said}")
        with console.step(f"distribute {opened.subject.digest} as {name}"):
            distribution = Distribution(opened, name, dry_run=dry_run)
            deliveries = distribution.run(nodes, jobs)
    if json:
        rows = [delivery.as_json() for delivery in deliveries]
        head = {"schema": 1, "image": name, "digest": opened.subject.digest, "dry_run": dry_run}
        print_json({**head, "nodes": rows})
    _report(deliveries)
    failed = [delivery for delivery in deliveries if delivery.error is not None]
    if failed:
        error = failed[0].error
        assert error is not None
        listed = "\n  ".join(f"{d.host}: {d.error}" for d in failed)
        raise SparkBuildError(
            str(error) if len(nodes) == 1 else f"{len(failed)} of {len(nodes)} failed:\n  {listed}",
            Exit(error.code),
            hint=error.hint,
        )
    if not json:
        print(f"{name}@{opened.subject.digest}")


def name_on_nodes(opened: StoredImage, text: str, tag: str | None) -> str:
    """What the image is called there: as asked, as it is called here, or after its plan.

    Raises:
        UsageError: that is no name, or the image is not ours and nothing names it.
    """
    if tag:
        reference = parse_reference(tag)
        if reference.digest:
            raise UsageError(f"--tag {tag}: a name has no digest; it follows from the image")
        return tag
    if not text.startswith("oci:"):
        reference = parse_reference(text)
        if reference.tag:
            return f"{reference.name}:{reference.tag}"
    name = opened.name
    return f"spark-build/{name.profile}:{name.tag(verified=True)}"


def _report(deliveries: Sequence[Delivery]) -> None:
    for delivery in deliveries:
        console.say(
            f"  {delivery.host}: {delivery.status}, {megabytes(delivery.sent_bytes)} in "
            f"{counted(delivery.sent_blobs, 'blob')}, {delivery.seconds:.1f} s"
        )
