"""Finds every fatal event of a log, with the root cause first, in the catalogue or not.

Events come from :mod:`tracebacks` and from the table in :mod:`failureforms`.  The root
is chosen at the end: events that the server survived are not failures, consequences
of another process's death come last, and the earliest of the others is the root.
"""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from builder.diagnose.lines import when
from builder.diagnose.servers import SERVICE, NumberedLine, ServerState
from builder.diagnose.tracebacks import LoggedException, Tracebacks, failure_location, search_phrase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.diagnose.lines import Line


class Form(NamedTuple):
    """One form: the kind of failure, and the text.  ``weak`` ones are only symptoms."""

    kind: str
    regex: re.Pattern[str]
    weak: bool = False


def _form(kind: str, *patterns: str, weak: bool = False) -> Form:
    return Form(kind, re.compile("|".join(f"(?:{p})" for p in patterns)), weak)


FORMS = (
    _form(
        "the kernel",
        r"NVRM: Xid \(",
        r"NVRM: GPU .{0,60}(?:has fallen off the bus|lost)",
        r"[Oo]ut of memory: Kill(?:ed)? process \d+",
        r"oom-kill:constraint=",
        r"\b(?:segfault at|general protection fault|traps: \S+ trap)",
        r"Kernel panic - not syncing",
        r"AMD-Vi: .*IO_PAGE_FAULT",
        r"task \S+ blocked for more than \d+ seconds",
    ),
    _form(
        "a C++ exception",
        r"terminate called (?:after throwing|without an active exception|recursively)",
        r"libc\+\+abi: terminating",
        r"^\s*what\(\):\s+\S",
    ),
    _form(
        "a signal",
        r"Fatal Python error: ",
        r"\*\*\* (?:Process received signal|SIG[A-Z]+ (?:received|\(@))",
        r"Segmentation fault",
        r"\bSIG(?:SEGV|ABRT|BUS|ILL|FPE)\b(?! handler)",
        r"Caught signal \d+",
        r"(?:Bus error|Illegal instruction|Aborted|Floating point exception) ?\(core dumped\)",
        r"^\*\*\* stack smashing detected|^(?:free|munmap_chunk|malloc|realloc)\(\): "
        r"|^double free or"
        r"|^malloc_consolidate\(\)|^corrupted (?:size|double)",
        r"^!!!!!!! Segfault encountered",
    ),
    _form(
        "a compiler",
        r"^(?:\S+:\d+(?::\d+)?|\S+\(\d+\)|nvcc|cc1plus|cicc|clang|gcc|g\+\+|ld|nvlink|cudafe\+\+)"
        r"\s*:? (?:fatal )?error\s*(?::|#\d|\w\d+:)",
        r"^\s*ptxas .{0,80}\b(?:fatal|error)\b",
        r"^\s*nvcc fatal\b",
        r"^error: (?:static assertion|identifier|no (?:instance|matching)|unrecognized|#error)",
        r"(?:collect2|ld): error: |undefined reference to [`']",
        r"^CMake Error\b",
        r"NVRTC_ERROR_\w+",
        r"\bLLVM ERROR: ",
        r"^error\[E\d{4}\]: ",
    ),
    _form("a compiler", r"^FAILED: ", r"^ninja: (?:build stopped|error|fatal)", weak=True),
    _form("a compiler", r"^g?make(?:\[\d+\])?: \*\*\* ", r"^error: could not compile", weak=True),
    _form(
        "the loader",
        r"error while loading shared libraries:",
        r"symbol lookup error:",
        r"\bundefined symbol: ",
        r"cannot open shared object file",
        r"version `[\w.]+' not found",
        r"exec(?: user process caused:? ?\"?|\s\S+: )?(?:exec )?format error",
    ),
    _form(
        "an assertion",
        r"Assertion [`'].{1,400}['`] failed",
        r"\bGGML_ASSERT\(",
        r"Assertion failed: ",
        r"^Assertion error \(",
    ),
    _form(
        "Rust or Go",
        r"^thread '.{0,80}'(?: \(\d+\))? panicked at",
        r"^panic: ",
        r"^fatal error: (?:all goroutines|unexpected signal|runtime)",
    ),
    _form(
        "the container engine",
        r"[Ee]rror response from daemon:",
        r"OCI runtime (?:create|exec|start) failed",
        r"could not select device driver",
        r"nvidia-container-cli: ",
        r"failed to (?:create|start) (?:shim|containerd) task",
        r"failed to solve: |ERROR: failed to build",
        r"exec: \"[^\"]+\": (?:executable file not found|stat|permission denied)",
    ),
    _form(
        "Kubernetes",
        r"\b(?:CrashLoopBackOff|OOMKilled|ImagePullBackOff|ErrImagePull|CreateContainerConfigError"
        r"|RunContainerError|FailedScheduling|FailedMount|ContainerCannotRun)\b",
        r"\b(?:Liveness|Startup) probe failed",
        r"\bEvicted\b.*\b(?:memory|disk|node)\b|The node was low on resource",
        r"\d+/\d+ nodes are available: .*Insufficient",
    ),
    _form(
        "the command line",
        r"^(?!usage)\S[^:]{0,60}: error: (?:argument|the following|unrecognized|ambiguous|invalid)",
        r"^error: (?:unexpected argument|invalid value|unrecognized|unknown|the following)",
        r"^(?:\S*/)?(?:ba|z|da)?sh:(?: line)?(?: \d+:)? \S.*(?:not found|No such|denied|cannot)",
        r"^\S*(?:entrypoint|start|run|serve)\S*(?:\.sh)?: (?:line \d+|\d+): ",
        r"^exec \S+: (?:no such file|exec format error|permission denied)",
        r"^(?:python3?|/\S+/python3?): (?:can't open file|No module named)",
    ),
    _form(
        "systemd",
        r"Main process exited, code=(?:killed|dumped|exited, status=[1-9])",
        r"killed by the OOM killer|Failed with result 'oom-kill'",
        weak=True,
    ),
    _form(
        "systemd",
        r"Failed to start .{1,80}\.$|Failed to start \S+\.service|Start request repeated"
        r"|Failed with result '(?!oom)",
        weak=True,
    ),
    _form(
        "CUDA",
        r"\bCUDA (?:driver )?error\b(?! checking)",
        r"\bcudaError[A-Z]\w+",
        r"\bCUDA_ERROR_[A-Z_]+",
        r"\bCU(?:BLAS|DNN|SPARSE|SOLVER|FFT)_STATUS_(?!SUCCESS)[A-Z_]+",
        r"CUDA failure \d+|Cuda failure",
        r"Failed to initialize NVML",
        r"CUTLASS_?.{0,40}Error Internal|Error Internal\b",
        weak=True,
    ),
    _form(
        "NCCL",
        r"\bNCCL WARN (?!.*(?:NCCL_IB_HCA|deprecated|MNNVL|Missing))",
        r"\bnccl(?:System|Internal|UnhandledCuda|Remote|InvalidUsage|InvalidArgument)Error",
        r"Watchdog caught collective operation timeout",
        r"\bWatchdog timeout \(",
        weak=True,
    ),
    _form(
        "the network",
        r"gloo/transport/.{0,120}(?:Timed out|Connection|error|refused)",
        r"\[c10d\].{0,300}(?:timed out after|failed to connect|Connection re)",
        weak=True,
    ),
    _form(
        "MPI",
        r"MPI_ABORT was invoked",
        r"mpirun noticed that process rank",
        r"Primary job +terminated normally, but",
        r"srun: error: ",
        weak=True,
    ),
    _form(
        "an exit",
        r"\b(?:exited|exit|terminated|died|failed|finished) (?:with|by) "
        r"(?:non-zero )?(?:exit )?(?:code|status|signal):? ?(?!0\b)-?\d+",
        r"\bExited \((?!0\))\d+\)",
        r"died with <Signals\.",
        r"returned (?:a )?non-zero (?:exit )?(?:code|status)",
        r"^(?:\S+: line \d+:\s+\d+ )?Killed\b(?:\s|$)",
        r"\bsignal (?:9|11|6|15)\b|signal: killed|SIGKILL",
        r"died unexpectedly|exited unexpectedly|Container .{0,60} exited|exitCode=(?!0\b)\d+",
        weak=True,
    ),
    _form(
        "an error",
        r"^\s*Value error, \S",
        r"^(?:Error|ERROR|error|fatal|FATAL|Fatal)(?: \w+)?: \S",
        r"^(?:llama_\w+|ggml_\w+|gguf_\w+|common_\w+|srv +\w+|main) ?: .*(?:error|failed|unable)",
        r"^.{0,40}\b(?:No space left on device|Cannot allocate memory|Address already in use)\b",
        r"^[EF] ?\d{0,4}\b.*\bfailed\b",
        r"\b(?:Permission denied|Connection refused|No route to host|Read-only file system)\b",
        weak=True,
    ),
)

