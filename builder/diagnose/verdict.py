"""Logs of several ranks or nodes: the first failure, and those that follow from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace
from packaging.version import InvalidVersion, Version

from builder.diagnose.catalog import SEVERITIES, Entry, Severity, load_catalog, rendered
from builder.diagnose.lines import Reader
from builder.diagnose.scan import Hit, Scan, scan
from builder.diagnose.servers import COVERED, ENGINE_NAMES
from builder.errors import UsageError
from builder.util.documents import Count, Part, Text, always

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

    from builder.diagnose.failures import Failure
    from builder.diagnose.scan import Selection

#: The ID of a failure without an entry.
UNKNOWN = "not-in-catalogue"


class Finding(Part, frozen=True):
    """One finding, its log line, and the fix."""

    id: Text
    severity: Severity
    line: Count
    message: Text
    fix: str
    file: Annotated[str, Meta(description="the log it is in; empty for a single one")] = always("")
    quote: Annotated[str, Meta(description="the line itself")] = always("")
    sure: Annotated[
        str,
        Meta(
            description="how certain the cause is: certain, likely, reported; empty if not in "
            "the catalogue"
        ),
    ] = always("")
    link: Annotated[str, Meta(description="where the cause or fix was published")] = always("")
    before: Annotated[str, Meta(description="the relevant line before it")] = always("")
    before_line: Count = always(0)
    frame: Annotated[str, Meta(description="the innermost relevant frame")] = always("")
    search: Annotated[str, Meta(description="what to put into a search field")] = always("")
    process: Annotated[str, Meta(description="which process or rank wrote it")] = always("")
    became: Annotated[
        tuple[str, ...], Meta(description="the exceptions that were raised from it")
    ] = always(())
    more: Annotated[tuple[str, ...], Meta(description="further lines of the message")] = always(())
    when: Annotated[str, Meta(description="MM-DD HH:MM:SS, if the log has it")] = always("")
    follows: Annotated[bool, Meta(description="only a consequence of another process's exit")] = (
        always(False)
    )


class Verdict(Part, frozen=True):
    """The summary of a log, in one sentence."""

    state: Literal["failed", "ready", "stopped", "unclear", "empty"]
    sentence: Text


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The diagnosis of a log.  ``vllm`` is empty if unknown."""

    vllm: str
    tensorrt_llm: str
    #: every vLLM release that the log names, more than one after an upgrade in place
    releases: tuple[str, ...]
    lines: int
    dispatch: tuple[Selection, ...]
    findings: tuple[Finding, ...]
    verdict: Verdict
    #: the program that wrote it; empty if unknown
    engine: str = ""
    #: the version of a build that is not a release (``0.1.dev1+gabc``)
    build: str = ""
    #: the line where the server became ready, or 0
    ready: int = 0
    file: str = ""
    #: whether anything in it is as in the log of a server
    is_log: bool = True

    @property
    def failed(self) -> bool:
        """Whether it shows a failure or an incomplete start."""
        return self.verdict.state in ("failed", "stopped")

    def in_file(self, name: str) -> Diagnosis:
        """The same, for one of several logs."""
        named = tuple(replace(finding, file=name) for finding in self.findings)
        return dataclasses.replace(self, file=name, findings=named)


#: Failures outside the catalogue to show for one log.
_SHOWN = 3
#: The first plausible vLLM version; a build without tags has version 0.1.dev.
_OLDEST = Version("0.5")


def diagnose(
    stream: BinaryIO,
    vllm: str | None = None,
    catalog: Sequence[Entry] | None = None,
    *,
    read: Scan | None = None,
    live: bool = False,
) -> Diagnosis:
    """Read a log; ``vllm`` is the release and overrides the log's.

    ``read`` is filled during reading; ``live`` means that the log still grows.

    Raises:
        UsageError: ``vllm`` is not a version, or an entry of the catalogue is malformed.
    """
    given = given_release(vllm)
    entries = load_catalog() if catalog is None else catalog
    return judged(scan(Reader(stream, live=live), entries, read), entries, given)


def given_release(vllm: str | None) -> str | None:
    """``--vllm`` as a version.

    Raises:
        UsageError: it is malformed.
    """
    if vllm is None:
        return None
    try:
        return str(Version(vllm.removeprefix("v")))
    except InvalidVersion:
        raise UsageError(f"--vllm {vllm!r} is not a version", hint="--vllm 0.25.0") from None


