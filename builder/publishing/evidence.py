"""The evidence of an image, and the documents that are attached to a published one.

Only verified images are published.  Evidence is the document that ``verify --json`` writes: given
on the command line, attached to the image, or from a new run.  It is accepted for an image only if
it names that image's digest, and its verdict is computed from its checks, not read from its own
summary.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
import uuid
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from builder import __version__, settings
from builder.applier.files import read_regular
from builder.applier.values import sha256_hex
from builder.common.console import console
from builder.common.document import Part, moment, read
from builder.common.paths import in_checkout, package_file
from builder.common.reference import base_kind
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError
from builder.images.engines.baked import LABEL_PREFIX, SHARE
from builder.images.engines.maker import programs
from builder.images.registry.model import blobs, parse_json
from builder.images.registry.transport import NotFound
from builder.publishing.repository import Attachment, NotAttached, own_manifest
from builder.publishing.subject import read_blob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from builder.common.plan import BakedPlan, Input, PlannedLayer, ToolkitImage
    from builder.proof.checks import Level
    from builder.publishing.repository import PublishTarget
    from builder.publishing.subject import Baked, Image


EVIDENCE_TYPE = "application/vnd.spark-build.evidence.v1+json"
#: Annotation of attached evidence: ``true`` or ``false``.
PASSED = f"{LABEL_PREFIX}.passed"
#: Annotation: the levels that passed, comma-separated.
PASSED_LEVELS = f"{LABEL_PREFIX}.levels"
#: Levels that must have run before an image is published, if they have something to check.
REQUIRED: tuple[Level, ...] = ("static", "imports", "dispatch")
#: Levels that need only the image's files, so nobody's word is taken for them.
OF_FILES: tuple[Level, ...] = ("static", "imports")
_FILE_LIMIT = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An image to prove, with every digest that evidence may use for it."""

    digest: str
    digests: tuple[str, ...]
    plan_digest: str
    #: whether the plan has expected log lines
    expects: bool

    @classmethod
    def of(cls, digest: str, digests: tuple[str, ...], plan: BakedPlan) -> Claim:
        """The claim for an image with this plan."""
        return cls(
            digest=digest,
            digests=digests,
            plan_digest=plan.plan_digest,
            expects=bool(plan.expect),
        )

    @classmethod
    def of_labels(cls, image: Image) -> Claim:
        """The same without reading the plan, which says whether it has expected lines."""
        return cls(
            digest=image.digest,
            digests=image.digests,
            plan_digest=image.plan_digest,
            expects=False,
        )

    def may_be_moot(self, level: str) -> bool:
        """Whether a level may have had nothing to check; expected lines can always be checked."""
        return level != "dispatch" or not self.expects


class CheckStatement(Part, frozen=True, kw_only=True):
    """The relevant fields of a check; an unknown status is never a pass."""

    level: str = ""
    name: str = ""
    status: str = "damaged"
    seen: str = ""
    reason: str = ""
    moot: bool = False