#: Consequences of a failure elsewhere: in another process, on another node.
FOLLOWERS = re.compile(
    r"Engine core initialization failed"
    r"|EngineCore failed to start|EngineDead|engine is dead"
    r"|EngineCore encountered (?:an issue|a fatal error)|EngineCore hit an exception"
    r"|WorkerProc (?:initialization failed|hit an exception)|Worker proc \S+ died|Executor failed"
    r"|RPC call to \w+ timed out|shared memory broadcast block|Failed core proc\(s\): \{\}"
    r"|ActorDied|ActorUnavailable|WorkerCrashedError|OwnerDiedError|RayChannelError"
    r"|ChildFailedError|ProcessExitedException|ProcessRaisedException"
    r"|Received sigquit from a child|kill_process_tree|Child process .{0,40}(?:died|failed)"
    r"|BrokenPipeError|EOFError|ConnectionResetError|IncompleteReadError"
    r"|Connection (?:reset|closed) by (?:remote )?peer"
    r"|ncclRemoteError|DistBackendError: NCCL error.{0,200}(?:remote process|peer)"
    r"|Socket (?:recv|send).{0,60}(?:failed|reset)|remote process exited|peer .{0,40}closed"
    r"|CancelledError|SystemExit|KeyboardInterrupt|ZMQError|cancelled due to|Cancelled"
    r"|Watchdog (?:caught|timeout)|AsyncLLM output_handler failed|sched_yield"
    r"|[Pp]rocess group .{0,60}(?:abort|terminat)|To avoid data inconsistency"
    r"|got fatal signal from worker"
    r"|Timed out waiting for engine core|See (?:stack trace|root cause) (?:\(above\)|above)"
    r"|SIGTERM received|Broadcast.{0,40}timed out|Heartbeat monitor"
    r"|mpirun noticed|Primary job|exited with code|died unexpectedly"
)

