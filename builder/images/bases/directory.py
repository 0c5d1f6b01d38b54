"""A base that is a site-packages directory: ``dir:/path/to/site-packages`` or a virtual env."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from builder.applier.receipts import env_of, originals
from builder.applier.states import Target
from builder.applier.store import unfinished
from builder.applier.trees import DirTree, versions
from builder.applier.values import canonical_json, sha256_hex
from builder.common.plan import BaseIdentity, Platform
from builder.errors import Exit, SparkBuildError, UsageError
from builder.images.subject import Subject

if TYPE_CHECKING:
    from builder.images.subject import BaseRequest


def find_site_packages(path: Path) -> Path:
    """The directory that holds vLLM: the path itself, or the site-packages of a virtual env.

    Raises:
        UsageError: there is no vLLM there.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory")
    candidates = [path, *sorted(path.glob("lib/python3*/*-packages"))]
    for candidate in candidates:
        if any(candidate.glob("vllm-*.dist-info/METADATA")):
            return candidate.resolve()
    raise UsageError(
        f"{path} has no vllm (no vllm-*.dist-info in it or in its lib/python3*/site-packages)",
        hint="give the parent of what this prints: python -c 'import vllm; print(vllm.__path__)'",
    )


def _refuse_unfinished(root: Path) -> None:
    """Refuse a directory whose files are half changed: every layer in it would be said to drift.

    Raises:
        SparkBuildError: an apply or a revert was interrupted there, or is running.
    """
    what = unfinished(root)
    if not what:
        return
    which, does = ("an apply", "rolls it back") if what == "apply" else ("a revert", "completes it")
    raise SparkBuildError(
        f"{root}: {which} was interrupted, or still runs, so its files are neither as before nor "
        f"as after; revert {does}",
        Exit.DRIFT,
        hint=f"spark-build revert {shlex.quote(str(root))}",
    )


def _platform(root: Path, request: BaseRequest) -> Platform:
    here = Target.here()
    versions = re.findall(r"python(3\.\d+)", str(root))
    python = request.python or (versions[-1] if versions else here.python)
    return Platform.parse(request.platform or here.platform, python)


def identify_dir(request: BaseRequest, text: str) -> Subject:
    """Identify an installed environment by the RECORD of each tracked distribution.

    The RECORD from before spark-build's layers is used.

    Raises:
        UsageError: the directory does not hold vLLM.
    """
    root = find_site_packages(Path(text).expanduser())
    _refuse_unfinished(root)
    tree = DirTree(root)
    before = originals(tree)
    records = {
        dist.name: [dist.version, before.get(record) or tree.digest(record)]
        for dist in tree.distributions().values()
        if dist.name in request.tracked and (record := f"{dist.info_dir}/RECORD")
    }
    packages = {name: version for name, version in versions(tree).items() if name in records}
    identity = BaseIdentity(
        kind="dir",
        ref=f"dir:{root}",
        digest=f"sha256:{sha256_hex(canonical_json(records))}",
        platform=_platform(root, request),
        site_packages=str(root),
        packages=packages,
        env=env_of(tree),
    )
    return Subject(identity, tree)
