"""Finds every fatal event of a log, with the root cause first, in the catalogue or not.

Events come from :mod:`tracebacks` and from the table in :mod:`failureforms`.  The root
is chosen at the end: events that the server survived are not failures, consequences
of another process's death come last, and the earliest of the others is the root.
"""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from builder.diagnose.failureforms import FOLLOWERS, FORMS, HARMLESS, WRAPPERS
from builder.diagnose.frames import failure_location, search_phrase
from builder.diagnose.serverstate import NumberedLine, ServerState
from builder.diagnose.times import when
from builder.diagnose.tracebacks import LoggedException, Tracebacks

if TYPE_CHECKING:
    from builder.diagnose.reading import Line

#: Texts, one of which is in every line that a form or a traceback can match.
_SMELLS = (
    "rror",
    "xcept",
    'File "',
    "Traceback",
    "ailed",
    "FAILED",
    "atal",
    "FATAL",
    "ill",
    "SIG",
    "signal",
    "egment",
    "xit",
    "Xid",
    "NVRM",
    "NCCL",
    "panic",
    "bort",
    "ABORT",
    "what()",
    "terminate",
    "undefined",
    "not found",
    "denied",
    "No such",
    "core dumped",
    "ssert",
    "():",
    "nterrupt",
    "OOM",
    "stopped",
    "imeout",
    "STATUS_",
    "BackOff",
    "Failed",
    "shared object",
    "container",
    "blocked for",
    "FAULT",
    "corrupt",
    "smashing",
    "Died",
    "nodes are",
    "refused",
    "No space",
    "No route",
    "Read-only",
    "allocate memory",
    "in use",
    "device driver",
    "Evicted",
    "low on resource",
    "***",
    "traps:",
    "lost",
)
#: Maximum number of kept events and other lines.
_KEPT = 256
_LOUD = ("ERROR", "CRITICAL", "FATAL")
_QUIET = ("INFO", "DEBUG", "WARNING", "WARN")
#: Maximum length of a quoted line.
QUOTED = 600
#: Progress lines of the same process that show that it survived an exception.
_PROGRESS = 3


@dataclass
class Failure:
    """One event that ended a process, or seems to."""

    kind: str
    line: int
    end: int
    quote: str
    source: str = ""
    level: str = ""
    #: the relevant line before it
    before: NumberedLine | None = None
    #: the innermost relevant frame
    frame: str = ""
    #: the exceptions raised from it, in order
    became: tuple[NumberedLine, ...] = ()
    name: str = ""
    message: str = ""
    #: further relevant lines of it
    more: tuple[str, ...] = ()
    weak: bool = False
    follower: bool = False
    #: how the program continued
    survived: bool = False
    #: all lines of the event, for matching with the catalogue
    lines: frozenset[int] = frozenset()
    #: MM-DD HH:MM:SS
    when: str = ""
    search: str = ""

    def same_as(self, other: Failure) -> bool:
        """Whether it is the same event: from another rank, or printed again."""
        return (self.kind, _plain(self.quote)) == (other.kind, _plain(other.quote))


_WARNS = re.compile(
    r"[Ww]arn|WARN|rror|ailed|annot|not (?:found|supported|enough|valid)|nsupported"
)


def _plain(text: str) -> str:
    return re.sub(r"[\d\s]+|0x[0-9a-f]+", "", text)[:160]