#: Wrappers without information: the wrapped error is elsewhere in the log, or in their text.
WRAPPERS = re.compile(
    r"device-side assert triggered|Worker failed with error "
    r"|^(?:ray::"
    r"|Capture cuda graph failed|Ninja build failed|Error building extension|Command .{0,4000}"
    r"returned non-zero|unhandled errors in a TaskGroup|-- Process \d+ terminated)"
)

#: Lines that look like failures and are not: attempts that the program can do without.
HARMLESS = re.compile(
    r"[Ss]kipping tactic|[Ss]kipp(?:ed|ing)\b.{0,80}(?:due to|because|tactic|unsupported)"
    r"|Ignore import error|[Ee]xception ignored in|ignored exception|[Ff]all(?:ing|s)?[- ]?back"
    r"|destroy_process_group\(\) was not called|Unexpected error during package walk"
    r"|\b(?:0|no) errors?\b|errors?[=:] ?0\b|[Rr]etrying|[Ww]ill retry|retry in|nvCheckOkFailed"
    r"|Dumping (?:input data|scheduler)|leaked (?:shared_memory|semaphore)"
    r"|error_code=None|on_error=|errors='"
)


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
    "nsupported",
    ".exc.",
    "imed out",
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
#: Equal exceptions that are kept whole, and maximum number of different events to count.
_SAME = 4
_TIMES = 4096
_LOUD = ("ERROR", "CRITICAL", "FATAL")
_QUIET = ("INFO", "DEBUG", "WARNING", "WARN")
#: Maximum length of a line that is searched for a failure.
SEARCHED = 8000
#: How many lines before a failure a warning belongs to it.
_NEAR = 30
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

    #: its traceback goes through the handler of a request
    handled: bool = False
    #: how often it occurred in this attempt
    times: int = 1

    @property
    def key(self) -> str:
        """By which it was counted."""
        return self.counted or f"{self.kind}: {self.quote}"

    #: the line of code that failed, of an exception without a text
    code: str = ""
    #: an exception's name and text
    counted: str = ""


_WARNS = re.compile(
    r"[Ww]arn|WARN|rror|ailed|annot|not (?:found|supported|enough|valid)|nsupported"
)