class Statement(Part, frozen=True, kw_only=True):
    """The relevant fields of evidence."""

    digests: tuple[str, ...] = ()
    plan_digest: str = ""
    #: whether it is that of an image that was published although it was not verified
    forced: bool = False
    checks: tuple[CheckStatement, ...]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A verification report and its origin."""

    document: Mapping[str, Any]
    origin: str
    #: for attached evidence: the digest of its manifest, and when it was attached
    manifest: str = ""
    published: str = ""

    @cached_property
    def statement(self) -> Statement:
        """The parsed statement.

        Raises:
            ValueError: it is not evidence; the message says where.
        """
        return read(self.document, Statement)

    def is_of(self, claim: Claim) -> bool:
        """Whether the evidence is for this image."""
        return bool(set(self.statement.digests) & set(claim.digests))

    def lacks(self, claim: Claim, levels: Sequence[str]) -> list[str]:
        """Why it does not prove the claim; empty if it does."""
        return self.differs(claim) or self._lacks(claim, levels)

    def differs(self, claim: Claim) -> list[str]:
        """Why it is not about this image and its plan; empty if it is."""
        if not self.is_of(claim):
            named = ", ".join(self.statement.digests) or "no digest"
            return [f"{self.origin} is about {named}, not about {claim.digest}"]
        if self.statement.plan_digest != claim.plan_digest:
            return [f"{self.origin} is about plan {self.statement.plan_digest or 'of no digest'}"]
        return []

    def _lacks(self, claim: Claim, levels: Sequence[str]) -> list[str]:
        checks, reasons = self.statement.checks, self.failed()
        for level in levels:
            mine = [c for c in checks if c.level == level]
            idle = [c for c in mine if c.status == "not-run"]
            if claim.may_be_moot(level):
                idle = [c for c in idle if not c.moot]
            if not mine:
                reasons.append(f"level {level} was not run")
            reasons += [f"{level} {c.name} was not run: {c.reason}" for c in idle]
        if not any(c.status == "pass" for c in checks):
            reasons.append(f"{self.origin} has no check that passed")
        return reasons

    def failed(self) -> list[str]:
        """The checks that failed, and why."""
        return [
            f"{c.level} {c.name} failed: {c.reason or c.seen}"
            for c in self.statement.checks
            if c.status not in ("pass", "not-run")
        ]

    def proves(self, claim: Claim, levels: Sequence[str] = ()) -> bool:
        """Whether it shows that an image was verified, with these levels."""
        return not self.statement.forced and not self.lacks(claim, levels)

    def levels(self) -> list[str]:
        """Levels whose checks all passed, in the order in which they ran."""
        checks = self.statement.checks
        named = dict.fromkeys(c.level for c in checks)
        return [n for n in named if all(c.status == "pass" for c in checks if c.level == n)]

    def with_levels_of(self, other: Evidence) -> Evidence:
        """This one, which is about files, with the other levels of another."""
        checks = [*self._rows(of_files=True), *other._rows(of_files=False)]
        document = {key: value for key, value in self.document.items() if key != "verdict"}
        verdict = other.document.get("verdict")
        if isinstance(verdict, dict) and verdict.get("status") != "failed":
            document["verdict"] = verdict
        document["checks"] = checks
        document["not_run"] = sum(row["status"] == "not-run" for row in checks)
        return Evidence(document=document, origin=f"{self.origin}; other levels: {other.origin}")

    def _rows(self, *, of_files: bool) -> list[dict[str, Any]]:
        pairs = zip(self.document["checks"], self.statement.checks, strict=True)
        return [row for row, check in pairs if (check.level in OF_FILES) == of_files]

    def about(self, claim: Claim) -> bytes:
        """The document to attach: with the image's digest, and without local paths."""
        document = {**self.document, "target": claim.digest, "digests": [claim.digest]}
        if isinstance(verdict := document.get("verdict"), dict):
            document["verdict"] = {**verdict, "todo": []}  # commands about this machine's files
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def parse_evidence(data: bytes, origin: str) -> list[Evidence]:
    """Parse the output of ``verify --json`` or ``image --json``.

    Raises:
        UsageError: the text is the output of neither.
    """
    try:
        value = parse_json(data)
    except ValueError as error:
        raise UsageError(f"{origin} is not JSON: {error}") from None
    documents = value if isinstance(value, list) else [value]
    if not documents:
        raise UsageError(f"{origin} is not evidence from spark-build: it is an empty list")
    all_evidence = []
    for document in documents:
        report = document.get("verify", document) if isinstance(document, dict) else None
        evidence = Evidence(document=report or {}, origin=origin)
        try:
            evidence.statement  # noqa: B018 - read now, where its origin is known
        except ValueError as error:
            raise UsageError(
                f"{origin} is not evidence from spark-build: {error}",
                hint="spark-build verify TARGET --json >evidence.json",
            ) from None
        all_evidence.append(evidence)
    return all_evidence


def read_evidence(path: Path) -> list[Evidence]:
    """Evidence from a file.

    Raises:
        UsageError: it cannot be read, or is not evidence.
    """
    try:
        data = read_regular(path, _FILE_LIMIT)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    return parse_evidence(data, str(path))


def refuse_unproven(
    claim: Claim, reasons: Sequence[str], source: str, levels: Sequence[str]
) -> SparkBuildError:
    """The error for an unproven image (exit 5)."""
    listed = "\n  ".join(reasons[:8]) or "it was never verified"
    words = ["spark-build", "verify", source, "--level", ",".join(levels), "--json"]
    return SparkBuildError(
        f"{claim.digest} is not published, because it is not verified:\n  {listed}\n"
        f"  --force publishes it, marked as unverified",
        Exit.VERIFY_FAILED,
        hint=f"{shlex.join(words)} >evidence.json",
    )


