"""Prints plans, reports, and pull requests."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

from builder.applier.states import (
    AMBIGUOUS,
    DRIFT,
    NEEDS_REBUILD,
    NOT_APPLICABLE,
)
from builder.common.console import console, counted, tell
from builder.common.plan import PinnedPull, read_pin
from builder.probes.dispatch_expect import describe
from builder.ptx.coverage import spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.applier.layers import Layer
    from builder.common.plan import (
        BuildPlan,
        Conflict,
        LayerDecision,
        Pin,
        PullReport,
        StageRequest,
    )
    from builder.proof.checks import Check, Necessity
    from builder.proof.report import Report, Verdict


_STATE_STYLE = {
    "needed": "yellow",
    "applied": "green",
    "upstream": "blue",
    "not-applicable": "dim",
    "needs-rebuild": "red",
    "drift": "red",
    "ambiguous": "red",
}
_MARK = {"pass": ("PASS", "green"), "fail": ("FAIL", "red"), "not-run": ("NOT RUN", "yellow")}


def show_plan(plan: BuildPlan, *, elsewhere: bool = False) -> None:
    """Print a plan as a table; ``elsewhere`` means that another machine compiles."""
    base = plan.base
    console.say(console.style(_wrapped(verdict_of_plan(plan), ""), "bold"))
    console.say("")
    listed = ", ".join(f"{name} {version}" for name, version in sorted(base.packages.items()))
    console.say(f"base  {base.ref}  ({base.platform.oci}, {base.digest[:19]})")
    console.say(console.style(_wrapped(listed, " " * 6), "dim"))
    console.say("")
    for decision in plan.decisions:
        _show_decision(decision, elsewhere=elsewhere)
    console.say("")
    if plan.pulls:
        show_pulls(plan.pulls)
    for name, value in plan.env.items():
        console.say(f"  env    {name}={value}")
    if plan.serve_flags:
        console.say(f"  serve  vllm serve MODEL {' '.join(plan.serve_flags)}")
    if plan.moe_serve_flags:
        console.say(f"  serve  for MoE models it supports: {' '.join(plan.moe_serve_flags)}")
    for expectation in plan.expect:
        console.say(f"  expect {expectation.kind}: {describe(expectation)}")
    for hint in plan.hints:
        if "needs no patch for" not in hint:  # the first line says so
            console.say(f"  hint   {hint}")
    console.say(f"\nplan  {plan.digest}")


def _show_decision(decision: LayerDecision, *, elsewhere: bool) -> None:
    """Print a layer's state and notes."""
    state = decision.outcome.state
    since = f" (since {decision.outcome.since})" if decision.outcome.since else ""
    first = f"  {state:<15}{decision.name:<29}"
    lines = _wrapped(f"{decision.outcome.reason}{since}", " " * len(first)).lstrip(" ")
    word = console.style(f"{state:<15}", _STATE_STYLE[state])
    console.say(f"  {word}{decision.name:<29}{lines}")
    if decision.needed:
        for note in decision.outcome.notes:
            console.say(console.style(_note(f"note: {note}"), "dim"))
    if decision.stage:
        show_stage(decision.stage, elsewhere=elsewhere)


def show_stage(stage: StageRequest, *, elsewhere: bool = False) -> None:
    """Print a pending compile stage: its sources, compiler and cost."""
    from builder.compile.costs import cost_of_units
    from builder.compile.host import of_wheels

    paths = [unit.path for unit in stage.units]
    source = stage.inputs[0].filename
    wheels = " of released wheels" if of_wheels(stage.inputs) else ""
    nvcc = f"nvcc {stage.compilers['nvcc']}{wheels}"
    if stage.toolkit:
        nvcc += f" of {stage.toolkit.image} ({stage.toolkit.digest[:19]})"
    cost = cost_of_units(paths, jobs=1 if elsewhere else None)
    line = f"compile: of {source}, with {nvcc}: {cost}"
    console.say(console.style(_note(line), "dim"))
    for path in paths:
        console.say(console.style(f"{'':<21}{path}", "dim"))


