"""The results of diagnose as text, as documents and as the page in docs/; logs that grow."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import shutil
import stat
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

from msgspec import Meta
from msgspec.structs import replace

from builder.common.console import console, counted, tell
from builder.common.document import Count, Document, Part, Text
from builder.common.hints import os_hint
from builder.diagnose.entries import SEVERITIES, Engine, Severity, Sure, load_entries, load_entry
from builder.diagnose.failures import KINDS, filled, rules
from builder.diagnose.logs import SAMPLE, Source, joined, sources_at, texts
from builder.diagnose.matching import LABELS, Log, Selection
from builder.diagnose.servers import COVERED
from builder.diagnose.verdict import (
    UNKNOWN,
    Finding,
    Verdict,
    described,
    diagnose,
    diagnoses,
    earliest_failure_first,
    judged,
    verdict,
    worst,
)
from builder.errors import Exit, SparkBuildError, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import BinaryIO

    from builder.diagnose.entries import Entry, Example
    from builder.diagnose.verdict import Diagnosis


class LogRow(Part, frozen=True, kw_only=True):
    """One of several logs."""

    file: str
    engine: str
    vllm: str
    lines: Count
    ready_line: Count
    verdict: Verdict

    @classmethod
    def of(cls, result: Diagnosis) -> LogRow:
        """The row for a log."""
        return cls(
            file=result.file,
            engine=result.engine,
            vllm=result.vllm,
            lines=result.lines,
            ready_line=result.ready,
            verdict=result.verdict,
        )


class Diagnosed(Document, frozen=True, kw_only=True):
    """The findings in one log, or in several."""

    vllm: Annotated[str, Meta(description="the release whose rules apply; empty if unknown")]
    tensorrt_llm: str
    engine: Annotated[
        str,
        Meta(
            description="the program that wrote the log: vllm, tensorrt-llm, sglang, llama.cpp, "
            "nim, ray; empty if unknown"
        ),
    ]
    build: Annotated[
        str,
        Meta(description="a vLLM version that is not a release, such as 0.1.dev1+gabc"),
    ]
    lines: Count
    ready_line: Annotated[Count, Meta(description="the line where the server became ready, or 0")]
    verdict: Verdict
    dispatch: tuple[Selection, ...]
    findings: tuple[Finding, ...]
    files: Annotated[
        tuple[LogRow, ...], Meta(description="each of several logs, the earliest failure first")
    ] = ()

    @classmethod
    def of(cls, results: Sequence[Diagnosis]) -> Diagnosed:
        """The document for one or several logs, worst findings first."""
        first, alone = results[0], len(results) == 1
        findings = (finding for result in results for finding in result.findings)
        return cls(
            vllm=next((r.vllm for r in results if r.vllm), ""),
            tensorrt_llm=next((r.tensorrt_llm for r in results if r.tensorrt_llm), ""),
            engine=first.engine,
            build=first.build,
            lines=sum(result.lines for result in results),
            ready_line=first.ready if alone else 0,
            verdict=first.verdict if alone else verdict(results),
            dispatch=first.dispatch
            if alone
            else tuple(replace(s, file=result.file) for result in results for s in result.dispatch),
            findings=tuple(sorted(findings, key=lambda f: SEVERITIES.index(f.severity))),
            files=() if alone else tuple(map(LogRow.of, results)),
        )


class FixRow(Part, frozen=True, kw_only=True):
    """The fix for a range of releases."""

    when: str
    text: Text


class EntryRow(Part, frozen=True, kw_only=True):
    """An entry of the catalogue."""

    id: Text
    severity: Severity
    engine: Engine
    when: Annotated[str, Meta(description="releases of vLLM; empty for all")]
    sure: Sure
    source: str
    message: Text
    patterns: tuple[str, ...]
    fixes: tuple[FixRow, ...]
    examples: tuple[str, ...]

    @classmethod
    def of(cls, entry: Entry) -> EntryRow:
        """The row for an entry."""
        return cls(
            id=entry.id,
            severity=entry.severity,
            engine=entry.engine,
            when=str(entry.when or ""),
            sure=entry.sure,
            source=entry.source,
            message=entry.message,
            patterns=tuple(pattern.regex.pattern for pattern in entry.patterns),
            fixes=tuple(FixRow(when=str(f.when or ""), text=f.text) for f in entry.fixes),
            examples=tuple(example.log for example in entry.examples if example.found),
        )


class Entries(Document, frozen=True, kw_only=True):
    """Entries of the catalogue."""

    entries: tuple[EntryRow, ...]


_SURE = {
    "certain": "",
    "likely": "the cause is likely but not certain",
    "reported": "reported by users; not confirmed in the code",
}
#: Hint for a log that ends early.
_STOPPED = (
    "If the server still starts, wait and read again.  If it has exited, find the reason: "
    "docker inspect -f '{{.State.ExitCode}} {{.State.OOMKilled}}' NAME, and sudo dmesg -T | tail"
)
_UNCLEAR = "Give the log from its start: docker logs NAME 2>&1 | spark-build diagnose -"
_OTHER = "{name} is not in the catalogue: the failure is shown, but vLLM fixes do not apply."


def width() -> int:
    """Width of the report in columns."""
    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))


def lines_of(result: Diagnosis) -> Iterator[str]:
    """The report of one log."""
    name = f"{result.file}: " if result.file else ""
    yield from textwrap.wrap(name + result.verdict.sentence, width()) or [name]
    if result.verdict.state == "empty":
        return
    yield f"{described(result)}, {counted(result.lines, 'line')}"
    if result.engine and result.engine not in COVERED and not result.vllm:
        yield from textwrap.wrap(_OTHER.format(name=described(result)), width())
    yield ""
    if result.dispatch:
        yield "  selected"
        label = max(len(LABELS[s.kind]) for s in result.dispatch)
        kernel = max(len(s.kernel) for s in result.dispatch)
        for chosen in result.dispatch:
            yield (
                f"    {LABELS[chosen.kind]:<{label}}  {chosen.kernel:<{kernel}}  line {chosen.line}"
            )
    else:
        yield "  no line shows the selected kernels (the start of the log is needed)"
    yield ""
    for finding in result.findings:
        yield from _finding(finding)
    if result.verdict.state == "stopped":
        yield from _paragraph("", _STOPPED, "  ")
    elif result.verdict.state == "unclear":
        yield from _paragraph("", _UNCLEAR, "  ")


def lines_of_several(results: Sequence[Diagnosis]) -> Iterator[str]:
    """The report of several logs: one verdict, then each."""
    yield from textwrap.wrap(verdict(results).sentence, width())
    for result in results:
        yield ""
        yield from lines_of(result)


def _finding(finding: Finding) -> Iterator[str]:
    yield f"  {finding.severity:<8}line {finding.line}: {finding.id}"
    yield from _paragraph("", finding.message)
    if finding.before:
        yield f"{_INDENT}  line {finding.before_line} | {_cut(finding.before)}"
    if finding.quote:
        quote = finding.quote if finding.id == UNKNOWN else _cut(finding.quote)
        yield f"{_INDENT}> line {finding.line} | {quote}"
    for part in finding.more:
        yield f"{_INDENT}  {_cut(part)}"
    for later in finding.became[-2:]:
        yield f"{_INDENT}  became | {_cut(later)}"
    yield from _place(finding)
    yield from _paragraph("fix: ", finding.fix)
    if _SURE.get(finding.sure):
        yield from _paragraph("sure: ", _SURE[finding.sure])
    if finding.link:
        yield f"{_INDENT}see: {finding.link}"
    yield ""


def _place(finding: Finding) -> Iterator[str]:
    """Where it happened."""
    if finding.process:
        yield f"{_INDENT}  process: {finding.process}"
    if finding.component:
        kind = KINDS.get(finding.mechanism, finding.mechanism)
        yield f"{_INDENT}  {kind}: {finding.component}"
    if finding.frame:
        yield f"{_INDENT}  innermost frame: {finding.frame}"
    if finding.times > 1:
        yield f"{_INDENT}  {finding.times} times in this attempt"


_INDENT = " " * 10
#: Maximum length of a context line.
_CUT = 200


def _cut(text: str) -> str:
    return text if len(text) <= _CUT else f"{text[:_CUT]}..."


def _paragraph(lead: str, text: str, indent: str = _INDENT) -> Iterator[str]:
    if text:
        yield from textwrap.wrap(
            lead + text,
            width(),
            initial_indent=indent,
            subsequent_indent=indent + " " * len(lead),
            break_long_words=False,
            break_on_hyphens=False,
        )


_ENGINES = {
    "vllm": "vLLM",
    "tensorrt-llm": "TensorRT-LLM",
    "sglang": "SGLang",
    "any": "any engine",
}
_PAGE = """\
# The catalogue of `diagnose`

