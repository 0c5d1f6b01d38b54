"""``publish``, ``tags``, ``sign``, ``verify-signature``, ``rebuild`` and ``distribute``."""

from shlex import quote
from typing import TYPE_CHECKING, Annotated

from builder.cli.command import PlainHttp, command
from builder.common.console import console, counted, megabytes, print_json, tell
from builder.common.options import Argument, Json, Option
from builder.errors import Exit, SparkBuildError, UsageError
from builder.pipeline.options import RebuildOptions
from builder.publishing.options import DistributeOptions, PublishOptions

if TYPE_CHECKING:
    from builder.images.registry.reference import Reference
    from builder.publishing.distribute import Deliveries
    from builder.publishing.tags import (
        Inventory,
        Pruned,
        Removal,
        RetentionDecision,
        StoredManifest,
    )

_PROOF = {True: "verified", False: "UNVERIFIED", None: "-"}


@command(
    "publish",
    "spark-build publish oci:out --to ghcr.io/me/vllm-spark --dry-run",
    "spark-build publish oci:out --to ghcr.io/me/vllm-spark --move-tag latest",
    "spark-build publish --rollback latest --to ghcr.io/me/vllm-spark",
    detail="The image gets an immutable tag, evidence, provenance and a bill of materials.",
)
def publish(options: PublishOptions, _plain_http: PlainHttp = ()) -> None:
    """Publish to every target on its own, and print the image as the last line."""
    from builder.pipeline.publish import publish_everywhere

    publish_everywhere(options)


@command(
    "tags",
    "spark-build tags ghcr.io/me/vllm-spark",
    "spark-build tags ghcr.io/me/vllm-spark --prune --keep 5 --dry-run",
    detail="Shows plan, base, layers, date, proof and size of each image.",
)
def tags(
    repository: Annotated[str, Argument("HOST/REPO", "HOST/REPO")],
    *,
    prune: Annotated[
        bool, Option("Delete older images, but never one that another tag names.")
    ] = False,
    keep: Annotated[
        int | None, Option("Number of newest images to keep for each profile.", "N")
    ] = None,
    dry_run: Annotated[bool, Option("Show what would be deleted.", names="-n")] = False,
    _plain_http: PlainHttp = (),
    json: Json = False,
) -> None:
    """List a repository; with ``prune``, delete what the retention rules do not keep."""
    from builder.images.registry.copy import Locations
    from builder.publishing.repository import TaggedManifests, parse_target
    from builder.publishing.tags import Pruned, Retention, judge, removals, take_inventory
    from builder.publishing.tags import prune as delete

    reference = parse_target(repository)
    if prune != (keep is not None):
        raise UsageError(
            "--prune and --keep must be set together",
            hint=f"spark-build tags {reference.name} --prune --keep 5 --dry-run",
        )
    with Locations() as places:
        opened = places.registry(reference.host).repository(reference.repository)
        inventory = take_inventory(opened)
        if keep is None:
            _show(inventory, json=json)
            return
        names = TaggedManifests(opened)
        named = names.look()
        verdicts = judge(inventory, keep, named)
        done = Pruned()
        wanted = removals(opened, inventory, verdicts, named, done.spared)
        try:
            if not dry_run:
                delete(opened, wanted, names, done)
        finally:
            if json:
                name = inventory.repository
                print_json(Retention.of(name, keep, verdicts, wanted, done, dry_run=dry_run))
            else:
                _show_verdicts(verdicts)
                _show_removals(wanted, None if dry_run else done)


def _show(inventory: "Inventory", *, json: bool) -> None:
    from builder.publishing.tags import HeldRow, Listing

    if json:
        rows = tuple(map(HeldRow.of, inventory.stored))
        print_json(Listing(repository=inventory.repository, images=rows))
        return
    if not inventory.stored:
        console.say(f"  {inventory.repository} has no image")
    for stored in inventory.stored:
        _show_held(stored)


def _show_held(stored: "StoredManifest") -> None:
    """Print one block for each image: names first, then its details."""
    from builder.publishing.tags import HeldRow

    names = [f"{tag} ({stored.kind(tag)})" for tag in stored.tags]
    tell(f"{', '.join(names)}")
    tell(f"  digest     {stored.digest}")
    if not stored.images:
        return
    row = HeldRow.of(stored)
    proof = _PROOF[stored.verified] + (f" ({', '.join(stored.levels)})" if stored.levels else "")
    added = "-" if stored.added is None else megabytes(stored.added)
    plans = [f"{image.plan_digest}  {image.platform}" for image in stored.images]
    if stored.overlay:
        tell(f"  is         an overlay: it runs on vllm/vllm-openai:v{row.version}, not alone")
    for key, value in (
        ("plan", "\n             ".join(plans)),
        ("base", row.base),
        ("layers", ", ".join(row.layers)),
        ("published", stored.published or f"- (made {row.created})"),
        ("proof", proof + (", signed" if stored.signed else "")),
        ("adds", added),
    ):
        tell(f"  {key:<10} {value}")


def _show_verdicts(verdicts: list["RetentionDecision"]) -> None:
    for verdict in verdicts:
        word = "keep" if verdict.keep else "old"
        tell(f"{word:<13}{', '.join(verdict.stored.tags)}  ({verdict.reason})")


