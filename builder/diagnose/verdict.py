"""Logs of several ranks or nodes: the first failure, and those that follow from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace
from packaging.version import InvalidVersion, Version

from builder.common.document import Count, Part, Text, always
from builder.diagnose.entries import SEVERITIES, Entry, Severity, load_entries, rendered
from builder.diagnose.failures import HANG, KINDS, QUOTED, classify, in_flags_of
from builder.diagnose.logs import Reader
from builder.diagnose.matching import Hit, Log, Scan, Server, scan
from builder.diagnose.servers import COVERED, ENGINE_NAMES, SIDECAR
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import BinaryIO

    from builder.diagnose.failures import Failure, Mechanism
    from builder.diagnose.matching import Selection

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
    mechanism: Annotated[
        str, Meta(description="what made it fail, by the form of the message; empty if unknown")
    ] = always("")
    component: Annotated[str, Meta(description="the part that refused or failed")] = always("")
    times: Annotated[Count, Meta(description="how often it is in the last attempt")] = always(1)
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
    #: it is one of several servers in its log
    own_server: bool = False
    #: starts of the server in this log; the last one is judged
    attempts: int = 1
    #: attempts before the judged one that ended with a failure
    failed_attempts: int = 0

    @property
    def failed(self) -> bool:
        """Whether it shows a failure or an incomplete start."""
        return self.verdict.state in ("failed", "stopped") or (
            self.verdict.state == "unclear" and self.is_log
        )

    def in_log(self, name: str) -> Diagnosis:
        """The same, for one of several logs, or one of several servers in a log."""
        return self.in_file(f"{name} ({self.file})" if self.file else name)

    def in_file(self, name: str) -> Diagnosis:
        """The same, for one of several logs."""
        named = tuple(replace(finding, file=name) for finding in self.findings)
        return dataclasses.replace(self, file=name, findings=named)


#: Failures outside the catalogue to show for one log.
_SHOWN = 3
#: The first plausible vLLM version; a build without tags has version 0.1.dev.
_OLDEST = Version("0.5")


def diagnose(
    stream: BinaryIO, vllm: str | None = None, catalog: Sequence[Entry] | None = None
) -> Diagnosis:
    """Read a log; of several servers in it, the one that fared worst.

    Raises:
        UsageError: ``vllm`` is not a version, or an entry of the catalogue is malformed.
    """
    return worst(diagnoses(stream, vllm, catalog))


def diagnoses(
    stream: BinaryIO,
    vllm: str | None = None,
    catalog: Sequence[Entry] | None = None,
    *,
    log: Log | None = None,
    live: bool = False,
) -> list[Diagnosis]:
    """Read a log, and judge each server in it; ``vllm`` is the release and overrides the log's.

    ``log`` is filled during reading; ``live`` means that the log still grows.

    Raises:
        UsageError: ``vllm`` is not a version, or an entry of the catalogue is malformed.
    """
    given = given_release(vllm)
    entries = load_entries() if catalog is None else catalog
    return judged(scan(Reader(stream, live=live), entries, log), entries, given)


_ORDER = ("failed", "stopped", "unclear", "ready", "empty")


def worst(results: Sequence[Diagnosis]) -> Diagnosis:
    """The one that fared worst, the first of several."""
    return min(results, key=lambda result: _ORDER.index(result.verdict.state))


def given_release(vllm: str | None) -> str | None:
    """``--vllm`` as a version.

    Raises:
        UsageError: the text is not a version.
    """
    if vllm is None:
        return None
    try:
        return str(Version(vllm.removeprefix("v")))
    except InvalidVersion:
        raise UsageError(f"--vllm {vllm!r} is not a version", hint="--vllm 0.25.0") from None


def judged(log: Log, entries: Sequence[Entry], vllm: str | None = None) -> list[Diagnosis]:
    """The diagnosis of each server in a log, as far as it was read."""
    servers = _servers(log)
    results = [_judged_server(server, log, entries, vllm) for server in servers]
    if len(results) < 2:
        return results
    return [
        dataclasses.replace(r.in_file(s.name), own_server=bool(s.first or s.name))
        for r, s in zip(results, servers, strict=True)
    ]


def _servers(log: Log) -> list[Server]:
    """The servers of a log; Ray's nodes that start none of their own count to another one."""
    every = log.all() or [Server("")]
    own = [s for s in every if s.first or s.last.failures.course.ready]
    nodes = [s for s in every if s not in own and s.name.replace(".", "").isdigit()]
    plain = [s for s in every if s not in own and s not in nodes]
    if not own:
        first = plain if plain and (not nodes or any(not s.name for s in plain)) else every
        own = [max(first, key=lambda s: bool(s.last.failures.course.votes or s.last.selections))]
    own[0] = own[0].with_nodes([node for node in nodes if node is not own[0]])
    others = [s for s in plain if s not in own and s.name != own[0].name and _is_broken_server(s)]
    if others and not (own[0].first or own[0].last.failures.course.votes):
        return others
    return [*own, *others]