def judged(read: Scan, entries: Sequence[Entry], vllm: str | None = None) -> Diagnosis:
    """The diagnosis from one pass over a log."""
    named = sorted(read.versions, key=read.versions.__getitem__)
    releases = tuple(v for v in named if _release(v))
    version = vllm or (releases[0] if releases else None)
    engine = _engine(read)
    failures = read.failures.failures()
    if all(f.survived for f in failures):
        failures = [*failures, *(f for f in read.unjoined.failures() if not f.survived)]
    findings = _findings(read, entries, version, engine, failures)
    findings = sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), f.line, f.id))
    verdict = _verdict(read, findings)
    return Diagnosis(
        vllm=version or "",
        tensorrt_llm=next(iter(read.trtllm), ""),
        releases=releases,
        lines=read.lines,
        dispatch=tuple(sorted(read.selections.values(), key=lambda s: (s.line, s.kind))),
        findings=tuple(findings),
        verdict=verdict,
        engine=engine,
        build=next((v for v in named if not _release(v)), "") if version is None else "",
        ready=read.failures.course.first_ready,
        is_log=_is_log(read, findings),
    )


def _is_log(read: Scan, findings: Sequence[Finding]) -> bool:
    """Whether anything tells that a server wrote it."""
    state = read.failures.course
    told = state.votes or state.levelled or state.started or state.ready or state.waits
    return bool(told or findings or read.selections)


def _release(version: str) -> bool:
    """Whether a version identifies the release; that of a build without tags does not."""
    try:
        return Version(version) >= _OLDEST
    except InvalidVersion:
        return False


def _engine(read: Scan) -> str:
    if read.versions and not read.trtllm:
        return "vllm"
    return "tensorrt-llm" if read.trtllm and not read.versions else read.failures.course.wrote()


def _findings(
    read: Scan,
    entries: Sequence[Entry],
    version: str | None,
    engine: str,
    failures: list[Failure],
) -> list[Finding]:
    found: dict[tuple[str, str], Finding] = {}
    survived = {n for f in failures if f.survived for n in f.lines}
    fatal = {n for f in failures if not f.survived for n in f.lines}
    spoken = _spoken(read, engine)
    messages = _messages(failures)
    for entry in entries:
        hits = _hits(entry, read, messages)
        if not hits or entry.engine not in spoken:
            continue
        if entry.times > 1 and read.times.get(entry.id, 0) < entry.times:
            continue
        if not read.shows(entry):
            continue
        for hit in sorted(hits, key=lambda h: h.line):
            if not entry.applies(version, by_setting=hit.by_setting):
                continue
            if entry.passing and read.failures.course.ready > hit.line:
                continue
            finding = Finding(
                entry.id,
                entry.severity,
                hit.line,
                rendered(entry.message, hit.groups),
                rendered(entry.fix_for(version), hit.groups),
                quote=hit.text,
                sure=entry.sure,
                link=entry.source or f"docs/diagnose.md#{entry.id}",
            )
            if hit.line in survived and hit.line not in fatal and entry.severity == "error":
                finding = replace(
                    finding,
                    severity="info",
                    message=f"{finding.message} The server went on after this.",
                )
            found.setdefault((entry.id, finding.message), finding)
    known = [_with_place(finding, failures) for finding in found.values()]
    spoke = {finding.id for finding in known if finding.severity == "error"}
    left = [f for f in failures if not _same(f, [e for e in entries if e.id in spoke])]
    return [*known, *_unknown(left, failures, known)]


def _hits(entry: Entry, read: Scan, messages: list[tuple[int, str]]) -> list[Hit]:
    """Where an entry matches; most match nowhere."""
    hits = list(read.hits.get(entry.id, ()))
    if entry.settings and read.settings:
        hits += _asked(entry, read)
    return hits or (_in_messages(entry, messages) if messages else [])


def _messages(failures: list[Failure]) -> list[tuple[int, str]]:
    """The messages of several lines, each as one line, with and without spaces."""
    several = [
        (failure.line, [failure.quote, *failure.more]) for failure in failures if failure.more
    ]
    return [(line, space.join(lines)) for line, lines in several for space in (" ", "")]


