"""Level ``dispatch``: the target's own vLLM, told that the device is SM121, selects what it must.

The log lines are vLLM's own.  Which parts were simulated stands in the evidence.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

from builder.errors import SparkBuildError
from builder.verify import Check
from builder.verify.imports import PACKAGES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.verify import VerifyTarget


def flag_value(flags: Sequence[str], name: str) -> str:
    """The value of a ``vllm serve`` flag, or ``auto``."""
    for flag, value in itertools.pairwise(flags):
        if flag == name:
            return value
    return "auto"


def make_request(plan: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """What the probe is asked: each expectation with the plan's settings, then without any.

    ``env`` holds what the target itself sets, which wins: a changed setting must show.
    """
    flags = [*plan["serve_flags"], *plan["moe_serve_flags"]]
    unset = dict.fromkeys(plan["env"])
    asks: list[dict[str, Any]] = []
    for expectation in plan["expect"]:
        kind = expectation["kind"]
        setting = "moe_backend" if kind.endswith("-moe") else "linear_backend"
        value = flag_value(flags, f"--{setting.replace('_', '-')}")
        asks.append({"kind": kind, setting: value})
    asks += [{"kind": e["kind"], "env": unset} for e in plan["expect"]]
    return {"env": {**plan["env"], **env}, "ask": asks}


def check_dispatch(target: VerifyTarget) -> Iterator[Check]:
    """One check for each line that the profile expects."""
    expectations = target.plan["expect"]
    if not expectations:
        yield _not_run("dispatch", "a line", "no profile was named, so no line is expected")
        return
    if target.ask is None:
        for expectation in expectations:
            yield _not_run(expectation["kind"], expectation["line"], target.cannot_ask)
        return
    try:
        own = {name: target.env[name] for name in target.plan["env"] if name in target.env}
        result = target.ask(make_request(target.plan, own))
    except SparkBuildError as error:
        for expectation in expectations:
            yield _not_run(expectation["kind"], expectation["line"], str(error))
        return
    fatal = result.get("fatal")
    simulated = tuple(result.get("simulated", ()))
    for number, expectation in enumerate(expectations):
        if fatal:
            yield Check(
                level="dispatch",
                name=expectation["kind"],
                status="fail",
                expected=expectation["line"],
                seen=f"{fatal['type']}: {fatal['message']}",
                where=f"importing vllm in {target.name}",
                simulated=simulated,
            )
        else:
            answers = result["answers"]
            default = answers[len(expectations) + number]
            yield _compare(target, expectation, answers[number], default, simulated)


def _lacking(target: VerifyTarget, answer: Mapping[str, Any]) -> str | None:
    """The third-party module that a sandbox lacks, so that vLLM could not be asked at all.

    In an image the same error is vLLM's own failure, and a missing module of a patched package is
    one everywhere.
    """
    error = answer.get("error") or {}
    found = re.search(r"No module named '([\w.]+)'", str(error.get("message", "")))
    if target.kind == "image" or error.get("type") != "ModuleNotFoundError" or not found:
        return None
    return None if found[1].split(".", 1)[0] in PACKAGES else found[1]


def _compare(
    target: VerifyTarget,
    expectation: Mapping[str, str],
    answer: Mapping[str, Any],
    default: Mapping[str, Any],
    simulated: tuple[str, ...],
) -> Check:
    wanted = expectation["line"]
    lacking = _lacking(target, answer)
    if lacking is not None:
        return _not_run(expectation["kind"], wanted, f"the sandbox lacks the module {lacking}")
    error = answer.get("error")
    line = next((text for text in answer["lines"] if wanted in text), None)
    good = line is not None and error is None
    seen = _headline(answer)
    return Check(
        level="dispatch",
        name=expectation["kind"],
        status="pass" if good else "fail",
        expected=wanted,
        seen=(line or seen) if good else seen,
        where=f"log of vllm in {target.name}",
        reason=f"without these settings: {_default(default)}" if good else _why(answer, default),
        simulated=simulated,
    )


def _why(answer: Mapping[str, Any], default: Mapping[str, Any]) -> str:
    if answer.get("selected"):
        return f"selected instead: {answer['selected']}"
    return f"the choice was refused; without these settings it is: {_default(default)}"


def _default(answer: Mapping[str, Any]) -> str:
    """What vLLM selects when nothing is set."""
    return str(answer.get("selected") or _headline(answer))


def _headline(answer: Mapping[str, Any]) -> str:
    """The line or error that says what vLLM did."""
    if answer.get("error"):
        words = " ".join(str(answer["error"]["message"]).split())
        shown = words if len(words) < 400 else f"{words[:400]}..."
        return f"{answer['error']['type']}: {shown}"
    telling = [text for text in answer["lines"] if text.startswith(("Using ", "Selected "))]
    return telling[-1] if telling else f"no such line; selected {answer.get('selected')}"


def _not_run(name: str, expected: str, reason: str) -> Check:
    return Check(
        level="dispatch", name=name, status="not-run", expected=expected, seen="", reason=reason
    )