def failed_evidence(claim: Claim, offered: Sequence[Evidence], reasons: Sequence[str]) -> Evidence:
    """The evidence attached to a forced image, with what it lacks."""
    mine = [e for e in offered if e.is_of(claim)]
    document = dict(mine[0].document) if mine else {"schema": 1, "checks": []}
    document |= {
        "plan_digest": claim.plan_digest,
        "digests": [claim.digest],
        "passed": False,
        "forced": True,
        "lacks": list(reasons) or ["it was never verified"],
    }
    document.pop("verdict", None)  # it was about what was asked for there, not about this
    return (
        replace(mine[0], document=document)
        if mine
        else Evidence(document=document, origin="--force")
    )


# ------------------------------------------------------------ the evidence to publish an image with


#: Limit of evidence's size; a few dozen checks take about 30 kB.
_ATTACHED_LIMIT = 8 << 20
#: Pieces of evidence of an image that are read; whoever may push can attach any number.
_MOST_ATTACHED = 32


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The evidence of an image, and whether it is sufficient."""

    evidence: Evidence
    verified: bool


def attached_evidence(
    repository: PublishTarget, digest: str, unread: list[str] | None = None
) -> Iterator[Evidence]:
    """Evidence attached to an image in a repository; what is none is named and skipped.

    Only what is in the manifests counts: their entries in the list, with annotations, are
    written by anybody.  ``unread`` gets the names of what may be evidence and was not read.
    """
    listed = [e for e in repository.referrers(digest) if e.artifact_type == EVIDENCE_TYPE]
    if len(listed) > _MOST_ATTACHED:
        console.warn(
            f"{repository.name}@{digest} has {len(listed)} pieces of evidence; the first "
            f"{_MOST_ATTACHED} are read"
        )
    failed = [] if unread is None else unread
    failed += [f"{repository.name}@{entry.digest}" for entry in listed[_MOST_ATTACHED:]]
    for entry in listed[:_MOST_ATTACHED]:
        where = f"{repository.name}@{entry.digest}"
        try:
            manifest = own_manifest(repository, entry.digest, digest)
            data = read_blob(repository, blobs(manifest)[1], _ATTACHED_LIMIT)
            pieces = parse_evidence(data, where)
        except (NotFound, NotAttached, UsageError, IndexError) as error:
            console.warn(f"{where} is not evidence: {error}")
            continue
        except RemoteError as error:
            console.warn(f"{where} cannot be read: {error}")
            failed.append(where)
            continue
        annotations = manifest.json().get("annotations") or {}
        for piece in pieces:
            yield replace(
                piece, manifest=entry.digest, published=str(annotations.get(CREATED) or "")
            )


@dataclass(frozen=True, kw_only=True)
class Search:
    """Where evidence comes from, and the levels that it must have."""

    #: the name of an image for ``verify``
    name: Callable[[Claim], str]
    levels: Sequence[str]
    #: repositories of the user, whose evidence is believed: those to publish to
    own: Sequence[PublishTarget]
    #: other evidence that is believed: signed by a key that the user named
    signed: Callable[[Claim], Iterable[Evidence]]
    #: runs levels now
    run: Callable[[Claim, Sequence[str]], Evidence]
    force: bool = False


def prove(claims: Sequence[Claim], offered: Sequence[Evidence], search: Search) -> dict[str, Proof]:
    """The evidence that proves each image; with ``force`` also insufficient evidence.

    Raises:
        UsageError: the given evidence is for other images.
        SparkBuildError: an image is not proven, without ``force`` (exit 5).
    """
    for evidence in offered:
        if not any(evidence.is_of(claim) for claim in claims):
            named = ", ".join(evidence.statement.digests) or "no digest"
            wanted = ", ".join(claim.digest for claim in claims)
            raise UsageError(
                f"{evidence.origin} is evidence for {named}, but the published image is {wanted}",
                hint="spark-build verify SOURCE --json >evidence.json",
            )
    return {
        claim.digest: _proof(claim, [one for one in offered if one.is_of(claim)], search)
        for claim in claims
    }


def _proof(claim: Claim, given: list[Evidence], search: Search) -> Proof:
    """What needs only files is run here, whatever evidence says of it."""
    rest = [level for level in search.levels if level not in OF_FILES]
    pool = given or (_believed(claim, search) if rest or search.force else [])
    best: Evidence | None = None
    reasons: list[str] = []
    if pool or not search.force:
        try:
            best, reasons = _proved(claim, given, pool, rest, search)
        except SparkBuildError as error:
            if not search.force:
                raise
            reasons = [f"it cannot be verified here: {error}"]
    if best is not None:
        console.say(f"  {claim.digest[:19]} is verified by {best.origin}")
        return Proof(evidence=best, verified=True)
    if not search.force:
        raise refuse_unproven(claim, reasons, search.name(claim), search.levels)
    console.warn(f"{claim.digest} is not verified: {'; '.join(reasons[:3]) or 'nothing was run'}")
    return Proof(evidence=failed_evidence(claim, pool, reasons), verified=False)


def _believed(claim: Claim, search: Search) -> list[Evidence]:
    """Evidence of the user's own repositories, and what is signed by the user's key."""
    found = []
    for repository in search.own:
        try:
            found += list(attached_evidence(repository, claim.digest))
        except RemoteError as error:  # whatever is wrong with it, the levels can be run
            console.warn(f"{repository.name}: its evidence cannot be read: {error}")
    return [*found, *search.signed(claim)]


def _proved(
    claim: Claim,
    given: Sequence[Evidence],
    pool: Sequence[Evidence],
    rest: Sequence[str],
    search: Search,
) -> tuple[Evidence | None, list[str]]:
    """The evidence for a claim, or None and what is missing."""
    files = search.run(claim, OF_FILES)
    reasons = files.lacks(claim, [level for level in search.levels if level in OF_FILES])
    if reasons or not rest:
        return (None, reasons) if reasons else (files, [])
    for evidence in pool:
        whole = files.with_levels_of(evidence)
        lacking = evidence.differs(claim) or evidence.failed()
        lacking = lacking or whole.lacks(claim, search.levels)
        if not lacking:
            return whole, []
        reasons += lacking
    if not given and not search.force:
        whole = files.with_levels_of(search.run(claim, rest))
        reasons = whole.lacks(claim, search.levels)
        return (None, reasons) if reasons else (whole, [])
    return None, list(dict.fromkeys(reasons))


# ---------------------------------------------------------------- provenance and bill of materials
#
# The bill of materials (CycloneDX 1.6) has the files that layers add, and their origin: only what
# spark-build adds; the base's publisher provides the base's own.  It is written here and not with a
# library, so that a plan gives the same bytes with any installed versions; the tests validate it
# with CycloneDX's own schema.
#
# Provenance is an in-toto statement (v1) with a SLSA predicate (v1).  It contains no time, host
# name or path of this machine: the same plan and spark-build version give the same statement.  On
# GitHub Actions it also names the workflow and its run, because there the platform is the builder;
# that part differs between runs.

# -------------------------------------------------------------------------------- bill of materials


BOM_TYPE = "application/vnd.cyclonedx+json"
SPEC_VERSION = "1.6"


def bill_of_materials(image: Image, baked: Baked) -> bytes:
    """The document as canonical JSON: the source wheels, then the files."""
    plan = baked.plan
    parts = [*_wheels(plan), *_files(plan, baked.files)]
    root = f"image:{image.digest}"
    document = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC_VERSION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        # the serial number is derived from the image: no clock, no randomness
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, image.digest)}",
        "version": 1,
        "metadata": {
            "timestamp": image.created,
            "tools": {
                "components": [
                    {"type": "application", "name": "spark-build", "version": __version__}
                ]
            },
            "component": {
                "type": "container",
                "bom-ref": root,
                "name": plan.name,
                "version": image.digest,
                "hashes": [_hash(image.digest)],
                "properties": _properties(
                    {
                        "plan": plan.plan_digest,
                        "base": plan.base.ref,
                        "base-digest": plan.base.digest,
                        "platform": plan.base.platform,
                    }
                ),
            },
        },
        "components": parts,
        "dependencies": [
            {"ref": root, "dependsOn": sorted(p["bom-ref"] for p in parts)},
            *({"ref": ref} for ref in sorted(p["bom-ref"] for p in parts)),
        ],
    }
    if not image.created:
        del document["metadata"]["timestamp"]  # type: ignore[attr-defined]
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _hash(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest.removeprefix("sha256:")}


def _properties(values: Mapping[str, object]) -> list[dict[str, str]]:
    return [{"name": f"{LABEL_PREFIX}:{k}", "value": str(v)} for k, v in values.items()]


def purl(distribution: str, version: str, filename: str = "") -> str:
    """The package URL of a release on the package index, or of sources in a repository."""
    name = f"pkg:pypi/{quote(distribution, safe='')}@{quote(version, safe='')}"
    kind = "vcs_url" if filename.startswith("git+") else "file_name"
    return f"{name}?{kind}={quote(filename, safe='')}" if filename else name


def inputs_of_layer(layer: PlannedLayer) -> list[Input]:
    """A layer's inputs: wheels, and the inputs of its compile stage."""
    stage = layer.compile.stage if layer.compile else None
    return [*layer.inputs, *(stage.inputs if stage else ())]


