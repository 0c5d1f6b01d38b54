"""Publish an image to every target, with its evidence."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, NamedTuple

from builder.common.console import console, counted, megabytes, print_json
from builder.common.reference import Ref
from builder.errors import Exit, SparkBuildError, UsageError
from builder.images.registry.client import Repository
from builder.images.registry.copy import Locations
from builder.pipeline.publishchecks import Checks
from builder.proof.checks import parse_levels
from builder.publishing.evidence import REQUIRED, Search, prove, read_evidence
from builder.publishing.repository import parse_target
from builder.publishing.run import (
    FailedTarget,
    ProofRow,
    Published,
    PublishRequest,
    TrafficRow,
    publish,
)
from builder.publishing.signedevidence import signed_evidence
from builder.publishing.sources import EngineImage, check_overlay, open_source, refuse_foreign
from builder.publishing.tags import roll_back

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from builder.publishing.evidence import Claim, Evidence, Proof
    from builder.publishing.options import PublishOptions
    from builder.publishing.results import PublishResult
    from builder.publishing.sources import Opened


class _Read(NamedTuple):
    """The image to publish, and its proof."""

    plan_digest: str
    overlay: bool
    proofs: Mapping[str, Proof]


def publish_everywhere(options: PublishOptions) -> None:
    """Publish to every target on its own, and print the image as the last line."""
    with Locations() as places, ExitStack() as stack:
        targets = _targets(options.to, places)
        work, read = _work(options, targets, places, stack)
        results, failures = _each(targets, work)
        traffic = TrafficRow.of(places.traffic)
    if options.json:
        proofs = read.proofs.items() if read else ()
        print_json(
            Published(
                dry_run=options.dry_run,
                plan_digest=read.plan_digest if read else None,
                overlay=read.overlay if read else None,
                verified=all(proof.verified for _, proof in proofs) if read else None,
                evidence=tuple(ProofRow.of(*row) for row in proofs) if read else None,
                results=tuple(results),
                failed=tuple(FailedTarget.of(*failure) for failure in failures),
                traffic=traffic,
            )
        )
    for result in results:
        _say(result)
        if not options.json:
            print(result.image)
    if failures:
        raise _failure(failures, len(targets))


def _targets(names: Sequence[str], places: Locations) -> list[Repository]:
    references = [parse_target(name) for name in names]
    twice = {r.name for r in references if sum(r.name == o.name for o in references) > 1}
    if twice:
        raise UsageError(f"--to {', '.join(sorted(twice))} is named twice")
    return [places.registry(r.host).repository(r.repository) for r in references]


def _work(
    options: PublishOptions,
    targets: Sequence[Repository],
    places: Locations,
    stack: ExitStack,
) -> tuple[Callable[[Repository], PublishResult], _Read | None]:
    """The work for each target; conditions for all of them are checked first."""
    if options.rollback is not None:
        tag = options.rollback
        _refuse_with_rollback(options)

        def back(repository: Repository) -> PublishResult:
            return roll_back(repository, tag, dry_run=options.dry_run, overlay=options.overlay)

        return back, None
    if options.source is None:
        raise UsageError("no image given", hint="spark-build publish oci:DIR --to HOST/REPO")
    with console.step(f"read {options.source}"):
        opened = stack.enter_context(open_source(Ref(options.source), places))
        plan_digest = opened.name.plan_digest
        to = [word for name in options.to for word in ("--to", name)]
        moving = [word for tag in options.move_tag for word in ("--move-tag", tag)]
        check_overlay(opened, allowed=options.overlay, to=[*to, *moving])
        if not isinstance(opened, EngineImage):
            refuse_foreign(opened, [*to, *moving])
        proofs = _proofs(options, opened, targets)
    request = PublishRequest(
        moving=tuple(options.move_tag), mirror_base=options.mirror_base, dry_run=options.dry_run
    )

    def there(repository: Repository) -> PublishResult:
        return publish(opened, repository, proofs, request, places)

    return there, _Read(plan_digest, opened.overlay, proofs)


def _refuse_with_rollback(options: PublishOptions) -> None:
    given = {
        "SOURCE": options.source,
        "--move-tag": options.move_tag,
        "--evidence": options.evidence,
        "--trust-evidence-key": options.trust_evidence_key,
        "--mirror-base": options.mirror_base,
        "--force": options.force,
    }
    extra = [name for name, value in given.items() if value]
    if extra:
        raise UsageError(
            f"--rollback cannot be combined with {', '.join(extra)}",
            hint="spark-build publish --rollback latest --to HOST/REPO",
        )


def _proofs(
    options: PublishOptions, opened: Opened, targets: Sequence[Repository]
) -> dict[str, Proof]:
    offered = [piece for path in options.evidence for piece in read_evidence(path)]
    levels = parse_levels(options.require, default=REQUIRED)
    claims = opened.claims

    def signed(claim: Claim) -> Iterable[Evidence]:
        key = options.trust_evidence_key
        place = None if isinstance(opened, EngineImage) else opened.source
        if key is not None and isinstance(place, Repository):
            return signed_evidence(place, claim.digest, key)
        return ()

    with closing(Checks(opened, trust_image=options.trust_image)) as checks:
        search = Search(
            name=checks.name,
            levels=levels,
            own=targets,
            signed=signed,
            run=lambda claim, wanted: _verify_now(checks, claim, wanted),
            force=options.force,
        )
        return prove(claims, offered, search)


def _verify_now(checks: Checks, claim: Claim, levels: Sequence[str]) -> Evidence:
    """Run levels of ``verify`` on an image, or take what this machine has found of it."""
    return checks.run(claim, levels)


def _each(
    targets: Sequence[Repository], work: Callable[[Repository], PublishResult]
) -> tuple[list[PublishResult], list[tuple[str, SparkBuildError]]]:
    """Process every target on its own: a failure does not stop the others."""
    results, failures = [], []
    for target in targets:
        try:
            with console.step(f"publish to {target.name}"):
                results.append(work(target))
        except SparkBuildError as error:
            failures.append((target.name, error))
            if len(targets) > 1:
                console.warn(f"{target.name}: {error}")
    return results, failures


def _say(result: PublishResult) -> None:
    for moved in result.moved:
        was = f", was {moved.previous}" if moved.previous else ""
        console.say(f"  {result.repository}:{moved.tag} -> {result.digest}{was}")
    mounted = f"{counted(result.mounted_blobs, 'blob')} mounted"
    sent = f"{megabytes(result.sent_bytes)} of layers sent, {mounted}"
    console.say(f"  {result.repository}: {result.status} ({sent})")


def _failure(failures: list[tuple[str, SparkBuildError]], targets: int) -> SparkBuildError:
    first = failures[0][1]
    if targets == 1:
        return first
    listed = "\n  ".join(f"{name}: {error}" for name, error in failures)
    return SparkBuildError(
        f"{len(failures)} of {targets} targets failed:\n  {listed}",
        Exit(first.code),
        hint=first.hint,
    )