#: A process whose signal is named was ended by it, whatever else the line says.
SIGNALLED = re.compile(
    r"Failed core proc\(s\): \{[^}]{0,200}: -\d"
    r"|exited with (?:exit )?code:? (?:137|139|134|135|132|-\d)\b"
)
#: After these a process computes no more, whatever its API server still answers.
LETHAL = re.compile(
    r"illegal memory access|illegal instruction|device-side assert|misaligned address"
    r"|unspecified launch failure|EngineDead|engine is dead|Engine core initialization failed"
    r"|Failed core proc|EngineCore encountered|WorkerProc hit an exception|died unexpectedly"
)
#: Frames of a server that handles a request.
_HANDLER = re.compile(
    r"entrypoints/(?:openai|anthropic|serve|pooling)/(?!api_server|cli_args|server_utils|launcher)"
    r"|/(?:starlette|fastapi|uvicorn/protocols)/|serving_\w+\.py|managers/tokenizer_manager"
    r"|http_server\.py|engine/serving"
)
_VALIDATION = re.compile(r"\bvalidation errors? for ")
_OWN_TEXT = re.compile(
    r"^(?:Value error|Assertion failed), |^Input should be |^[A-Z][a-z]+ .{0,160}\[type="
)
_VALUE_ERROR = re.compile(r"(?:Value error|Assertion failed), .+?(?= \[type=|$)")
_NO_MEMORY = re.compile(r"NVRM: .{0,300}NV_ERR_NO_MEMORY")


def _follows(text: str) -> bool:
    return bool(FOLLOWERS.search(text)) and not SIGNALLED.search(text)


def _plain(text: str) -> str:
    return re.sub(r"[\d\s]+|0x[0-9a-f]+", "", text[:400])[:160]