def toolkit_of_layer(layer: PlannedLayer) -> ToolkitImage | None:
    """The image in which a layer's change was compiled."""
    return layer.compile.stage.toolkit if layer.compile and layer.compile.stage else None


def inputs_of(plan: BakedPlan) -> Iterable[Input]:
    """Every wheel that the plan uses, once, sorted by file name."""
    seen = {
        item.filename: item
        for layer in plan.layers
        if layer.state == "needed"
        for item in inputs_of_layer(layer)
    }
    return [seen[name] for name in sorted(seen)]


def _wheels(plan: BakedPlan) -> Iterable[dict[str, Any]]:
    """Releases that provide files, with the file names if not the whole wheel."""
    taken: dict[str, set[str]] = {}
    for layer in plan.layers:
        for item in inputs_of_layer(layer):
            taken.setdefault(item.filename, set()).add(item.member or "the whole wheel")
    for item in inputs_of(plan):
        yield {
            "type": "library",
            "bom-ref": f"wheel:{item.filename}",
            "name": item.distribution,
            "version": item.version,
            "purl": purl(item.distribution, item.version, item.filename),
            "hashes": [_hash(item.sha256)],
            "properties": [
                {"name": f"{LABEL_PREFIX}:taken", "value": member}
                for member in sorted(taken[item.filename])
            ],
        }


