"""Level ``dispatch``: the kernels that the target's own vLLM selects for SM121.

The log lines come from vLLM itself.  The evidence lists the simulated parts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from builder.applier.receipts import receipts_of
from builder.common.document import read
from builder.probes.dispatch_expect import asks, describe, found, headline, limit
from builder.proof.checks import Check
from builder.proof.imports import PACKAGES
from builder.proof.replies import Ask, DispatchRequest, MalformedReply, cached, machine_cause
from builder.proof.target import DoubtingRunner, Refusal
from builder.proof.variables import is_read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.common.plan import ExpectedChoice, PlanDocument
    from builder.probes.dispatch_expect import Answer, Failure
    from builder.proof.replies import DispatchReply
    from builder.proof.target import VerifyTarget


TOO_FEW = "the probe's answer is malformed: it has too few answers"


def own_settings(target: VerifyTarget) -> dict[str, str | None]:
    """The plan's variables with the target's values, and its others that the packages may read.

    None stands for a missing one.  For a target without layers, the plan's values are used.
    """
    patched = bool(receipts_of(target.tree))
    names = target.plan.env
    planned = {name: target.env.get(name) for name in names if patched or name in target.env}
    return {**{k: v for k, v in target.env.items() if is_read(k)}, **planned}


def make_request(plan: PlanDocument, env: Mapping[str, str | None]) -> DispatchRequest:
    """The request for the probe: each expectation with the plan's settings, then without.

    ``env`` has the target's own variables, which take precedence, so that a changed setting shows.
    """
    flags = (*plan.serve_flags, *plan.moe_serve_flags)
    unset = dict.fromkeys(plan.env)
    without = (Ask(kind=e.kind, env=unset) for e in plan.expect)
    chosen = read(asks(plan.expect, flags), tuple[Ask, ...])
    return DispatchRequest(env={**plan.env, **env}, ask=(*chosen, *without))


def check_dispatch(target: VerifyTarget) -> Iterator[Check]:
    """One check for each expected line of the profile."""
    expectations = target.plan.expect
    if not expectations:
        reason = "no profile was named, so no log line is expected"
        yield replace(_not_run("dispatch", "a line", reason), moot=True)
        return
    try:
        request = make_request(target.plan, own_settings(target))
        checks = _checks(target, expectations, target.runner.dispatch(request))
        failed = any(check.status == "fail" for check in checks)
        if failed and isinstance(target.runner, DoubtingRunner):
            again = target.runner.doubt(request)
            checks = checks if again is None else _checks(target, expectations, again)
    except (IndexError, MalformedReply) as error:  # the target's code wrote it
        message = str(error) if isinstance(error, MalformedReply) else TOO_FEW
        for expectation in expectations:
            yield Check(
                level="dispatch",
                name=expectation.kind,
                status="fail",
                expected=describe(expectation),
                seen=message,
                where=f"importing vllm in {target.name}",
            )
        return
    yield from checks


def _checks(
    target: VerifyTarget, expectations: Sequence[ExpectedChoice], reply: DispatchReply | Refusal
) -> list[Check]:
    if isinstance(reply, Refusal):
        return [_not_run(one.kind, describe(one), str(reply)) for one in expectations]
    return list(_judged(target, expectations, reply))


def _judged(
    target: VerifyTarget, expectations: Sequence[ExpectedChoice], reply: DispatchReply
) -> Iterator[Check]:
    for number, expectation in enumerate(expectations):
        if cause := machine_cause(reply.fatal):
            yield _not_run(expectation.kind, describe(expectation), cause)
        elif reply.fatal:
            yield Check(
                level="dispatch",
                name=expectation.kind,
                status="fail",
                expected=describe(expectation),
                seen=str(reply.fatal),
                where=f"importing vllm in {target.name}",
                simulated=reply.simulated,
            )
        else:
            answer, default = reply.answers[number], reply.answers[len(expectations) + number]
            yield _compare(target, expectation, answer, default, reply)


def lacking(target: VerifyTarget, error: Failure | None, *also: str) -> str | None:
    """The third-party module that the sandbox lacks, so that vLLM could not be queried.

    In an image the same error is a failure of vLLM, and a missing module of a patched package,
    or of ``also``, is always a failure.
    """
    if target.subject.in_engine or error is None or error.type != "ModuleNotFoundError":
        return None
    named = re.search(r"No module named '([\w.]+)'", error.message)
    if not named:
        return None
    return None if named[1].split(".", 1)[0] in (*PACKAGES, *also) else named[1]


def _compare(
    target: VerifyTarget,
    expectation: ExpectedChoice,
    answer: Answer,
    default: Answer,
    reply: DispatchReply,
) -> Check:
    wanted = describe(expectation)
    missing = lacking(target, answer.error)
    if missing is not None:
        return _not_run(expectation.kind, wanted, f"the sandbox lacks the module {missing}")
    if cause := machine_cause(answer.error):
        return _not_run(expectation.kind, wanted, cause)
    if answer.not_applicable:
        return _not_run(expectation.kind, wanted, headline(answer))
    met = found(expectation, answer)
    return Check(
        level="dispatch",
        name=expectation.kind,
        status="fail" if met is None else "pass",
        expected=wanted,
        seen=headline(answer) if met is None else met,
        where=f"log of vllm in {target.name}{cached(reply.kept)}",
        reason=_why(answer, default) if met is None else f"without these settings: {_of(default)}",
        simulated=reply.simulated,
        refusal="" if met is None else limit(expectation, met),
    )


def _why(answer: Answer, default: Answer) -> str:
    if answer.selected:
        return f"selected instead: {answer.selected}"
    return f"the choice was refused; without these settings it is: {_of(default)}"


def _of(answer: Answer) -> str:
    """vLLM's selection by default."""
    return answer.selected or headline(answer)


def _not_run(name: str, expected: str, reason: str) -> Check:
    return Check(
        level="dispatch", name=name, status="not-run", expected=expected, seen="", reason=reason
    )