def verdict_of_plan(plan: BuildPlan) -> str:
    """What a plan comes to: whether the base needs a patch, and how to serve it."""
    names = ", ".join(plan.profiles) or plan.name
    states = {decision.outcome.state for decision in plan.decisions}
    changing = [d for d in plan.needed if d.outcome.changes or d.outcome.pending]
    if states & {DRIFT, AMBIGUOUS}:
        sentence = (
            f"cannot be patched for {names}: {_in_states(plan, DRIFT, AMBIGUOUS)} does not fit"
        )
    elif NEEDS_REBUILD in states:
        sentence = f"lacks compiled code for {names}: {_in_states(plan, NEEDS_REBUILD)}"
    elif changing:
        sentence = f"{_patched(plan, changing, names)}{_how_to_serve(plan)}"
    elif plan.needed:
        sentence = f"needs no patch for {names}, only settings{_how_to_serve(plan)}"
    elif states <= {NOT_APPLICABLE}:
        sentence = f"has nothing that {names} would change"
    else:
        sentence = f"already has {names}{_how_to_serve(plan)}"
    return f"vLLM {plan.base.packages.get('vllm', '?')} {sentence}."


def _in_states(plan: BuildPlan, *states: str) -> str:
    return ", ".join(d.name for d in plan.decisions if d.outcome.state in states)


def _patched(plan: BuildPlan, changing: list[LayerDecision], names: str) -> str:
    """The layers that change files, and the others."""
    others = len(plan.needed) - len(changing)
    also = f", {others} {'sets' if others == 1 else 'set'} variables only" if others else ""
    layers, one = counted(len(changing), "layer"), len(changing) == 1
    if all(decision.name in plan.fixes for decision in changing):
        verb = "fixes" if one else "fix"
        what = f"no patch to select the kernels of {names}; {layers} {verb} defects of them"
    else:
        what = f"a patch for {names}: {layers} {'changes' if one else 'change'} files"
    return f"needs {what}{also}"


def _how_to_serve(plan: BuildPlan) -> str:
    flags, moe = " ".join(plan.serve_flags), " ".join(plan.moe_serve_flags)
    if not flags and not moe:
        return ""
    both = f"{flags}, and for MoE models that it supports {moe}"
    return f"; serve with {flags if not moe else both if flags else f'{moe} for MoE models'}"


def _note(text: str) -> str:
    """A note below its layer."""
    return _wrapped(text, " " * 19, " " * 21)


def _wrapped(text: str, indent: str, below: str | None = None) -> str:
    """A text wrapped to the terminal, its lines indented."""
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    return textwrap.fill(
        text,
        max(width, len(indent) + 40),
        initial_indent=indent,
        subsequent_indent=indent if below is None else below,
        break_on_hyphens=False,  # names of images and files have them
        break_long_words=False,  # paths and variables are copied
    )


class CheckLines:
    """Prints checks on stderr as they finish; passes of a level share a line, unless ``--verbose``.

    Every check of ``dispatch`` is shown, because vLLM's selection is the main result.
    """

    def __init__(self) -> None:
        self._level, self._passed = "", 0
        self._reason = ""

    def __call__(self, check: Check) -> None:
        self._level = check.level
        if check.status == "pass" and check.level != "dispatch" and not console.verbose:
            self._passed += 1
        else:
            _show_check(check, again=check.reason == self._reason)
        self._reason = check.reason if check.status == "not-run" else ""

    def end(self) -> None:
        """End a level."""
        if self._passed:
            word, style = _MARK["pass"]
            count = f"{self._passed} check{'s' if self._passed > 1 else ''}"
            console.say(f"  {console.style(f'{word:<8}', style)}{self._level:<9}{count}")
        self._passed = 0