def _files(plan: BakedPlan, baked: Mapping[str, str]) -> Iterable[dict[str, Any]]:
    """Patched files in their final form, without removed ones, and
    the files that spark-build itself adds."""
    site = plan.base.site_packages
    last: dict[str, tuple[str, str | None]] = {
        path: ("spark-build", digest) for path, digest in baked.items()
    }
    for layer in plan.layers:
        for entry in layer.files:
            last[f"{site}/{entry.path}"] = (layer.name, entry.after)
    for path, (name, digest) in sorted(last.items()):
        if digest is not None:
            yield {
                "type": "file",
                "bom-ref": f"file:{path}",
                "name": path,
                "hashes": [_hash(digest)],
                "properties": _properties({"layer": name}),
            }


# --------------------------------------------------------------------------------------- provenance


PROVENANCE_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
#: Described in docs/publishing.md, "Provenance".
BUILD_TYPE = "https://spark-build.github.io/buildtypes/plan/v1"
LOCAL_BUILDER = "https://spark-build.github.io/builders/local/v1"


def provenance(image: Image, baked: Baked) -> bytes:
    """The statement for one image, as canonical JSON; the same for every repository."""
    plan = baked.plan
    base = plan.base
    run = {"builder": _builder(baked), "metadata": _metadata(plan.plan_digest)}
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": plan.name, "digest": _digest(image.digest)}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "name": plan.name,
                    "profiles": plan.profiles,
                    "layers": [layer.name for layer in plan.layers],
                    "base": base.ref,
                    "platform": base.platform,
                    "python": base.python,
                    "site_packages": base.site_packages,
                },
                "internalParameters": {
                    "plan_digest": plan.plan_digest,
                    "states": {layer.name: layer.state for layer in plan.layers},
                    "created": image.created,
                },
                "resolvedDependencies": list(_dependencies(plan)),
            },
            "runDetails": run,
        },
    }
    return json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()


def _digest(digest: str) -> dict[str, str]:
    return {"sha256": digest.removeprefix("sha256:")}


def _dependencies(plan: BakedPlan) -> Iterable[dict[str, Any]]:
    """The base, its wheels, the wheels that layers use, the images that layers were compiled
    in, and the layers' own definitions."""
    if base_kind(plan.base.kind).is_image:
        uri = f"docker://{plan.base.ref.removeprefix('docker://')}"
        yield {"name": "base", "uri": uri, "digest": _digest(plan.base.digest)}
    for wheel in plan.base.wheels:
        yield {"name": "base", "uri": _wheel_uri(wheel.filename), "digest": _digest(wheel.sha256)}
    for item in inputs_of(plan):
        yield {
            "name": "input",
            "uri": purl(item.distribution, item.version, item.filename),
            "digest": _digest(item.sha256),
        }
    for layer in plan.layers:
        if toolkit := toolkit_of_layer(layer):
            uri = f"docker://{toolkit.image}"
            yield {"name": "toolkit", "uri": uri, "digest": _digest(toolkit.digest)}
        yield {"name": f"layer {layer.name}", "digest": _digest(layer.digest)}