@dataclass
class Failures:
    """Collects events while a log is read."""

    course: ServerState = field(default_factory=ServerState)
    events: list[Failure] = field(default_factory=list)
    exceptions: list[LoggedException] = field(default_factory=list)
    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    _recent: collections.deque[NumberedLine] = field(
        default_factory=lambda: collections.deque(maxlen=12)
    )
    _before: dict[int, NumberedLine] = field(default_factory=dict)
    #: the last line with a time
    _head: str = ""
    _when: dict[int, str] = field(default_factory=dict)
    _harmless: dict[str, int] = field(default_factory=dict)

    def feed(self, line: Line) -> None:
        """Read one line."""
        text = line.text
        self.course.feed(line)
        if ":" in line.head:
            self._head = line.head
        quiet = line.level in ("INFO", "DEBUG") and "kip" not in text and "gnor" not in text
        if line.source in self.tracebacks.states or (
            not quiet and any(smell in text for smell in _SMELLS)
        ):
            if self._event(line):
                return
        elif line.level in _LOUD:
            self._note(
                Failure("an error", line.number, line.number, text[:QUOTED], weak=True), line
            )
        if text[:1] not in " \t^~":
            self._recent.append(NumberedLine(line.number, text[:QUOTED], line.source))
        if self.exceptions or self.events or self.course.waits:
            self.course.goes_on(line)

    def _event(self, line: Line) -> bool:
        """Record a failure; returns whether the line is part of one."""
        text = line.text
        if HARMLESS.search(text) and line.level != "CRITICAL":
            self._harmless[line.source] = line.number
            return False
        found, part = self.tracebacks.feed(line)
        if found is not None:
            quiet = self._harmless.get(found.source, -9)
            if not found.start - 2 <= quiet <= found.line and found.level not in _QUIET:
                self._found(found)
            return True
        if part and self.tracebacks.inside(line):
            return True
        if line.level in _QUIET:
            return False
        for form in FORMS:
            if form.regex.search(text):
                event = Failure(form.kind, line.number, line.number, text.strip()[:QUOTED])
                event.weak = form.weak
                self._note(event, line)
                return True
        if line.level in _LOUD and not part:
            self._note(
                Failure("an error", line.number, line.number, text[:QUOTED], weak=True), line
            )
        return part

    def _found(self, found: LoggedException) -> None:
        if before := self._matters(found.start, found.source):
            self._before[id(found)] = before
        self._when[id(found)] = when(self._head)
        if len(self.exceptions) < _KEPT:
            self.exceptions.append(found)

    def _note(self, event: Failure, line: Line) -> None:
        event.source, event.level = line.source, line.level
        event.when = when(self._head)
        event.follower = bool(FOLLOWERS.search(event.quote))
        event.before = self._matters(event.line, event.source)
        if len(self.events) < _KEPT and not any(event.same_as(e) for e in self.events[-40:]):
            self.events.append(event)

    def _matters(self, line: int, source: str) -> NumberedLine | None:
        """The last relevant line before an event: a warning, or the stage."""
        earlier = [n for n in self._recent if n.line < line and not FOLLOWERS.search(n.text)]
        near = [n for n in earlier if _WARNS.search(n.text) and line - n.line <= 30]
        own = [n for n in earlier if n.source == source]
        return next(iter((near or own or earlier)[-1:]), None)

    def dead(self) -> bool:
        """Whether the log shows that the server ended, not only a failure."""
        kinds = {"a signal", "a C++ exception", "an exit", "systemd", "the command line"}
        return any(not f.survived and (f.follower or f.kind in kinds) for f in self.failures())

    # ---------------------------------------------------------------------------------- at the end

    def failures(self) -> list[Failure]:
        """All events, root cause first; survived ones are marked."""
        causes = {id(e.cause) for e in self.exceptions if e.cause is not None}
        found = [self._failure(e) for e in self.exceptions if id(e) not in causes]
        covered = {n: failure.source for failure in found for n in failure.lines}
        events = []
        for event in self.events:
            source = covered.get(event.line)
            own = source == event.source and event.kind != "a compiler"
            if source is not None and (event.weak or own):
                continue
            event.lines = event.lines or frozenset({event.line})
            events.append(event)
        for event in _told(events):
            event.search = search_phrase(self.course.wrote(), event.kind, event.quote, event.frame)
            found.append(event)
        for failure in found:
            failure.survived = self._survives(failure, found)
        found += self._hangs(found)
        compiled = [f for f in found if f.kind == "a compiler" and not f.weak]
        if compiled:  # what failed to compile is the root of the exception that says so
            wraps = re.compile(r"[Nn]inja|nvcc|compil|build|non-zero exit status")
            for failure in found:
                if failure.name and wraps.search(failure.quote + failure.message[:2000]):
                    failure.weak = True
        found.sort(key=lambda f: (f.survived, f.kind == "an error", f.follower, f.weak, f.line))
        kept: list[Failure] = []
        for failure in found:
            if not any(failure.same_as(other) for other in kept):
                kept.append(failure)
        return kept

    def _hangs(self, found: list[Failure]) -> list[Failure]:
        """Waits that do not end, without another known cause."""
        if any(not f.survived and not f.weak for f in found):
            return []
        kept = self.course.hang()
        if not kept:
            return []
        return [
            Failure(
                "a wait that does not end",
                kept[0].line,
                kept[-1].line,
                kept[0].text.strip()[:QUOTED],
                source=kept[0].source,
                follower=True,
                lines=frozenset(n.line for n in kept),
                search=search_phrase(self.course.wrote(), "", kept[0].text),
            )
        ]

    def _failure(self, tail: LoggedException) -> Failure:
        """An exception with its chain, as an event."""
        chain = tail.chain()
        at = 0
        while at < len(chain) - 1 and (
            (not chain[at + 1].direct and chain[at].short in _LOOKUPS)
            or FOLLOWERS.search(chain[at].quote)
        ):
            at += 1
        root = chain[at]
        before = self._before.get(id(chain[0])) or self._before.get(id(root))
        frame = failure_location(root.frames)
        if not root.text and root.frames and root.frames[-1].code:
            before = NumberedLine(root.line, root.frames[-1].code, root.source)
        quote = root.quote
        if not root.text.strip() and root.more:
            quote = f"{quote} {root.more[0]}"
        follower = bool(
            FOLLOWERS.search(f"{root.name}: {root.text[:2000]}")
            or (root.more and not root.text and FOLLOWERS.search(root.more[0]))
        )
        return Failure(
            kind="an exception",
            line=root.line,
            end=tail.end,
            quote=quote[:QUOTED],
            source=root.source,
            level=root.level,
            when=self._when.get(id(root), ""),
            before=before,
            frame=frame,
            became=tuple(NumberedLine(e.line, e.quote[:QUOTED], e.source) for e in chain[at + 1 :]),
            name=root.short,
            message=root.message[:4000],
            more=tuple(m[:QUOTED] for m in root.more if not _BOILERPLATE.search(m))[:3],
            weak=bool(WRAPPERS.search(root.text)) or root.inner,
            follower=follower,
            lines=frozenset(
                n for e in chain for n in range(e.start, min(e.end, e.start + 2000) + 1)
            ),
            search=search_phrase(self.course.wrote(), root.short, quote, frame),
        )

    def _survives(self, failure: Failure, found: list[Failure]) -> bool:
        course = self.course
        followers = [f.line for f in found if f.follower and f.line >= failure.line]
        # later requests succeed, or it was restarted
        if course.ready > failure.end and course.ready > max(followers, default=0):
            return True
        if failure.kind in ("NCCL", "an error") and course.ready > failure.line:
            return True
        if failure.source and failure.level != "CRITICAL":
            return course.after(failure.source, failure.end) >= _PROGRESS
        return course.alive > failure.end and not followers


#: What PyTorch adds to every CUDA error.
_BOILERPLATE = re.compile(
    r"CUDA kernel errors might be|For debugging consider|Compile with `TORCH_USE|^Search for `cuda"
    r"|For further information visit https"
)
#: Lookup errors that programs convert to an exception that names what is missing.
_LOOKUPS = frozenset(
    {"KeyError", "IndexError", "StopIteration", "LookupError", "Empty", "StopAsyncIteration"}
)


def _told(events: list[Failure]) -> list[Failure]:
    """Events, with ``what()`` joined to the preceding ``terminate``."""
    found: list[Failure] = []
    for event in events:
        if (
            event.quote.lstrip().startswith("what():")
            and found
            and found[-1].quote.startswith(("terminate called", "libc++abi"))
        ):
            found[-1].quote = f"{found[-1].quote} {event.quote.strip()}"[:QUOTED]
            found[-1].lines |= event.lines
            continue
        found.append(event)
    return found