def _show_check(check: Check, *, again: bool = False) -> None:
    """Print a check; ``again`` means that the previous one did not run for the same reason."""
    if check.refusal:
        console.say(f"  {console.style('expected refusal', 'blue')} {check.level} {check.name}")
        console.say(console.style(f"  {'':<17}{check.refusal}", "dim"))
        console.say(console.style(f"  {'':<17}{check.reason}", "dim"))
        return
    word, style = _MARK[check.status]
    console.say(f"  {console.style(f'{word:<8}', style)}{check.level:<9}{check.name}")
    if check.status == "pass":
        console.say(console.style(f"  {'':<17}{check.seen}", "dim"))
        if check.reason:
            console.say(console.style(f"  {'':<17}{check.reason}", "dim"))
        _show_unreached(check)
        return
    console.say(f"  {'':<17}expected: {check.expected}")
    if check.seen:
        console.say(f"  {'':<17}seen:     {check.seen}")
    if check.reason:
        console.say(f"  {'':<17}reason:   {'the same' if again else check.reason}")
    _show_unreached(check)


def _show_unreached(check: Check) -> None:
    """With ``--verbose``, the lines of which the check says nothing."""
    if check.unreached and console.verbose:
        lines = ", ".join(spans(check.unreached))
        console.say(console.style(f"  {'':<17}not reached: {lines}", "dim"))


#: The most important simulated parts; ``--verbose`` and the evidence list all.
_MAIN_PARTS = ("device", "torch 2", "model")


def show_report(report: Report) -> None:
    """Print a report's summary on stderr, after its checks."""
    if report.necessity is not None:
        _show_necessity(report.necessity)
    parts = {text for check in report.checks for text in check.simulated}
    if parts:
        console.say("  simulated:")
        main = [part for part in sorted(parts) if part.startswith(_MAIN_PARTS)]
        shown = sorted(parts) if console.verbose else main
        for part in shown:
            console.say(console.style(f"    {part}", "dim"))
        if more := len(parts) - len(shown):
            console.say(
                console.style(f"    and {counted(more, 'part')} of vLLM and torch: -v", "dim")
            )
    console.say(f"  {', '.join(report.counts())}")
    if report.cached is not None:
        console.say(
            f"  from the cache: ran on the same content on {report.cached}; again: --refresh"
        )


def show_verdict(verdict: Verdict, name: str = "") -> None:
    """Print the verdict on stderr: what is proven of ``name``, the limits, and the next step.

    Missing proof is also printed in quiet mode; failures are a separate error.
    """
    about = f"{name}: " if name else ""
    say = console.warn if verdict.status == "not-proven" else console.say
    say(f"{about}{verdict.sentence}")
    for limit in verdict.limits:
        console.say(f"  limit  {limit.partition(': ')[0]}")
    for command in verdict.todo:
        console.say(f"  try    {command}")
    if verdict.status != "proven":
        return
    for what, line in zip(("serve", "MoE  "), verdict.serve, strict=False):
        console.say(f"  {what}  {line}")


_VERDICT = {
    True: ("NECESSARY", "green"),
    False: ("NOT NECESSARY", "blue"),
    "unknown": ("UNKNOWN", "yellow"),
}


def _show_necessity(verdicts: list[Necessity]) -> None:
    """Print the result of the target without each layer."""
    console.say("  each layer removed in turn:")
    for verdict in verdicts:
        word, style = _VERDICT[verdict.necessary]
        console.say(f"  {console.style(f'{word:<15}', style)}{verdict.layer}")
        if not verdict.check:
            console.say(console.style(f"  {'':<15}{verdict.reason}", "dim"))
            continue
        console.say(f"  {'':<15}{verdict.level} {verdict.check} fails without it")
        console.say(console.style(f"  {'':<15}expected: {verdict.expected}", "dim"))
        console.say(console.style(f"  {'':<15}seen:     {verdict.seen}", "dim"))


# ----------------------------------------------------------------------------------- pull requests

#: Conflicts and file names to print; more are only counted.
_SHOWN = 4
_STYLE = {"open": "yellow", "merged": "green", "closed": "red"}


def show_pulls(reports: Sequence[PullReport]) -> None:
    """Print a report on each pull request of a plan."""
    for report in reports:
        console.say(f"  {report.request}  {state_of(report)}  {report.short}")
        if report.title:
            console.say(f"    {report.title}")
        for line in _lines(report):
            console.say(f"    {console.style(line, 'dim')}")
        for conflict in report.conflicts[:_SHOWN]:
            _show_conflict(report.request, conflict)
        if len(report.conflicts) > _SHOWN:
            console.say(f"    and {len(report.conflicts) - _SHOWN} more hunks that do not fit")
        console.say("")