def _is_broken_server(server: Server) -> bool:
    """Whether a source of few lines failed, and nothing tells that it is another program."""
    if server.name and SIDECAR.search(server.name):
        return False
    state = server.last.failures.course
    failures = server.last.failures
    if server.before is not None and server.before.broken() and not state.ready:
        return True  # and the attempt after it shows nothing yet
    burst = failures.no_memory_lines >= _BURST and failures.no_memory_last > state.ready
    refused = state.refused and not state.answered
    if state.other() or not (burst or refused or server.last.broken()):
        return False
    # lines without a prefix among prefixed ones may be of any program
    return bool(server.name or state.votes)


def _judged_server(
    server: Server, log: Log, entries: Sequence[Entry], vllm: str | None
) -> Diagnosis:
    """The diagnosis of the last attempt, or of the one before if the last one shows nothing yet."""
    last = _judged_attempt(server.last, server, log, entries, vllm)
    if server.before is None:
        return last
    failed = server.failed
    before = _judged_attempt(server.before, server, log, entries, vllm)
    counted = dataclasses.replace(last, attempts=server.attempts, failed_attempts=failed)
    if last.verdict.state == "failed":
        also = f"; {failed} before it failed too" if failed else ""
        return _with_sentence(counted, f"Attempt {server.attempts} of {server.attempts}{also}. ")
    if before.verdict.state != "failed":
        return _with_sentence(counted, f"Attempt {server.attempts} of {server.attempts}. ")
    root = next(f for f in before.findings if f.severity == "error")
    if last.verdict.state == "ready":
        findings = (*counted.findings, _restarted(root, failed, server.attempts))
        some = sum(f.severity == "warning" for f in findings)
        sentence = (
            f"The server became ready (line {last.ready}) in attempt {server.attempts}; "
            f"{failed} before it failed: {some} warning{'s' * (some > 1)}."
        )
        return dataclasses.replace(
            counted, findings=findings, verdict=replace(last.verdict, sentence=sentence)
        )
    told = dataclasses.replace(
        counted,
        findings=(*before.findings, *last.findings),
        verdict=before.verdict,
        failed_attempts=failed - 1,
    )
    return _with_sentence(
        told,
        f"Attempt {server.attempts} of {server.attempts} was not ready when the log ends; the one "
        f"before it failed. ",
    )


def _with_sentence(result: Diagnosis, start: str) -> Diagnosis:
    verdict = replace(result.verdict, sentence=start + result.verdict.sentence)
    return dataclasses.replace(result, verdict=verdict)


def _restarted(root: Finding, failed: int, attempts: int) -> Finding:
    """The finding of a server that runs now, and failed before."""
    times = f"{failed} of {attempts - 1} attempts" if attempts > _TWO else "The attempt"
    return replace(
        root,
        id="restarted",
        severity="warning",
        message=f"{times} before this one failed, the last of them here: {root.message}",
    )


_TWO = 2


def _judged_attempt(
    read: Scan, server: Server, log: Log, entries: Sequence[Entry], vllm: str | None
) -> Diagnosis:
    """The diagnosis of one attempt of a server."""
    at = _line_numbers(log.turned)
    versions = read.versions or server.versions
    named = sorted(versions, key=versions.__getitem__)
    every = sorted({**server.versions, **read.versions}, key=server.versions.get)  # type: ignore[arg-type]
    releases = tuple(v for v in named if _release(v))
    version = vllm or (releases[0] if read.versions and releases else (releases or (None,))[-1])
    engine = _engine(read) if read.failures.course.votes or not vllm else "vllm"
    other = read.failures.course.other()
    failures = [] if other else read.failures.failures()
    if not other and all(f.survived for f in failures):
        failures = [*failures, *(f for f in read.unjoined.failures() if not f.survived)]
    read = read.with_settings(server.preamble)
    findings = [] if other else _findings(read, entries, version, engine, failures)
    findings = sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), f.line, f.id))
    is_log = not other and _is_log(read, findings)
    verdict = _verdict(read, findings, log.lines, at, other)
    return Diagnosis(
        vllm=version or "",
        tensorrt_llm=next(iter(read.trtllm), ""),
        releases=tuple(v for v in every if _release(v)),
        lines=log.lines,
        dispatch=tuple(
            replace(s, line=at(s.line))
            for s in sorted(read.selections.values(), key=lambda s: (s.line, s.kind))
        ),
        findings=tuple(
            replace(f, line=at(f.line), before_line=at(f.before_line))
            for f in (findings if is_log else ())
        ),
        verdict=verdict,
        engine=engine,
        build=next((v for v in named if not _release(v)), "") if version is None else "",
        ready=at(read.failures.course.first_ready),
        is_log=is_log,
    )