@dataclass
class Failures:
    """Collects events while a log is read."""

    course: ServerState = field(default_factory=ServerState)
    events: list[Failure] = field(default_factory=list)
    exceptions: list[LoggedException] = field(default_factory=list)
    #: how often each event occurred, and where last
    times: dict[str, int] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=dict)
    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    _recent: collections.deque[NumberedLine] = field(
        default_factory=lambda: collections.deque(maxlen=12)
    )
    _before: dict[int, NumberedLine] = field(default_factory=dict)
    #: the last line with a time
    _head: str = ""
    _when: dict[int, str] = field(default_factory=dict)
    _harmless: dict[str, int] = field(default_factory=dict)
    #: lines of the driver about memory: the first one, and their number
    no_memory: NumberedLine | None = None
    no_memory_lines: int = 0

    def feed(self, line: Line) -> None:
        """Read one line."""
        if len(line.text) > SEARCHED:
            line = line._replace(text=line.text[:SEARCHED])
        text = line.text
        self.course.feed(line)
        if ":" in line.head:
            self._head = line.head
        if "NVRM" in text and _NO_MEMORY.search(text):
            self.no_memory_lines += 1
            self.no_memory = self.no_memory or NumberedLine(line.number, text[:QUOTED])
        quiet = line.level in ("INFO", "DEBUG") and "kip" not in text and "gnor" not in text
        if line.source in self.tracebacks.states or (
            not quiet and any(smell in text for smell in _SMELLS)
        ):
            if not SERVICE.search(text) and self._event(line):
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
        if line.level in _QUIET and "[c10d]" not in text:
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
        if self._again(f"{found.name}: {found.text}", found.line) <= _SAME or found.cause:
            self.exceptions.append(found)
            if len(self.exceptions) > _KEPT:  # the first ones, and the last ones
                del self.exceptions[_KEPT // 2]

    def _again(self, text: str, line: int) -> int:
        """Count an event; returns how often it occurred so far."""
        key = _plain(text)
        if key not in self.times and len(self.times) >= _TIMES:
            self.times.clear()
            self._last.clear()
        self.times[key] = self.times.get(key, 0) + 1
        self._last[key] = line
        return self.times[key]

    def _note(self, event: Failure, line: Line) -> None:
        if self._again(f"{event.kind}: {event.quote}", event.line) > 1:
            return
        event.source, event.level = line.source, line.level
        event.when = when(self._head)
        event.follower = _follows(event.quote)
        event.before = self._matters(event.line, event.source)
        self.events.append(event)
        if len(self.events) > _KEPT:  # the first ones, and the last ones
            del self.events[_KEPT // 2]

    def _matters(self, line: int, source: str) -> NumberedLine | None:
        """The last relevant line before an event: a warning, or the stage."""
        own = last = None
        for noted in reversed(self._recent):
            if noted.line >= line or FOLLOWERS.search(noted.text):
                continue
            if line - noted.line <= _NEAR and _WARNS.search(noted.text):
                return noted
            last = last or noted
            own = own or (noted if noted.source == source else None)
        return own or last

    def with_others(self, others: Sequence[Failures]) -> Failures:
        """The same with the events of other nodes of the same server."""
        every = [self, *others]
        return Failures(
            course=self.course.with_others([o.course for o in others]),
            events=sorted((e for f in every for e in f.events), key=lambda e: e.line),
            exceptions=sorted((e for f in every for e in f.exceptions), key=lambda e: e.line),
            times={key: n for f in every for key, n in f.times.items()},
            _last={key: n for f in every for key, n in f._last.items()},
            _before={key: n for f in every for key, n in f._before.items()},
            _when={key: n for f in every for key, n in f._when.items()},
            no_memory=self.no_memory,
            no_memory_lines=self.no_memory_lines,
        )

    def dead(self) -> bool:
        """Whether the log shows that the server ended, not only a failure."""
        kinds = {"a signal", "a C++ exception", "an exit", "systemd", "the command line"}
        return any(not f.survived and (f.follower or f.kind in kinds) for f in self.failures())

    # ---------------------------------------------------------------------------------- at the end

    def failures(self) -> list[Failure]:
        """All events, root cause first; survived ones are marked."""
        found = self._events()
        for failure in found:
            key = _plain(failure.key)
            failure.times = self.times.get(key, 1)
            failure.end = max(failure.end, self._last.get(key, 0))
        lethal = max((f.line for f in found if LETHAL.search(f.quote)), default=0)
        for failure in found:
            failure.survived = self._survives(failure, found, lethal)
        found += self._hangs(found)
        _weaken_wrappers(found)
        found.sort(key=lambda f: (f.survived, f.kind == "an error", f.follower, f.weak, f.line))
        kept: dict[tuple[str, str], Failure] = {}
        for failure in found:  # the same from another rank, or printed again, counts once
            kept.setdefault((failure.kind, _plain(failure.quote)), failure)
        return list(kept.values())

    def _events(self) -> list[Failure]:
        """Exceptions with their chains, and the other events that are not part of one."""
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
        return found

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
            (not chain[at + 1].direct and chain[at].short in _LOOKUPS) or _follows(chain[at].quote)
        ):
            at += 1
        root = chain[at]
        before = self._before.get(id(chain[0])) or self._before.get(id(root))
        frame, code = failure_location(root.frames), ""
        if not root.text and root.frames and root.frames[-1].code:
            before = NumberedLine(root.line, root.frames[-1].code, root.source)
            code = root.frames[-1].code
        quote = root.quote
        if not root.text.strip() and root.more:
            quote = f"{quote} {root.more[0]}"
        if _VALIDATION.search(root.text):  # pydantic's own text is in a later line
            quote = next((m for m in root.more if _OWN_TEXT.search(m)), quote)
            if match := _VALUE_ERROR.search(quote):
                quote = match[0]
        follower = _follows(f"{root.name}: {root.text[:2000]}") or bool(
            root.more and not root.text and _follows(root.more[0])
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
            code=code,
            counted=f"{root.name}: {root.text}",
            message=root.message[:4000],
            more=tuple(m[:QUOTED] for m in root.more if not _BOILERPLATE.search(m))[:3],
            weak=bool(WRAPPERS.search(root.text) or SIGNALLED.search(root.text)) or root.inner,
            handled=any(_HANDLER.search(f.path) for e in chain for f in e.frames),
            follower=follower,
            lines=frozenset(
                n for e in chain for n in range(e.start, min(e.end, e.start + 2000) + 1)
            ),
            search=search_phrase(self.course.wrote(), root.short, quote, frame),
        )

    def _survives(self, failure: Failure, found: list[Failure], lethal: int) -> bool:
        """Whether the program went on; ``lethal`` is the last line that ends it anyway."""
        course = self.course
        if lethal >= failure.line:
            return course.up > max(failure.end, lethal)
        followers = [f.line for f in found if f.follower and f.line >= failure.line]
        # later requests succeed, or it was restarted
        if course.ready > failure.end and course.ready > max(followers, default=0):
            return True
        if failure.kind in ("NCCL", "an error") and course.ready > failure.line:
            return True
        if failure.source and failure.level != "CRITICAL":
            return course.after(failure.source, failure.end) >= _PROGRESS
        return course.alive > failure.end and not followers


_BUILDS = re.compile(r"[Nn]inja|nvcc|compil|build|non-zero exit status")


def _weaken_wrappers(found: list[Failure]) -> None:
    """Mark exceptions that say that something did not compile, if a compiler says why."""
    if not any(f.kind == "a compiler" and not f.weak for f in found):
        return
    for failure in found:
        if failure.name and _BUILDS.search(failure.quote + failure.message[:2000]):
            failure.weak = True


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