def _in_messages(entry: Entry, messages: list[tuple[int, str]]) -> list[Hit]:
    """The first hit of an entry in a message of several lines."""
    for line, text in messages if entry.times == 1 else ():
        if any(regex.search(text) for regex in entry.unless):
            continue
        for pattern in entry.patterns:
            if pattern.needle in text and (match := pattern.regex.search(text)):
                groups = {name: value or "" for name, value in match.groupdict().items()}
                return [Hit(line, groups, text=text[:600])]
    return []


def _same(failure: Failure, spoke: list[Entry]) -> bool:
    """Whether an entry that matched another line also explains this one."""
    return any(
        pattern.regex.search(failure.quote)
        for entry in spoke
        for pattern in entry.patterns
        if entry.times == 1
    )


def _spoken(read: Scan, engine: str) -> tuple[str, ...]:
    """The program whose entries apply to a log; vLLM if unknown."""
    if read.trtllm and not read.versions:
        return ("tensorrt-llm", "any")
    if engine in COVERED or not engine or engine == "ray":
        return ("vllm", "any")
    return (engine, "any") if read.failures.course.certain(engine) else (engine, "vllm", "any")


def _with_place(finding: Finding, failures: list[Failure]) -> Finding:
    """A finding with the details of the failure that it explains."""
    for failure in failures:
        if finding.line in failure.lines:
            return replace(
                finding,
                frame=failure.frame,
                process=failure.source,
                when=failure.when,
                follows=failure.follower,
            )
    return finding


def _unknown(left: list[Failure], failures: list[Failure], known: list[Finding]) -> list[Finding]:
    """Fatal failures without an entry, root first."""
    told = {f.line for f in known if f.severity == "error"}
    fatal = [f for f in failures if not f.survived]
    explained = any(told & f.lines or f not in left for f in fatal)
    fatal = [f for f in left if not f.survived]
    roots = [f for f in fatal if not f.follower and not f.weak] or [
        f for f in fatal if not f.follower and f.kind != "an error"
    ]
    explained = explained or (bool(told) and not roots)
    if not roots and not explained:
        roots = fatal[:1]
    found: list[Finding] = []
    for failure in roots[:_SHOWN]:
        if told & failure.lines or (found and failure.weak):
            continue
        if explained and (failure.weak or failure.follower or failure.kind == "a compiler"):
            continue
        found.append(_unknown_finding(failure))
    return found


def _unknown_finding(failure: Failure) -> Finding:
    what = f"{failure.kind} ended it" if failure.kind[:1].islower() else f"{failure.kind} error"
    message = f"Not in the catalogue: {what}."
    fix = f"no fix is known; search for: {failure.search}"
    if failure.follower:
        message = (
            f"Not in the catalogue: {failure.kind} that follows the death of another process. "
            f"The cause is not in this log."
        )
        fix = f"read the log of the other process, rank or node; or search for: {failure.search}"
    return Finding(
        UNKNOWN,
        "error",
        failure.line,
        message,
        fix,
        quote=failure.quote,
        before=failure.before.text.strip() if failure.before else "",
        before_line=failure.before.line if failure.before else 0,
        frame=failure.frame,
        search=failure.search,
        process=failure.source,
        became=tuple(noted.text for noted in failure.became),
        more=failure.more,
        when=failure.when,
        follows=failure.follower,
    )


def _verdict(read: Scan, findings: list[Finding]) -> Verdict:
    errors = [f for f in findings if f.severity == "error"]
    state = read.failures.course
    if not read.lines:
        return Verdict("empty", "The log is empty.")
    if errors:
        first = min(errors, key=lambda f: (f.id == UNKNOWN and f.line == 0, f.line))
        also = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
        if first.id == UNKNOWN:
            return Verdict(
                "failed", f"The server failed, line {first.line}: {first.quote[:160]}{also}"
            )
        return Verdict("failed", f"The log shows an error, line {first.line}: {first.id}{also}.")
    if state.ready:
        some = [f for f in findings if f.severity == "warning"]
        what = f"{len(some)} warning{'s' * (len(some) > 1)}" if some else "nothing wrong was found"
        return Verdict("ready", f"The server became ready (line {state.first_ready}): {what}.")
    unseen = "No failure found, but the server did not become ready"
    last = state.last.text.strip()[:160]
    if state.started:
        return Verdict("stopped", f"{unseen}: the log stops at line {state.last.line}: {last}")
    none = f"Nothing in it looks like a log of vLLM; it ends with: {last}"
    return Verdict("unclear", f"{unseen}." if _is_log(read, findings) else none)