def _line_numbers(turned: int) -> Callable[[int], int]:
    """A line's number in the file, by its number in the order of time."""
    return (lambda n: turned - n if n else 0) if turned else (lambda n: n)


#: Texts of this size may be a paste of the lines that matter.
_PASTE = 4


def _is_log(read: Scan, findings: Sequence[Finding]) -> bool:
    """Whether anything tells that a server wrote it."""
    state = read.failures.course
    if state.votes or state.started or state.ready or state.waits or read.selections:
        return True
    if state.checked or state.counted:
        return True
    if len(state.texts) > _PASTE and not state.related:
        return False
    return bool(findings or state.levelled or read.failures.no_memory)


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
    by_message: dict[tuple[str, str], Finding] = {}
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
            if entry.passing and read.passed(entry, hit.line):
                continue
            finding = Finding(
                entry.id,
                entry.severity,
                hit.line,
                rendered(entry.message, hit.groups),
                in_flags_of(engine, rendered(entry.fix_for(version), hit.groups)),
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
            by_message.setdefault((entry.id, finding.message), finding)
    known = [_with_place(finding, failures, engine) for finding in by_message.values()]
    known = _without_consequences(known, failures)
    spoke = {finding.id for finding in known if finding.severity == "error"}
    left = [f for f in failures if not _same(f, [e for e in entries if e.id in spoke])]
    found_now = [*known, *_unknown(read, engine, left, failures, known)]
    found_now += _driver_memory(read, found_now)
    found_now += _refusals(read, found_now)
    if any(f.severity == "error" for f in found_now):  # a note of a server that works
        found_now = [f for f in found_now if f.id not in _NOTED]
    return found_now


def _without_consequences(known: list[Finding], failures: list[Failure]) -> list[Finding]:
    """Findings without the wait for a rank, if a failure says why it does not answer."""
    if any(not f.survived and f.kind != HANG for f in failures):
        return [f for f in known if f.component != "a rank of the engine"]
    return known


def _refusals(read: Scan, findings: list[Finding]) -> list[Finding]:
    """The finding of a server that answers checks, and no request."""
    state = read.failures.course
    if any(f.severity == "error" or f.mechanism == "request" for f in findings):
        return []
    failed = [line for line in state.failed if line.line > state.alive]
    refused = [] if state.answered else state.refused
    if not failed and not refused:
        return []
    many = len(failed) >= _BURST
    lines = failed or refused
    what = "failed in the server (5xx)" if failed else "refused (4xx)"
    return [
        Finding(
            "request",
            "error" if many else "warning",
            lines[0].line,
            f"Requests {what}: {len(lines)}, and none was answered since. Answers to /health and "
            "/v1/models do not show that the server generates.",
            "send one request by hand (curl) and read its answer, whose text says what is wrong; "
            "then the lines before this one",
            quote=lines[0].text[:QUOTED],
            mechanism="request",
            component="every request" if many else "a request",
            sure="likely",
            times=len(lines),
        )
    ]


def _driver_memory(read: Scan, findings: list[Finding]) -> list[Finding]:
    """The finding of a kernel's journal that says nothing but that memory ran out."""
    first, lines = read.failures.no_memory, read.failures.no_memory_lines
    if first is None or any(f.severity == "error" for f in findings):
        return []
    state = read.failures.course
    many = lines >= _BURST
    # a server that came up, or answered, after the last of them works
    if state.ready > read.failures.no_memory_last or (state.votes and not many):
        return []
    tuning = f" Kernels were tuned then (line {state.tuning})." if state.tuning else ""
    told = f"{lines} lines of the driver say" if many else "A line of the driver says"
    return [
        Finding(
            "memory",
            "error" if many else "warning",
            first.line,
            f"{told} that an allocation failed (NV_ERR_NO_MEMORY). "
            + (
                f"Unified memory ran out; the server may hang from then on.{tuning}"
                if many
                else "One such line at a healthy start is harmless."
            ),
            "free -h and the server's own log at that time; lower --gpu-memory-utilization, and "
            "drop the page cache: sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'"
            + (
                "; let fewer compilers run at once (MAX_JOBS=2, B12X_COMPILE_WORKERS=2), and keep "
                "the cache of the first tuning for the next start"
                if state.tuning
                else ""
            ),
            quote=first.text.strip(),
            mechanism="memory",
            component="the host's memory, which is the GPU's too",
            sure="likely",
        )
    ]


#: Lines of the driver about memory from which on they are not of an ordinary start.
_BURST = 3


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


def _with_place(finding: Finding, failures: list[Failure], engine: str) -> Finding:
    """A finding with the details of the failure that it explains."""
    failure = next((one for one in failures if finding.line in one.lines), None)
    frame = failure.frame if failure is not None else ""
    if finding.severity == "error":
        told = classify(finding.quote, frame=frame, engine=engine)
        if told is not None:
            finding = replace(finding, mechanism=told.kind, component=told.component)
    if failure is None:
        return finding
    return replace(
        finding,
        frame=frame,
        process=failure.source,
        when=failure.when,
        follows=failure.follower,
        times=failure.times,
    )


def _unknown(
    read: Scan, engine: str, left: list[Failure], failures: list[Failure], known: list[Finding]
) -> list[Finding]:
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
    findings: list[Finding] = []
    for failure in roots[:_SHOWN]:
        if told & failure.lines or (findings and failure.weak):
            continue
        if explained and (failure.weak or failure.follower or failure.kind == "a compiler"):
            continue
        findings.append(_unknown_finding(failure, read, engine))
    return findings


def _of_one_request(failure: Failure, told: Mechanism | None, read: Scan) -> bool:
    """Whether only a request failed: the server was ready, or the log is of its handler alone."""
    state = read.failures.course
    if read.failures.dead():
        return False
    serves = state.ready and failure.line > state.first_ready
    request = told is not None and told.kind == "request"
    after = [line.line - failure.end for line in state.refused if line.line > failure.end]
    if after and (request or (failure.handled and min(after) <= _ANSWER)):
        return True  # a line after it says that the request was refused
    return bool(
        (request and (serves or (failure.handled and not state.started)))
        or (serves and failure.handled and told is not None and told.kind == "settings")
    )


#: Components of flags that a program does not know.
_COMMAND_LINES = ("the command line", "vLLM's command line")
#: Within as many lines after an error the answer of its request is written.
_ANSWER = 4


def _unknown_finding(failure: Failure, read: Scan, engine: str) -> Finding:
    what = f"{failure.kind} ended it" if failure.kind[:1].islower() else f"{failure.kind} error"
    message = f"Not in the catalogue: {what}."
    fix = f"no fix is known; search for: {failure.search}"
    code = [failure.code] if failure.code else []
    text = "\n".join([failure.quote, failure.message, *failure.more, *code])
    told = classify(text, frame=failure.frame, engine=engine)
    one = _of_one_request(failure, told, read)
    if told is not None:
        message = f"A request failed. {told.message}" if one else told.message
        fix = told.fix
    fork = read.failures.course.fork
    if told is not None and fork is not None and told.component in _COMMAND_LINES:
        fix = (
            f"the log shows a fork or a build between releases (line {fork.line}: "
            f"{fork.text[:100]}), whose flags are not those of a release: compare with what this "
            "build lists (vllm serve --help=all), and take the image and commit that the command "
            "was written for"
        )
    if failure.follower:
        message = (
            f"Not in the catalogue: {failure.kind} that follows the death of another process. "
            f"The cause is not in this log."
        )
        fix = f"read the log of the other process, rank or node; or search for: {failure.search}"
    known = told is not None and not failure.follower
    return Finding(
        told.kind if told is not None and known else UNKNOWN,
        "warning" if one else "error",
        failure.line,
        message,
        fix,
        quote=failure.quote,
        sure="likely" if known else "",
        link=f"docs/diagnose.md#{told.kind}" if told is not None and known else "",
        before=failure.before.text.strip() if failure.before else "",
        before_line=failure.before.line if failure.before else 0,
        frame=failure.frame,
        search=failure.search,
        process=failure.source,
        became=tuple(noted.text for noted in failure.became),
        more=failure.more,
        when=failure.when,
        follows=failure.follower,
        mechanism=told.kind if told is not None else "",
        component=told.component if told is not None else "",
        times=failure.times,
    )


def _verdict(
    read: Scan, findings: list[Finding], lines: int, at: Callable[[int], int], other: str
) -> Verdict:
    if not lines:
        return Verdict("empty", "The log is empty.")
    if other:
        what = f"This is the log of {other}, not of a model server that serves here"
        return Verdict("unclear", f"{what}; nothing in it was judged.")
    last = read.failures.course.last.text.strip()[:160]
    if not _is_log(read, findings):
        return Verdict("unclear", f"Nothing in it looks like a log of vLLM; it ends with: {last}")
    if errors := [f for f in findings if f.severity == "error"]:
        first = min(errors, key=lambda f: (f.follows, f.line))
        also = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
        if first.id == UNKNOWN or first.id in KINDS:
            return Verdict(
                "failed", f"The server failed, line {at(first.line)}: {first.quote[:160]}{also}"
            )
        return Verdict(
            "failed", f"The log shows an error, line {at(first.line)}: {first.id}{also}."
        )
    return _without_failure(read, findings, at, last)


def _without_failure(
    read: Scan, findings: list[Finding], at: Callable[[int], int], last: str
) -> Verdict:
    state = read.failures.course
    if state.ready and state.unhealthy > max(state.ready, state.checked):
        line = at(state.unhealthy)
        return Verdict("stopped", f"No failure found, but /health answered 503 last (line {line}).")
    if (told := _unclear(read, findings, at)) is not None:
        return Verdict("unclear", told)
    if state.ready:
        some = [f for f in findings if f.severity == "warning"]
        what = f"{len(some)} warning{'s' * (len(some) > 1)}" if some else "nothing wrong was found"
        noted = "".join(_NOTED.get(f.id, "") for f in findings if f.severity == "info")
        unseen = "" if state.alive or not state.checked else _NOT_KNOWN
        return Verdict(
            "ready",
            f"The server became ready (line {at(state.first_ready)}): {what}{noted}.{unseen}",
        )
    unseen = "No failure found, but the server did not become ready"
    if state.started:
        return Verdict("stopped", f"{unseen}: the log stops at line {at(state.last.line)}: {last}")
    return Verdict("unclear", f"{unseen}; the last line is: {last}")


def _unclear(read: Scan, findings: list[Finding], at: Callable[[int], int]) -> str | None:
    """Why nobody can say whether the server generates, or None."""
    state = read.failures.course
    if (stalls := state.stalls()) is not None:
        return (
            f"The server became ready (line {at(state.first_ready)}), and waits since line "
            f"{at(stalls.line)}: {stalls.text.strip()[:100]} "
            "Whether it still generates is not known."
        )
    if state.refused and not state.answered:
        count = f"{len(state.refused)} request{'s' * (len(state.refused) > 1)}"
        return (
            f"Every request was refused ({count}, the first in line {at(state.refused[0].line)}). "
            "Nothing shows that the server itself failed, and nothing that it generates."
        )
    if state.ready:
        return None
    first = next((f for f in findings if f.severity == "warning" and _about_a_request(f)), None)
    if first is not None:
        return (
            f"A request failed, line {at(first.line)}: {first.quote[:160]}. "
            "Nothing shows that the server itself failed."
        )
    return f"No failure found.{_NOT_KNOWN}" if state.checked or state.counted else None


def _about_a_request(finding: Finding) -> bool:
    return finding.mechanism == "request" or finding.message.startswith("A request")


#: What checks of health tell of a server: a process with a dead engine answers them too.
_NOT_KNOWN = (
    " No request was answered, so whether it generates is not known: /health and /v1/models show "
    "nothing."
)
#: What the verdict of a ready server adds for a note.
_NOTED = {"b12x-not-requested": "; b12x is not in use"}


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
    candidates = [
        (finding.when or _LATE, index, result.file, finding)
        for index, result in enumerate(results)
        for finding in _errors(result)
        if not finding.follows
    ]
    if not candidates:
        return None
    _, _, file, finding = min(candidates, key=lambda f: (f[0], f[1], f[3].line))
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
    ready = any(r.verdict.state == "ready" for r in results)
    for state in ("stopped", "unclear", "empty"):
        # the nodes of one server have a log each, and one says that it is ready
        some = [r.file for r in results if r.verdict.state == state and (r.own_server or not ready)]
        if some:
            return Verdict(
                state, f"No failure found, but the server did not become ready ({', '.join(some)})."
            )
    warnings = sum(f.severity == "warning" for r in results for f in r.findings)
    what = f"{warnings} warnings" if warnings else "nothing wrong was found"
    return Verdict("ready", f"The server became ready: {what} in {len(results)} logs.")