def _show_removals(wanted: list["Removal"], done: "Pruned | None") -> None:
    """Print what a dry run would delete, or what was deleted, even if the run ended early."""
    if done is None:
        for removal in wanted:
            tell(f"{'would delete':<13}{removal}")
        return
    spared = {row.digest: f"  ({row.reason})" for row in done.spared}
    for removal in wanted:
        word = "deleted" if removal.digest in done.deleted else "left"
        tell(f"{word:<13}{removal}{spared.get(removal.digest, '')}")
    if done.deleted:
        console.say("  the registry frees the space when its garbage collection runs")


Key = Annotated[str | None, Option("Key file or KMS address (default: keyless).", "KEY")]
Log = Annotated[bool, Option("Use the public transparency log even with a key.")]
Image = Annotated[str, Argument("HOST/NAME:TAG or HOST/NAME@sha256:...", "IMAGE")]


@command(
    "sign",
    "spark-build sign ghcr.io/me/vllm-spark:latest --key cosign.key",
    note="cosign reads the key's password from COSIGN_PASSWORD, or asks for it.",
)
def sign(
    image: Image,
    key: Key = None,
    *,
    log: Log = False,
    _plain_http: PlainHttp = (),
    json: Json = False,
) -> None:
    """Sign an image by digest."""
    from builder.publishing.cosign import Trust
    from builder.publishing.cosign import sign as signed

    reference = _pinned(image)
    with console.step(f"sign {reference}"):
        done = signed(reference, Trust(key=key or "", log=log or not key))
    print_json(done) if json else print(reference)


@command(
    "verify-signature",
    "spark-build verify-signature ghcr.io/me/vllm-spark:latest --key cosign.pub",
    detail="Exit 5: no signature matches.",
)
def verify_signature(
    image: Image,
    key: Key = None,
    identity: Annotated[
        str,
        Option("Keyless: the signer's identity, such as a workflow URL.", "IDENTITY"),
    ] = "",
    issuer: Annotated[str, Option("Keyless: the issuer of that identity.", "URL")] = "",
    *,
    log: Log = False,
    _plain_http: PlainHttp = (),
    json: Json = False,
) -> None:
    """Check an image's signature; exit 5 if none matches."""
    from builder.publishing.cosign import Trust
    from builder.publishing.cosign import verify_signature as checked

    reference = _pinned(image)
    trust = Trust(key=key or "", identity=identity, issuer=issuer, log=log)
    with console.step(f"verify the signature of {reference}"):
        done = checked(reference, trust)
    print_json(done) if json else print(reference)


def _pinned(text: str) -> "Reference":
    """The reference with the digest that its tag has now.

    Raises:
        UsageError: it is not a reference.
        RemoteError: the registry has no such image.
    """
    from builder.images.registry.copy import Locations
    from builder.images.registry.reference import parse_reference

    reference = parse_reference(text)
    if reference.digest:
        return reference
    with Locations() as places:
        repository = places.registry(reference.host).repository(reference.repository)
        pinned = reference.at(repository.manifest(reference.tag).digest)
    console.say(f"  {text} is {pinned.digest}")
    return pinned


@command(
    "rebuild",
    "spark-build rebuild oci:out",
    "spark-build rebuild ghcr.io/me/vllm@sha256:...",
    note="Exit 0: same digest; 5: different.",
    detail="Uses the plan and layers inside the image, and compares byte for byte.",
)
def rebuild(options: RebuildOptions, _plain_http: PlainHttp = ()) -> None:
    """Rebuild an image from its own metadata; exit 5 if the result differs."""
    from builder.pipeline.rebuild import rebuild_all

    if options.engine != "oci":
        raise UsageError(
            f"--engine {options.engine} is not reproducible; rebuild uses oci",
            hint=f"spark-build rebuild {quote(options.image)}",
        )
    rebuild_all(options)


@command(
    "distribute",
    "spark-build distribute vllm-spark spark-2",
    "spark-build distribute oci:out spark-1 spark-2",
    "spark-build distribute oci:out me@spark-1 --tag vllm-spark:b12x --dry-run",
    detail="Each machine fetches only the layers that it lacks.",
)
def distribute(
    options: DistributeOptions, _plain_http: PlainHttp = (), *, json: Json = False
) -> None:
    """Copy an image to nodes, each on its own; exit 8 if one failed."""
    from builder.publishing import distribute

    done, name = distribute.distribute(options)
    if json:
        print_json(done)
    _report(done)
    if not json:
        tell(f"{name}@{done.digest}")


def _report(done: "Deliveries") -> None:
    """Print the result of each node.

    Raises:
        SparkBuildError: a node does not have the image.
    """
    for delivery in done.nodes:
        console.say(
            f"  {delivery.host}: {delivery.status}, {megabytes(delivery.sent_bytes)} in "
            f"{counted(delivery.sent_blobs, 'blob')}, {delivery.seconds:.1f} s"
        )
    problems = [(node.host, node.error) for node in done.nodes if node.error is not None]
    if problems:
        first = problems[0][1]
        listed = "\n  ".join(f"{host}: {error.message}" for host, error in problems)
        count = f"{len(problems)} of {len(done.nodes)} failed:\n  {listed}"
        message = first.message if len(done.nodes) == 1 else count
        raise SparkBuildError(message, Exit(first.code), hint=first.hint)