def state_of(pin: Pin) -> str:
    """``open``, ``closed``, ``merged 2026-05-20, in 0.22.0``; ``""`` for a single commit."""
    text = pin.state if pin.number else "commit"
    if pin.merged_at and pin.state == "merged":
        text += f" {pin.merged_at}"
    if pin.release:
        text += f", in release {pin.release}"
    if pin.superseded_by:
        text += f", superseded by {pin.superseded_by}"
    return console.style(text, _STYLE[pin.state]) if pin.state in _STYLE else text


def _lines(report: PullReport) -> list[str]:
    files = report.installed
    hunks = [hunk for file in files for hunk in file.hunks]
    lines = []
    if files:
        parts = [f"{len(files)} installed file{'s' if len(files) != 1 else ''}"]
        parts.append(f"{len(hunks)} hunk{'s' if len(hunks) != 1 else ''}: {_counted(hunks)}")
        parts.append(
            {"whole": "in the base already", "part": "in the base in part"}.get(
                report.in_base, "not in the base"
            )
        )
        lines.append("; ".join(parts))
    moved = [f"{f.path} {offset:+d}" for f in files for offset in f.offsets if offset]
    if moved:
        lines.append(f"offsets: {_listed(moved)}")
    if report.compiled:
        lines.append(f"compiled: {_listed(report.compiled)}")
    if report.dropped:
        dropped = [f"{row.path} ({row.why})" for row in report.dropped]
        lines.append(f"dropped: {_listed(dropped)}")
    return lines


_WORDS = {"pre": "to apply", "post": "already there", "drift": "do not fit", "ambiguous": "unclear"}


def _counted(hunks: Sequence[str]) -> str:
    kinds = [kind for kind in _WORDS if kind in hunks]
    return ", ".join(f"{hunks.count(kind)} {_WORDS[kind]}" for kind in kinds)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _show_conflict(request: str, conflict: Conflict) -> None:
    where = f"{conflict.path}, hunk {conflict.hunk}"
    if conflict.line:
        where += f" (line {conflict.line} in the diff"
        where += f", {conflict.found_line} here)" if conflict.found_line else ")"
    console.say(f"    {console.style(where, 'red')}: {conflict.why}")
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 160)) - 6
    if conflict.expected:
        column = (width - 3) // 2
        heads = f"{f'expected by {request}'[:column]:<{column}}   found in the base"
        console.say(f"      {console.style(heads, 'bold')}")
        from builder.common.columns import side_by_side

        for row in side_by_side(conflict.expected, conflict.found, width):
            console.say(f"      {row}".rstrip())
    if conflict.history:
        console.say(f"    {conflict.history}")


def pulls_of(layer: Layer, *, refresh: bool) -> tuple[PinnedPull, ...]:
    """The pins of a layer; with ``refresh``, each with its current state on the forge.

    Raises:
        RemoteError: the forge does not answer.
    """
    from builder.common.forge import Forges, PullStore, parse_pull

    store = PullStore(Forges())
    rows = []
    for row in layer.pins.pull:
        pin = read_pin(row, layer.name)
        today = store.resolve(parse_pull(pin.request)) if refresh else None
        rows.append(PinnedPull(pinned=pin, today=today))
    return tuple(rows)


def print_pulls(rows: Sequence[PinnedPull]) -> None:
    """Print pins as text."""
    for row in rows:
        pin, today = row.pinned, row.today
        tell(f"\n  pull {pin.request}: {state_of(pin)}")
        tell(f"    pinned     {pin.commit}, {pin.date}")
        tell(f"    diff       sha256 {pin.sha256}, {pin.size} bytes")
        if today is None:
            continue
        head = "as pinned" if today.commit == pin.commit else f"moved to {today.commit}"
        tell(f"    today      {state_of(today)}, {head}")