Generated from `builder/data/diagnose/` with `spark-build diagnose table > docs/diagnose.md`.
[Adding an entry](#adding-an-entry) shows how to add one. The confidence of an entry: *certain* was
seen in the code or the wheels of that release, *likely* follows from them, *reported* helped some.

| entry | for | what it means |
|---|---|---|
"""
_MECHANISMS = """
## Mechanisms

A failure without an entry is classified by the form of its message: what happened, and in which
part. The values that the message names (sizes, flags, files, ranks) are in the text, and the fix
follows from the mechanism. The rules are in `builder/data/mechanisms.toml`; each has an example,
which is its test. Where the message does not tell the part, a rule may also ask for the frame of
the traceback. A failure of one request, of a server that runs on, is a warning.

| mechanism | what happened | parts that rules name |
|---|---|---|
"""
_ADDING = """
## Adding an entry

An entry is one file, `builder/data/diagnose/NAME.toml`; nothing else changes.

```toml
id = "disk-full"                 # the file's name
severity = "error"               # error, warning, info
engine = "any"                   # vllm (the default), tensorrt-llm, sglang, any
when = ">=0.24.0rc0"             # releases of vLLM; left out: all
sure = "certain"                 # certain, likely, reported
source = "https://..."           # where the cause or fix was published
patterns = ['''No space left on device''']  # regular expressions: one must be in a line
message = "A disk is full."

[[fix]]                          # the first whose `when` matches; {name} is a group of the pattern
text = "df -h; free space where the cache lies, or put it elsewhere with HF_HOME"

[[example]]                      # must be found, in this line, with this text in the fix
log = "OSError: [Errno 28] No space left on device"
fix = "df -h"

[[example]]                      # a near miss must not be found
log = "INFO 07-02 10:00:00 [x.py:1] there is space left on the device"
found = false
```

More keys: `unless` (patterns of lines that do not count), `settings` (`NAME=REGEX` of a setting in
use), `[with]` and `[without]` (`patterns`, `settings` elsewhere in the log), `times` (the minimum
number of lines), `passing` (not a failure if the server becomes ready later), `needs-version`. A
pattern needs five or more characters of fixed text. Write your own examples of one to three lines:
no complete logs, no names of people or hosts. Then:

```sh
spark-build diagnose check builder/data/diagnose/disk-full.toml
spark-build diagnose table > docs/diagnose.md
```
"""


class FailedExample(NamedTuple):
    """A failed example of an entry."""

    entry: str
    example: int
    why: str


def releases(entry: Entry) -> str:
    """The releases of an entry, as text."""
    if entry.when is None or entry.engine != "vllm":
        return _ENGINES[entry.engine]
    bare = {s.operator: re.sub(r"(?:rc|a|\.dev)\d+$", "", s.version) for s in entry.when}
    low, high = bare.get(">=", bare.get("==", "")), bare.get("<", "")
    if low and high:
        return f"vLLM {low} to before {high}"
    return f"vLLM from {low}" if low else f"vLLM before {high}"


def find_entry(name: str) -> Entry:
    """The entry with a name.

    Raises:
        UsageError: no entry has this name.
    """
    entries = {entry.id: entry for entry in load_entries()}
    if name not in entries:
        raise UsageError(
            f"no entry {name!r} in the catalogue{did_you_mean(name, entries)}",
            hint="spark-build diagnose list",
        )
    return entries[name]


def page(entries: Sequence[Entry]) -> str:
    """``docs/diagnose.md``."""
    rows = []
    for entry in entries:
        source = f" [Source]({entry.source})." if entry.source else ""
        meaning = entry.message.replace("|", "\\|").replace("<", "&lt;")
        rows.append(
            f'| <a id="{entry.id}"></a>`{entry.id}` ({entry.severity}) | {releases(entry)} | '
            f"{meaning} *{entry.sure.capitalize()}.*{source} |\n"
        )
    return _PAGE + "".join(rows) + _mechanisms() + _ADDING


def _mechanisms() -> str:
    """The table of mechanisms, with the parts that rules name."""
    lines = []
    for kind, what in KINDS.items():
        named = dict.fromkeys(filled(r.component, {}) for r in rules() if r.kind == kind)
        parts = ", ".join(part for part in named if part and "{" not in part)
        lines.append(
            f'| <a id="{kind}"></a>`{kind}` | {what} | {parts or "the frame names it"} |\n'
        )
    return _MECHANISMS + "".join(lines)


def entry_lines(entry: Entry) -> Iterator[str]:
    """One entry, as ``diagnose show`` prints it."""
    yield f"{entry.id} ({entry.severity}, {releases(entry)}, {entry.sure})"
    yield f"  {entry.message}"
    for pattern in entry.patterns:
        yield f"  line:    {pattern.regex.pattern}"
    for asked in entry.settings:
        yield f"  setting: {asked.name.pattern}={asked.value.pattern}"
    for fix in entry.fixes:
        when = f"vLLM {fix.when}: " if fix.when is not None else ""
        yield f"  fix:     {when}{fix.text}"
    for example in entry.examples:
        if example.found:
            yield f"  example: {example.log.strip().splitlines()[-1]}"
    if entry.source:
        yield f"  see:     {entry.source}"


def entries_to_check(paths: Sequence[str]) -> list[Entry]:
    """The entries to check: from files and folders, or the whole catalogue.

    Raises:
        UsageError: a file is malformed or missing.
    """
    if not paths:
        return list(load_entries())
    files: list[Path] = []
    for given in paths:
        path = Path(given)
        inside = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not inside or not all(p.is_file() for p in inside):
            raise UsageError(f"no entry at {given}", hint="spark-build diagnose check FILE.toml")
        files += inside
    return [load_entry(path) for path in files]


def failed_examples(entries: Sequence[Entry]) -> list[FailedExample]:
    """Examples with another result than stated, and entries without examples."""
    failed = []
    for entry in entries:
        kinds = {example.found for example in entry.examples}
        for kind, what in ((True, "an example"), (False, "a near miss (found = false)")):
            if kind not in kinds:
                failed.append(FailedExample(entry.id, 0, f"{what} is missing"))
        # with the other entries, which must not match its line
        others = [e for e in load_entries() if e.id != entry.id]
        for number, example in enumerate(entry.examples, 1):
            if why := _missed(entry, example, [*others, entry]):
                failed.append(FailedExample(entry.id, number, why))
    return failed


def _missed(entry: Entry, example: Example, entries: Sequence[Entry]) -> str:
    result = diagnose(io.BytesIO(example.log.encode()), example.vllm or None, entries)
    hits = [finding for finding in result.findings if finding.id == entry.id]
    if not example.found:
        return f"a near miss is matched, line {hits[0].line}" if hits else ""
    if not hits:
        return "it is not matched"
    if hits[0].line != example.line:
        return f"it is matched in line {hits[0].line}, not {example.line}"
    if example.fix not in hits[0].fix:
        return f"the fix is {hits[0].fix!r}, without {example.fix!r}"
    return ""


# -------------------------------------------------------------------------------------- the command


#: Seconds without a new line after which the log is judged.
IDLE = 1.0
#: Pauses to wait after a failure without the server's end, because it may continue.
_PATIENCE = 30
_PIPE = "docker logs NAME 2>&1 | spark-build diagnose -"
_AGAIN = "when the server runs again, check its log: " + _PIPE


def read_logs(
    logs: Sequence[str], vllm: str | None, *, watch: bool = False, idle: float = IDLE
) -> list[Diagnosis]:
    """What each log shows; of several, the earliest failure first.

    Raises:
        UsageError: a log cannot be read, or ``--vllm`` is not a version.
    """
    if not logs and sys.stdin.isatty():
        raise UsageError("no log", hint=_PIPE)
    if (fd := _growing(logs, watch=watch)) is not None:
        results = watched(fd, vllm, _say, idle=idle)
    else:
        results = _read(logs or ["-"], vllm)
    if len(results) < 2 or not any(result.is_log for result in results):
        return results
    return earliest_failure_first(results)


def refuse_no_log(logs: Sequence[str], results: Sequence[Diagnosis]) -> None:
    """Refuse files without any log.

    Raises:
        UsageError: names each file with the reason.
    """
    if any(result.is_log for result in results):
        return
    only = logs[0] if logs and logs[0] != "-" else "standard input"
    reasons = [f"{result.file or only}: {result.verdict.sentence}" for result in results]
    raise UsageError("\n  ".join(reasons) or "it contains no log", hint=_PIPE)


def _growing(logs: Sequence[str], *, watch: bool) -> int | None:
    """The log to follow: a pipe, or one file with ``--watch``."""
    if len(logs) > 1 and watch:
        raise UsageError("--watch reads one log", hint="spark-build diagnose server.log --watch")
    if logs and logs[0] != "-":
        return os.open(logs[0], os.O_RDONLY) if watch and Path(logs[0]).is_file() else None
    try:
        fd = sys.stdin.fileno()
    except (OSError, ValueError):  # a stream of a test
        return None
    return fd if stat.S_ISFIFO(os.fstat(fd).st_mode) else None


def _say(finding: Finding) -> None:
    console.say(f"  line {finding.line}: {finding.id}: {finding.quote[:200]}")


def _read(logs: Sequence[str], vllm: str | None) -> list[Diagnosis]:
    standard = Source("standard input", lambda: contextlib.nullcontext(sys.stdin.buffer))
    results = []
    for source in [standard] if list(logs) == ["-"] else sources_at(logs):
        try:
            with source.open() as stream:
                results += [
                    (name, result)
                    for name, text in texts(stream, source.name)
                    for result in diagnoses(text, vllm)
                ]
        except OSError as error:
            raise UsageError(
                f"cannot read {source.name}: {error.strerror or error}",
                hint=os_hint(error, _PIPE),
            ) from None
    if len(results) == 1:
        return [results[0][1]]
    return [result.in_log(name) for name, result in results]


def refuse_failed(results: Sequence[Diagnosis]) -> None:
    """Refuse logs that show a failure.

    Raises:
        SparkBuildError: a log shows a failure, or a start that does not finish (exit 5).
    """
    findings = [f for result in results for f in result.findings if f.severity == "error"]
    if wrong := list(dict.fromkeys(f.id for f in findings)):
        search = next((f.search for f in findings if f.search), "")
        known = next((f.id for f in findings if not f.search), "")
        hint = (
            f"spark-build diagnose show {known}"
            if known
            else f"search the issues of the engine for: {search}"
        )
        what = "the log shows" if len(results) == 1 else "the logs show"
        raise SparkBuildError(f"{what} {', '.join(wrong)}", Exit.VERIFY_FAILED, hint)
    state = results[0].verdict.state if len(results) == 1 else verdict(results).state
    if state in ("failed", "stopped", "unclear"):
        was_ready = len(results) == 1 and results[0].ready
        what = "the server is not healthy" if was_ready else "the server did not become ready"
        if len(results) == 1 and "not known" in results[0].verdict.sentence:
            what = "nothing shows that the server generates"
        raise SparkBuildError(what, Exit.VERIFY_FAILED, _AGAIN)


def check_entries(names: Sequence[str]) -> str:
    """Run the examples of catalogue entries, and say how many passed.

    Raises:
        SparkBuildError: one fails (exit 5); each is printed.
    """
    entries = entries_to_check(names)
    wrong = failed_examples(entries)
    for entry, example, why in wrong:
        tell(f"{entry}: {f'example {example}: ' if example else ''}{why}")
    if wrong:
        raise SparkBuildError(
            f"{len(wrong)} examples of {len(entries)} entries fail",
            Exit.VERIFY_FAILED,
            "fix the entry, then run: spark-build diagnose check FILE.toml",
        )
    count = sum(len(entry.examples) for entry in entries)
    return f"{len(entries)} entries, {count} examples: all pass"


class Live(io.RawIOBase):
    """A pipe or a growing file; ``waiting`` is called at every pause, and tells if it ended."""

    def __init__(self, fd: int, waiting: Callable[[], bool], *, idle: float = IDLE) -> None:
        self.fd, self.waiting, self.idle = fd, waiting, idle
        self.grows = stat.S_ISREG(os.fstat(fd).st_mode)
        self.ended = False

    def readable(self) -> bool:
        return True

    def first(self) -> bytes:
        """The data available immediately, up to a sample's size."""
        data = b""
        while len(data) < SAMPLE and (piece := self._now(SAMPLE - len(data))):
            data += piece
        return data

    def _now(self, size: int) -> bytes:
        """The data that arrives within the pause."""
        if not self.grows and not select.select([self.fd], [], [], self.idle)[0]:
            return b""
        data = os.read(self.fd, size)
        if not data and self.grows:
            time.sleep(self.idle)
            data = os.read(self.fd, size)
        elif not data:
            self.ended = True
        return data

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self.ended:
            if data := self._now(len(buffer)):
                buffer[: len(data)] = data
                return len(data)
            self.ended = self.ended or self.waiting()
        return 0


class LiveResult(NamedTuple):
    """Findings printed while the log grew, and the number of pauses."""

    findings: set[tuple[str, int]]
    pauses: list[int]


def watched(
    fd: int,
    vllm: str | None,
    say: Callable[[Finding], None],
    *,
    idle: float = IDLE,
) -> list[Diagnosis]:
    """Read a log until it ends, or its server is ready or dead; ``say`` gets findings at once.

    An archive in a pipe can hold several logs.
    """
    log, entries = Log(), load_entries()
    told = LiveResult(set(), [])

    def waiting() -> bool:
        log.flush()
        partial = judged(log, entries, vllm)
        for finding in [each for one in partial for each in one.findings]:
            if (finding.id, finding.line) not in told.findings and finding.severity != "info":
                told.findings.add((finding.id, finding.line))
                say(finding)
        states = {one.verdict.state for one in partial}
        if states == {"ready"}:
            return True
        if worst(partial).verdict.state != "failed":
            return False
        told.pauses.append(1)
        return len(told.pauses) >= _PATIENCE or log.broken()

    live = Live(fd, waiting, idle=idle)
    start = live.first()
    whole = joined(start, cast("BinaryIO", live))
    results: list[Diagnosis] = []
    for number, (name, stream) in enumerate(texts(whole, "standard input")):
        if number:
            in_log = diagnoses(stream, vllm, entries)
        else:
            in_log = diagnoses(stream, vllm, entries, log=log, live=not live.ended)
        results += [result.in_log(name) for result in in_log]
    return results if len(results) > 1 else [results[0].in_file("")]
