"""The levels that run on a GPU: the checks of the in-image verifier."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from msgspec.structs import replace

from builder.common.reference import Ref
from builder.images.engines.devicedata import device_data
from builder.proof.checks import Check
from builder.proof.target import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.proof.checks import Level
    from builder.proof.target import VerifyTarget


def check_on_gpu(target: VerifyTarget, level: Level) -> Iterator[Check]:
    """The checks of one level, from the verifier."""
    ref = Ref(target.name)
    image = target.subject.image
    runs_as = image.runs_as if image is not None else ""
    name = runs_as or (ref.place if ref.has_name else "IMAGE")
    command = device_data(target.plan, name).command
    document = target.runner.on_gpu(target.plan, level)
    if isinstance(document, Refusal):
        yield _not_run(level, f"{document.reason}; on the Spark: {command}")
        return
    reported = document.checks
    if other := [check for check in reported if check.level != level]:
        problem = f"check {other[0].name!r} is of level {other[0].level}"
        yield _not_run(level, f"the verifier's document is malformed: {problem}")
        return
    checks = [replace(check, reason=_root(check)) for check in reported]
    if not checks:
        yield _not_run(
            level, "the verifier had nothing to check: no profile names expected results"
        )
    yield from checks


def _root(check: Check) -> str:
    """A failed server's log after its root cause according to ``spark-build diagnose``."""
    reason = check.reason
    if check.status != "fail" or check.level != "serve" or "\n" not in reason:
        return reason
    from builder.diagnose.verdict import diagnose

    errors = [f for f in diagnose(io.BytesIO(reason.encode())).findings if f.severity == "error"]
    if not errors:
        return reason
    first = errors[0]
    frame = f" ({first.frame})" if first.frame else ""
    told = f"{first.quote}{frame}: {first.message} {first.fix}"
    return "\n".join([told, *reason.splitlines()[-20:]])


def _not_run(level: Level, reason: str) -> Check:
    what = "the expected kernels on a GPU" if level == "device" else "vllm serve on a GPU"
    return Check(
        level=level, name=what, status="not-run", expected="a GB10", seen="", reason=reason
    )