def described(result: Diagnosis) -> str:
    """The program and release of a log, as text."""
    if result.vllm and result.engine in ("vllm", ""):
        return f"vLLM {result.vllm}"
    if result.tensorrt_llm:
        return f"TensorRT-LLM {result.tensorrt_llm}"
    if not result.engine:
        return "an unknown program (for vLLM, use --vllm VERSION)"
    name = ENGINE_NAMES.get(result.engine, result.engine)
    if result.engine == "vllm":
        own = f" build {result.build}, of" if result.build else " of"
        return f"vLLM{own} an unknown release (use --vllm VERSION)"
    return name


def _asked(entry: Entry, read: Scan) -> list[Hit]:
    """Hits of an entry's ``settings``."""
    return [
        Hit(
            setting.line,
            {"name": setting.name, "value": setting.value},
            by_setting=True,
            text=f"{setting.name}={setting.value}",
        )
        for asked in entry.settings
        for setting in read.settings.values()
        if asked.holds(setting.name, setting.value)
    ]


#: Sorts after every possible time in a log.
_LATE = "99"


def earliest_failure_first(results: Sequence[Diagnosis]) -> list[Diagnosis]:
    """The logs, earliest failure first; consequences name the line of their cause."""
    first = _first(results)
    ordered = sorted(results, key=lambda r: _rank(r, first))
    return [_pointed(result, first) for result in ordered]


def _errors(result: Diagnosis) -> list[Finding]:
    return [finding for finding in result.findings if finding.severity == "error"]


def _first(results: Sequence[Diagnosis]) -> tuple[str, Finding] | None:
    """The earliest failure that is not a consequence of another."""
    found = [
        (finding.when or _LATE, index, result.file, finding)
        for index, result in enumerate(results)
        for finding in _errors(result)
        if not finding.follows
    ]
    if not found:
        return None
    _, _, file, finding = min(found, key=lambda f: (f[0], f[1], f[3].line))
    return file, finding


def _rank(result: Diagnosis, first: tuple[str, Finding] | None) -> tuple[bool, bool, str]:
    errors = _errors(result)
    roots = [f.when or _LATE for f in errors if not f.follows]
    times = roots or [f.when or _LATE for f in errors]
    return (
        not (first and result.file == first[0]),
        not errors,
        ("0" if roots else "1") + min(times, default=_LATE),
    )


def _pointed(result: Diagnosis, first: tuple[str, Finding] | None) -> Diagnosis:
    """A log whose consequences name the cause."""
    if first is None or first[0] == result.file:
        return result
    file, cause = first
    findings = tuple(
        msgspec.structs.replace(
            finding,
            message=f"{finding.message} It follows from {file}, line {cause.line}: "
            f"{cause.quote[:200]}",
        )
        if finding.follows and finding.severity == "error"
        else finding
        for finding in result.findings
    )
    return dataclasses.replace(result, findings=findings)


def verdict(results: Sequence[Diagnosis]) -> Verdict:
    """The summary of all logs."""
    failed = [r for r in results if r.verdict.state == "failed"]
    if failed:
        count = f"{len(failed)} of {len(results)} logs show a failure"
        first = _first(results)
        if first is None:
            return Verdict(
                "failed",
                f"{count}, each caused by another rank that died or hangs. The log of that rank "
                f"is not among them.",
            )
        file, cause = first
        when = f" at {cause.when}" if cause.when else ""
        return Verdict(
            "failed", f"{count}. The first is {file}, line {cause.line}{when}: {cause.id}."
        )
    for state in ("stopped", "unclear", "empty"):
        some = [r.file for r in results if r.verdict.state == state]
        if some and not any(r.verdict.state == "ready" for r in results):
            return Verdict(
                state, f"No failure found, but the server did not become ready ({', '.join(some)})."
            )
    warnings = sum(f.severity == "warning" for r in results for f in r.findings)
    what = f"{warnings} warnings" if warnings else "nothing wrong was found"
    return Verdict("ready", f"The server became ready: {what} in {len(results)} logs.")