def _wheel_uri(filename: str) -> str:
    distribution, version = filename.split("-")[:2]
    return purl(distribution.replace("_", "-"), version, filename)


def _builder(baked: Baked) -> dict[str, Any]:
    builder: dict[str, Any] = {
        "id": _workflow() or LOCAL_BUILDER,
        "version": {"spark-build": baked.version},
    }
    commit = source_commit() if _made_by_this(baked) else ""
    if commit:
        builder["builderDependencies"] = [{"name": "spark-build", "digest": {"gitCommit": commit}}]
    return builder


def _made_by_this(baked: Baked) -> bool:
    """Whether the image has this version and exactly its runtime files: an image may be published
    by another spark-build than the one that made it."""
    ours = {f"{SHARE}/{name}": sha256_hex(data) for name, data in programs().items()}
    return baked.version == __version__ and ours.items() <= baked.files.items()


def _workflow() -> str:
    """The current GitHub Actions workflow, or ``""``."""
    reference = os.environ.get("GITHUB_WORKFLOW_REF", "")
    if os.environ.get("GITHUB_ACTIONS") != "true" or not reference:
        return ""
    return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{reference}"


def _metadata(plan_digest: str) -> dict[str, str]:
    """The identifier of this run: the plan, or the workflow run."""
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    server, repository, run = (os.environ.get(name, "") for name in names)
    if _workflow() and repository and run:
        attempt = os.environ.get("GITHUB_RUN_ATTEMPT", "1")
        return {"invocationId": f"{server}/{repository}/actions/runs/{run}/attempts/{attempt}"}
    return {"invocationId": plan_digest}


@cache
def source_commit() -> str:
    """The commit of this checkout, or ``""`` if it is not a checkout or has changes."""
    if not in_checkout():
        return ""
    root = package_file("..").resolve()
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", "builder", "patches", "dockerfiles")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return "" if changed else commit


def _git(root: object, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


# -------------------------------------------------------------------------------------- all of them


#: The annotation of BuildKit and cosign for the predicate type of an in-toto statement.
PREDICATE_ANNOTATION = "in-toto.io/predicate-type"
CREATED = "org.opencontainers.image.created"


@dataclass(frozen=True, kw_only=True)
class EvidenceAttachment(Attachment):
    """Evidence to attach, unless the image has other evidence that is as good."""

    is_as_good: Callable[[Evidence], bool] = field(compare=False)

    def is_spared_by(self, repository: PublishTarget, subject: str) -> bool:
        """Whether an image has evidence that is as good."""
        return any(map(self.is_as_good, attached_evidence(repository, subject)))


def published_at() -> str:
    """The time now, or ``SOURCE_DATE_EPOCH``: the only timestamp of a publication (RFC 3339, UTC).

    Only the evidence has it, so image, provenance and bill of materials are reproducible.
    """
    named = settings.EPOCH.value
    seconds = int(named) if named.isdigit() else int(time.time())
    return moment(seconds)


def documents(image: Image, baked: Baked, claim: Claim, proof: Proof) -> list[Attachment]:
    """The documents that are attached to one image."""
    proven = proof.evidence.levels()
    levels = ",".join(proven)

    def is_as_good(evidence: Evidence) -> bool:
        return proof.verified and evidence.proves(claim, proven)

    return [
        EvidenceAttachment(
            artifact_type=EVIDENCE_TYPE,
            is_as_good=is_as_good,
            data=proof.evidence.about(claim),
            annotations={
                CREATED: published_at(),
                PASSED: "true" if proof.verified else "false",
                PASSED_LEVELS: levels,
            },
        ),
        Attachment(
            artifact_type=PROVENANCE_TYPE,
            data=provenance(image, baked),
            annotations={PREDICATE_ANNOTATION: PREDICATE_TYPE},
        ),
        Attachment(artifact_type=BOM_TYPE, data=bill_of_materials(image, baked)),
    ]
