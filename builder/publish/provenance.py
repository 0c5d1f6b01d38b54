"""Provenance of an image: an in-toto statement (v1) with a SLSA predicate (v1).

It contains no time, host name or path of this machine: the same plan and spark-build version
give the same statement.  On GitHub Actions it also names the workflow and its run, because there
the platform is the builder; that part differs between runs.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from typing import TYPE_CHECKING, Any

from builder import __version__
from builder.applier.digests import sha256_hex
from builder.engines.metadata import SHARE
from builder.engines.toolfiles import programs
from builder.model.base import base_kind
from builder.publish.sbom import inputs_of, purl, toolkit_of_layer
from builder.util.paths import in_checkout, package_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.documents.plan import BakedPlan
    from builder.publish.baked import Baked
    from builder.publish.subject import Image

MEDIA_TYPE = "application/vnd.in-toto+json"
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
