"""Finds every fatal event of a log, with the root cause first, and what made it fail.

Events are Python tracebacks (chains, frames, the exception that each ends with) and the forms in
``FORMS``.  Lines of several processes may be interleaved, so each process is read separately; a
paste may have lost indentation, or its first lines.

The root is chosen at the end: events that the server survived are not failures, consequences of
another process's death come last, and the earliest of the others is the root.

The mechanism of a failure is what its message says, by rules that are data
(``builder/data/mechanisms.toml``): the first one whose pattern is in the message decides.  The
entries know more of some failures; a mechanism is known of most.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec import Meta

from builder.common.document import Part, Text, always, read
from builder.common.paths import package_file
from builder.diagnose.entries import whole_words
from builder.diagnose.logs import when
from builder.diagnose.servers import SERVICE, NumberedLine, ServerState, has_any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.diagnose.logs import Line


#: Packages where the cause is likely, then packages that only forward calls.
_OWN = (
    "vllm",
    "flashinfer",
    "sglang",
    "tensorrt_llm",
    "transformers",
    "cutlass",
    "nvidia_cutlass_dsl",
    "triton",
    "tilelang",
    "deep_gemm",
    "flash_attn",
    "b12x",
    "compressed_tensors",
    "huggingface_hub",
    "safetensors",
    "tvm_ffi",
    "ray",
)
#: Folders of generated code, which are below folders with a package's name.
_COMPILED = (".cache", "torch_compile_cache", "inductor_cache", ".triton")
_CARRIERS = ("torch", "pydantic", "uvloop", "asyncio", "contextlib", "multiprocessing", "importlib")
_INSTALLED = re.compile(r".*?(?:site-packages|dist-packages|lib/python3\.\d+)/")


def _short(path: str) -> str:
    """A path from its package on."""
    short = _INSTALLED.sub("", path)
    parts = short.split("/")
    starts = [
        at
        for at, part in enumerate(parts[:-1])
        if part in _OWN and parts[at + 1] not in ("python", "src")
    ]
    return "/".join(parts[starts[0] :]) if starts and short.startswith("/") else short


def _within(path: str, packages: Sequence[str]) -> bool:
    parts = _short(path).split("/")
    return not any(p in _COMPILED for p in parts) and any(p in packages for p in parts)


def failure_location(frames: Sequence[Frame]) -> str:
    """The innermost relevant frame."""
    inner = [f for f in reversed(frames) if not f.path.startswith("<")]
    for choice in (
        [f for f in inner if _within(f.path, _OWN) and not _within(f.path, ("uvloop",))],
        [f for f in inner if not _within(f.path, _CARRIERS)],
        inner,
    ):
        if choice:
            first = choice[0]
            where = f", in {first.where}" if first.where else ""
            return f"{_short(first.path)}, line {first.line}{where}"
    return ""


_VARIABLE = (
    (re.compile(r"\S*/\S+"), " "),  # paths and addresses
    (re.compile(r"\b0x[0-9a-fA-F]+\b|\b[0-9a-f]{12,}\b|\b[0-9a-f]{6,}(?:-[0-9a-f]{4,})+"), " "),
    (re.compile(r"\(pid=\d+\)|\[\d+\]"), " "),
    (re.compile(r"\b\d[\d.,:]{3,}\b"), " "),
    (re.compile(r"[\"'`\[\]{}()<>|=,]+|\.(?=\s|$)|:(?=\s|$)"), " "),
)


def search_phrase(engine: str, name: str, text: str, frame: str = "") -> str:
    """A search phrase for issue trackers: the constant words of a message."""
    for regex, put in _VARIABLE:
        text = regex.sub(put, text)
    words = [word for word in text.split() if word not in ("-", "--", ":", "#")]
    picked = words[:12]
    if name and name[:1].isupper() and not any(name in word for word in picked):
        picked.insert(0, name)
    if len(picked) < 5 and frame:
        picked += [frame.partition(",")[0].rpartition("/")[2], frame.partition(", in ")[2]]
    first = {"": "", "nim": "NIM", "tensorrt-llm": "TensorRT-LLM"}.get(engine, engine)
    return " ".join(word for word in (first, *picked) if word)


#: Maximum number of lines of a message.
MESSAGE_LINES = 24
#: Maximum number of processes to follow.
_SOURCES = 256

_BEGIN = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(
    r"^[\s|]*File [\"'](?P<path>[^\"']{1,400})[\"'],? line (?P<line>\d+)"
    r"(?:,? in (?P<where>.{1,120}))?"
)
_HEAD = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w*\.)*(?:<locals>\.)?[A-Za-z_]\w*)(?P<of>\([\w.]+\))?"
    r"(?::(?: (?P<text>.*))?)?$"
)
#: Names that are exceptions at the start of any line.
NAMED = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Failure|Fault|Timeout|Died|Expired|"
    r"ExceptionGroup|Refused|NotFound|Interrupt)|(?:\w+\.)+(?:exc|errors|exceptions)\.[A-Z]\w+|(?:\w+\.)*(?:KeyboardInterrupt|SystemExit|"
    r"StopIteration|StopAsyncIteration|TimeoutExpired|OutOfMemoryError|RayTaskError|EngineGenerateError"
    r"|CUDA_ERROR_\w+))(?P<of>\([\w.]+\))?(?::(?: (?P<text>.*))?)?$"
)
#: The same inside a line about an error.
_INNER = re.compile(
    r"(?:^|[\s:('\"`>=])(?P<name>(?:[a-z_]\w*\.)*[A-Z]\w{2,}(?:Error|Exception))(?:\(['\"]|: )"
    r"(?P<text>.{3,})"
)
_CAUSE = "The above exception was the direct cause of the following exception"
_DURING = "During handling of the above exception, another exception occurred"
_MARKS = re.compile(r"^[\s|]*[\^~]+[\s^~]*$|^\s*\[Previous line repeated")
_GROUPED = re.compile(r"^\s*(?:\+-\+)?[|+] ?(?:-{3,} \d+ -{3,}|\+?-{3,})?")
LOUD = frozenset({"ERROR", "CRITICAL", "FATAL"})
_CODE = re.compile(
    r"^(?:return|raise|yield|await|assert|with|for|while|if|elif|else|try|except|finally|def|class"
    r"|import|from|del|pass|lambda|async)\b"
)


class Frame(NamedTuple):
    """A frame of a traceback."""

    path: str
    line: int
    where: str
    code: str = ""


@dataclass
class LoggedException:
    """One exception in a log."""

    name: str
    text: str
    line: int
    source: str
    level: str
    #: as in the log
    quote: str
    #: start of its traceback
    start: int
    end: int
    frames: list[Frame] = field(default_factory=list)
    #: its cause or context
    cause: LoggedException | None = None
    direct: bool = True
    #: further lines of the message
    more: list[str] = field(default_factory=list)
    #: it is inside another message
    inner: bool = False

    @property
    def short(self) -> str:
        """The name without its modules."""
        return self.name.rpartition(".")[2]

    @property
    def message(self) -> str:
        """The whole message."""
        return "\n".join([self.text, *self.more]).strip()

    def chain(self) -> list[LoggedException]:
        """The exception with its causes, in order."""
        chain: list[LoggedException] = []
        at: LoggedException | None = self
        while at is not None and len(chain) < 20:
            chain.append(at)
            at = at.cause
        return chain[::-1]


@dataclass
class _State:
    """The parser state for one process."""

    start: int
    frames: list[Frame] = field(default_factory=list)
    coded: bool = True
    ended: LoggedException | None = None
    cause: LoggedException | None = None
    direct: bool = True
    chained: bool = False


#: A warning of Python; it is no part of the message before it.
_PYTHON_WARNING = re.compile(r"\S{1,300}\.py:\d+: \w{0,40}Warning\b")
#: The text of an error of the system that names no file.
_NAMELESS = re.compile(r"\[Errno \d+\] [A-Z][\w ]{3,60}")


class Tracebacks:
    """Reads lines and returns exceptions; each is complete at the next one or the end."""

    def __init__(self) -> None:
        self.states: dict[str, _State] = {}

    def inside(self, line: Line) -> bool:
        """Whether a line's process is inside a traceback."""
        state = self.states.get(line.source)
        return state is not None and (state.ended is None or state.chained)

    def feed(self, line: Line) -> tuple[LoggedException | None, bool]:
        """Read a line; returns an exception that starts here, and if the line is part of one."""
        text = line.text
        if text.lstrip()[:1] in "|+" and _GROUPED.match(text):
            text = _GROUPED.sub("", text)
        state = self.states.get(line.source)
        if _BEGIN.search(text):
            self._begin(line, state)
            return None, True
        if "File " in text and (match := _FRAME.match(text)):
            return None, self._frame(line, match, state)
        if state is None:
            return self._alone(line, text)
        if _CAUSE in text or _DURING in text:
            if state.ended:
                state.cause, state.direct = state.ended, _CAUSE in text
                state.chained, state.ended, state.frames = True, None, []
            return None, True
        if state.ended is not None:
            return self._after(line, text, state)
        return self._within(line, text, state)

    def _begin(self, line: Line, state: _State | None) -> None:
        fresh = _State(line.number)
        if state is not None and state.ended is not None and _is_wrapper_of_more(state.ended):
            # ``-- Process 0 terminated with the following error:`` and Ray's own: the cause follows
            fresh.cause = None
        if state is not None and state.chained:
            fresh.cause, fresh.direct = state.cause, state.direct
        if len(self.states) >= _SOURCES:
            self.states.clear()
        self.states[line.source] = fresh

    def _frame(self, line: Line, match: re.Match[str], state: _State | None) -> bool:
        if state is None or (state.ended is not None and not state.chained):
            # the first lines are missing, or Ray's traceback of the other side follows
            state = _State(line.number)
            self.states[line.source] = state
        frame = Frame(match["path"], int(match["line"]), (match["where"] or "").strip())
        state.frames.append(frame)
        del state.frames[:-60]
        state.coded = False
        return True

    def _within(self, line: Line, text: str, state: _State) -> tuple[LoggedException | None, bool]:
        """Read a line of a traceback before its exception."""
        bare = text.strip()
        if not bare or _MARKS.match(text):
            return None, True
        indented = text[:1] in " \t"
        head = None
        if not indented or state.coded:  # a whole paste may be indented
            head = NAMED.match(bare)
        if not head and not indented and state.frames:
            head = _HEAD.match(bare)
        if head and _credible(head, bare):
            return self._ends(line, head, state), True
        if not state.coded and state.frames:
            state.frames[-1] = state.frames[-1]._replace(code=bare[:200])
            state.coded = True
            return None, True
        # several lines of code, or of interleaved output
        return None, indented or line.level not in ("INFO", "DEBUG")

    def _ends(self, line: Line, head: re.Match[str], state: _State) -> LoggedException:
        exception = LoggedException(
            name=(head["of"] or "").strip("()") or head["name"],
            text=head["text"] or "",
            line=line.number,
            source=line.source,
            level=line.level,
            quote=line.text.strip(),
            start=state.start,
            end=line.number,
            frames=state.frames,
            cause=state.cause,
            direct=state.direct,
        )
        state.ended, state.chained, state.cause, state.frames = exception, False, None, []
        return exception

    def _after(self, line: Line, text: str, state: _State) -> tuple[LoggedException | None, bool]:
        """Read a line after an exception: more of its message, or another line."""
        ended = state.ended
        assert ended is not None
        bare = text.strip()
        same = line.level == ended.level and line.number - ended.end <= 2
        fresh = bool(line.level) and not same
        own = fresh or _PYTHON_WARNING.match(bare)
        if not own and same and bare and len(ended.more) < MESSAGE_LINES:
            if (head := NAMED.match(bare)) and _credible(head, bare) and text[:1] not in " \t":
                return self._alone(line, text)
            ended.more.append(bare)
            ended.end = line.number
            return None, True
        if line.number - ended.end > 4 or fresh:
            del self.states[line.source]
            return self._alone(line, text)
        return self._alone(line, text)

    def _alone(self, line: Line, text: str) -> tuple[LoggedException | None, bool]:
        """An exception without a traceback."""
        bare = text.strip()
        head = NAMED.match(bare)
        inner = False
        if not head and line.level in LOUD:
            head, inner = _INNER.search(bare), True
        if not head:
            return None, False
        exception = LoggedException(
            name=head["name"],
            text=head["text"] or "",
            line=line.number,
            source=line.source,
            level=line.level,
            quote=bare,
            start=line.number,
            end=line.number,
            inner=inner,
        )
        if not inner:
            self.states[line.source] = _State(line.number, ended=exception)
        return exception, True


def _credible(head: re.Match[str], bare: str) -> bool:
    """Whether a line that looks like ``name: text`` is an exception rather than code."""
    last = head["name"].rpartition(".")[2]
    return not _CODE.match(bare) and (last[:1].isupper() or "." in head["name"])


def _is_wrapper_of_more(ended: LoggedException) -> bool:
    return "terminated with the following error" in ended.message


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
        r"NVRM: .{0,80}(?:RmInitAdapter|rm_init_adapter) failed",
        r"[Oo]ut of memory: Kill(?:ed)? process \d+",
        r"\boom-kill:constraint=",
        r"\b(?:segfault at|general protection fault|traps: \S+ trap)",
        r"Kernel panic - not syncing",
        r"AMD-Vi: .*IO_PAGE_FAULT",
        r"\btask \S+ blocked for more than \d+ seconds",
        r"\binvoked oom-killer: ",
        r"\bAER: .{0,60}\bUncorrect|\bseverity=Uncorrect",
        r"\bmlx5_core .{0,80}(?:_pci_err_detected|slot_reset|health (?:poll failed|compromised)"
        r"|[Ff]atal|device's health)",
        r"\bBUG: soft lockup|\bwatchdog: .{0,40}hard LOCKUP",
    ),
    _form(
        "an installer",
        r"\bNo solution found when resolving dependencies",
        r"\b[Rr]equirements (?:contain conflicting URLs|are unsatisfiable)",
        r"\bNo matching distribution found for |\bResolutionImpossible\b",
        r"\bCould not find a version that satisfies the requirement",
    ),
    _form(
        "a C++ exception",
        r"terminate called (?:after throwing|without an active exception|recursively)",
        r"\blibc\+\+abi: terminating",
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
        r"(?<![\w-])(?:collect2|ld): error: |undefined reference to [`']",
        r"^CMake Error\b",
        r"NVRTC_ERROR_\w+",
        r"\bLLVM ERROR: ",
        r"^error\[E\d{4}\]: ",
    ),
    _form(
        "a patch",
        r"^\s*Hunk #\d+ FAILED",
        r"\bpatch does not apply\b|\berror: patch failed: ",
        r"^\d+ out of \d+ hunks? (?:FAILED|failed|ignored)",
        r"\bReversed \(or previously applied\) patch detected",
        r"\bcan't find file to patch\b|\bcorrupt patch at line \d",
        r"^\W{0,3}(?:Error|ERROR|error): (?:[Pp]atch|[Mm]od)\b.{0,60}\bfailed",
    ),
    _form(
        "the driver",
        r"\bbuilt for NVIDIA Driver Release \S+ or later",
        r"\bcompatibility mode is UNAVAILABLE\b",
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
        r"\bexec: \"[^\"]+\": (?:executable file not found|stat|permission denied)",
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
    _form("CUDA", r"^Failed: (?:Cuda|CUDA) error \S+:\d+"),
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
        r"\bssh: (?:connect to host \S+ port \d+: |Could not resolve hostname )",
    ),
    _form(
        "the network",
        r"\bgloo/transport/.{0,120}(?:Timed out|Connection|error|refused)",
        r"\[c10d\].{0,300}(?:timed out after|failed to connect|Connection re)",
        weak=True,
    ),
    _form(
        "MPI",
        r"MPI_ABORT was invoked",
        r"mpirun noticed that process rank",
        r"Primary job +terminated normally, but",
        r"\bsrun: error: ",
        weak=True,
    ),
    _form(
        "an exit",
        r"\b(?:exited|exit|terminated|died|failed|finished) (?:with|by) "
        r"(?:non-zero )?(?:exit )?(?:code|status|signal):? ?(?!0\b)-?\d+",
        r"\bExited \((?!0\))\d+\)",
        r"\bdied with <Signals\.",
        r"returned (?:a )?non-zero (?:exit )?(?:code|status)",
        r"^(?:\S+: line \d+:\s+\d+ )?Killed\b(?:\s|$)",
        r"\bsignal (?:9|11|6|15)\b|signal: killed|SIGKILL",
        r"\b(?:died|exited) unexpectedly|Container .{0,60} exited|exitCode=(?!0\b)\d+",
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
    r"|Received sigquit from a child|\bkill_process_tree|Child process .{0,40}(?:died|failed)"
    r"|BrokenPipeError|EOFError|ConnectionResetError|IncompleteReadError"
    r"|Connection (?:reset|closed) by (?:remote )?peer"
    r"|ncclRemoteError|DistBackendError: NCCL error.{0,200}(?:remote process|peer)"
    r"|Socket (?:recv|send).{0,60}(?:failed|reset)|remote process exited|\bpeer .{0,40}closed"
    r"|CancelledError|SystemExit|KeyboardInterrupt|ZMQError|cancelled due to|Cancelled"
    r"|Watchdog timeout|AsyncLLM output_handler failed|sched_yield"
    r"|[Pp]rocess group .{0,60}(?:abort|terminat)|To avoid data inconsistency"
    r"|\bgot fatal signal from worker"
    r"|Timed out waiting for engine core|See (?:stack trace|root cause) (?:\(above\)|above)"
    r"|SIGTERM received|Broadcast.{0,40}timed out|Heartbeat monitor"
    r"|mpirun noticed|Primary job|exited with code|\bdied unexpectedly"
)

#: Wrappers without information: the wrapped error is elsewhere in the log, or in their text.
WRAPPERS = re.compile(
    r"device-side assert triggered|Worker failed with error "
    r"|unhandled (?:cuda|system) error \(run with NCCL"
    r"|^(?:ray::"
    r"|Capture cuda graph failed|Ninja build failed|Error building extension|Command .{0,4000}"
    r"returned non-zero|unhandled errors in a TaskGroup|-- Process \d+ terminated)"
)

#: Words of lines that look like failures and are not: attempts that the program can do without.
#: They weigh lines of level INFO and WARNING, and symptoms in lines without a level.  An exception
#: that was raised is one, whatever its message says.
HARMLESS = re.compile(
    r"[Ss]kipp(?:ed|ing)\b.{0,80}(?:due to|because|tactic|unsupported)"
    r"|[Ff]all(?:ing|s)?[- ]?back"
    r"|\b(?:0|no) errors?\b|errors?[=:] ?0\b|[Rr]etrying|[Ww]ill retry|retry in"
)
#: Lines of any level that tell of no failure: what a program says of its state when one happened,
#: or of an exception that is ignored.
NOISE = re.compile(
    r"[Ss]kipping tactic|[Ee]xception ignored in|ignored exception|Ignore import error"
    r"|Unexpected error during package walk|destroy_process_group\(\) was not called"
    r"|NVRM: .{0,300}NV_ERR_NO_MEMORY|nvCheckOkFailed"
    r"|Dumping (?:input data|scheduler)|leaked (?:shared_memory|semaphore)"
    r"|error_code=None|\bon_error=|errors='"
)
#: Of these, the lines whose traceback is as harmless.
_BEFORE_A_TRACEBACK = re.compile(
    r"[Ee]xception ignored in|ignored exception|Unexpected error during package walk"
)
#: Symptoms that no such word makes harmless.
_HARD = frozenset({"CUDA", "an exit", "systemd", "MPI"})


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
    "o such",
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
    "No solution",
    "equirements",
    "No matching",
    "ResolutionImpossible",
    "satisf",
    "Uncorrect",
    "lockup",
    "LOCKUP",
    "mlx5_core",
    "ssh:",
)
#: Maximum number of kept events and other lines.
_KEPT = 256
#: Equal exceptions that are kept whole, and maximum number of different events to count.
_SAME = 4
_TIMES = 4096
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


#: The kind of a wait that does not end.
HANG = "a wait that does not end"
_WARNS = re.compile(
    r"[Ww]arn|WARN|rror|ailed|annot|not (?:found|supported|enough|valid)|nsupported"
)


#: A process whose signal is named was ended by it, whatever else the line says.
SIGNALLED = re.compile(
    r"Failed core proc\(s\): \{[^}]{0,200}: -\d"
    r"|exited with (?:exit )?code:? (?:137|139|134|135|132|-\d)\b"
    r"|\bdied unexpectedly \(exit code: -\d"
)
#: After these a process computes no more, whatever its API server still answers.
LETHAL = re.compile(
    r"illegal memory access|illegal instruction|device-side assert|misaligned address"
    r"|unspecified launch failure|EngineDead|engine is dead|Engine core initialization failed"
    r"|Failed core proc|EngineCore encountered|WorkerProc hit an exception|\bdied unexpectedly"
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


#: Advice for a case that may come: ``If pods show OOMKilled ...``.
_SUPPOSED = re.compile(r"\s*(?:If|When|In case|Should) [a-z]")


#: A symptom that a sentence quotes: a few words before it, and a quotation mark at each end.
_CITED = re.compile(r"^(?:[^\s\"=:{]+ ){3,}[\"“„»«'‘]([^\"“”„»«'‘’]{8,120})[\"”“«»'’]")


def _excused(form: Form, line: Line) -> bool:
    """Whether a symptom in a line without a level is said to be harmless, supposed or quoted."""
    if not line.level and _SUPPOSED.match(line.text):
        return True
    cited = _CITED.match(line.text) if form.kind == "an error" and not line.level else None
    if cited is not None and form.regex.search(cited[1]):
        return True
    soft = form.weak and form.kind not in _HARD and not line.level
    return soft and HARMLESS.search(line.text) is not None


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
    #: the last line of each process about an exception that is ignored
    _ignored: dict[str, int] = field(default_factory=dict)
    #: lines of the driver about memory: the first one, and their number
    no_memory: NumberedLine | None = None
    no_memory_lines: int = 0
    no_memory_last: int = 0

    def copy(self) -> Failures:
        """A copy that shares nothing that reading changes."""
        twins: dict[int, Any] = {}
        pending: list[LoggedException | None] = list(self.exceptions)
        for state in self.tracebacks.states.values():
            pending += (state.ended, state.cause)
        while pending:  # not by recursion: a log may have a chain of any length
            exception = pending.pop()
            if exception is not None and id(exception) not in twins:
                twins[id(exception)] = dataclasses.replace(
                    exception, frames=list(exception.frames), more=list(exception.more)
                )
                pending.append(exception.cause)
        for twin in twins.values():
            if twin.cause is not None:
                twin.cause = twins[id(twin.cause)]
        ids = {key: id(twin) for key, twin in twins.items()}
        twin = copy.deepcopy(self, twins)
        twin._before = {ids[key]: row for key, row in self._before.items() if key in ids}
        twin._when = {ids[key]: text for key, text in self._when.items() if key in ids}
        return twin

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
            self.no_memory_last = max(self.no_memory_last, line.number)
            self.no_memory = self.no_memory or NumberedLine(line.number, text[:QUOTED])
        quiet = line.level in ("INFO", "DEBUG") and "kip" not in text and "gnor" not in text
        if line.source in self.tracebacks.states or (not quiet and has_any(_SMELLS, text)):
            if not SERVICE.search(text) and self._event(line):
                return
        elif line.level in LOUD:
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
        if self._acquitted(line):
            return False
        exception, part = self.tracebacks.feed(line)
        if exception is not None:
            quiet = self._ignored.get(exception.source, -9)
            if not exception.start - 2 <= quiet <= exception.line and exception.level not in _QUIET:
                self._found(exception)
            return True
        if part and self.tracebacks.inside(line):
            return True
        if line.level in _QUIET and "[c10d]" not in text:
            return False
        form = next((form for form in FORMS if form.regex.search(text)), None)
        if form is not None and not _excused(form, line):
            event = Failure(form.kind, line.number, line.number, text.strip()[:QUOTED])
            event.weak = form.weak
            self._note(event, line)
            return True
        if form is None and line.level in LOUD and not part:
            self._note(
                Failure("an error", line.number, line.number, text[:QUOTED], weak=True), line
            )
        return part

    def _acquitted(self, line: Line) -> bool:
        """Whether a line tells of no failure.  No word acquits an exception."""
        if NAMED.match(line.text.strip()):
            return False
        if NOISE.search(line.text):
            if _BEFORE_A_TRACEBACK.search(line.text):
                self._ignored[line.source] = line.number
            return True
        return line.level in _QUIET and HARMLESS.search(line.text) is not None

    def _found(self, exception: LoggedException) -> None:
        if before := self._matters(exception.start, exception.source):
            self._before[id(exception)] = before
        self._when[id(exception)] = when(self._head)
        if (
            self._again(f"{exception.name}: {exception.text}", exception.line) <= _SAME
            or exception.cause
        ):
            self.exceptions.append(exception)
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
            no_memory_last=self.no_memory_last,
        )

    def dead(self) -> bool:
        """Whether the log shows that the server ended, not only a failure."""
        kinds = {"a signal", "a C++ exception", "an exit", "systemd", "the command line"}
        return any(not f.survived and (f.follower or f.kind in kinds) for f in self.failures())

    # ---------------------------------------------------------------------------------- at the end

    def failures(self) -> list[Failure]:
        """All events, root cause first; survived ones are marked."""
        failures = self._events()
        for failure in failures:
            key = _plain(failure.key)
            failure.times = self.times.get(key, 1)
            failure.end = max(failure.end, self._last.get(key, 0))
        lethal = max((f.line for f in failures if LETHAL.search(f.quote)), default=0)
        for failure in failures:
            failure.survived = self._survives(failure, failures, lethal)
        failures += self._hangs(failures)
        _weaken_wrappers(failures)
        failures.sort(key=lambda f: (f.survived, f.kind == "an error", f.follower, f.weak, f.line))
        distinct: dict[tuple[str, str], Failure] = {}
        for failure in failures:  # the same from another rank, or printed again, counts once
            distinct.setdefault((failure.kind, _plain(failure.quote)), failure)
        return list(distinct.values())

    def _events(self) -> list[Failure]:
        """Exceptions with their chains, and the other events that are not part of one."""
        causes = {id(e.cause) for e in self.exceptions if e.cause is not None}
        failures = [self._failure(e) for e in self.exceptions if id(e) not in causes]
        covered = {n: failure.source for failure in failures for n in failure.lines}
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
            failures.append(event)
        return failures

    def _hangs(self, failures: list[Failure]) -> list[Failure]:
        """Waits that do not end, without another known cause."""
        if any(not f.survived and (f.kind == "NCCL" or not f.weak) for f in failures):
            return []
        waits = self.course.hang()
        if not waits:
            return []
        return [
            Failure(
                HANG,
                waits[0].line,
                waits[-1].line,
                waits[0].text.strip()[:QUOTED],
                source=waits[0].source,
                lines=frozenset(n.line for n in waits),
                search=search_phrase(self.course.wrote(), "", waits[0].text),
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
        bare = not root.text or _NAMELESS.fullmatch(root.text.strip())
        if bare and root.frames and root.frames[-1].code:
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

    def _survives(self, failure: Failure, failures: list[Failure], lethal: int) -> bool:
        """Whether the program went on; ``lethal`` is the last line that ends it anyway."""
        course = self.course
        was_up = course.came_up(failure.line)
        end = max(
            [failure.end, *(f.line for f in failures if f.follower and f.line >= failure.line)]
        )
        if lethal >= failure.line:  # only another start helps, and the requests that it answers
            return course.up > (end := max(end, lethal)) and course.alive > end
        if was_up or course.alive > end:
            return course.alive > end
        # at a start: the process went on, and the server came up or the log ends before
        after = course.after(failure.source, failure.end)
        if course.ready:
            return course.ready > end and after > 0
        return bool(failure.source) and failure.level != "CRITICAL" and after >= _PROGRESS


_BUILDS = re.compile(r"[Nn]inja|nvcc|compil|build|non-zero exit status")


def _weaken_wrappers(failures: list[Failure]) -> None:
    """Mark exceptions that say that something did not compile, if a compiler says why."""
    if not any(f.kind == "a compiler" and not f.weak for f in failures):
        return
    for failure in failures:
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
    joined: list[Failure] = []
    for event in events:
        if (
            event.quote.lstrip().startswith("what():")
            and joined
            and joined[-1].quote.startswith(("terminate called", "libc++abi"))
        ):
            joined[-1].quote = f"{joined[-1].quote} {event.quote.strip()}"[:QUOTED]
            joined[-1].lines |= event.lines
            continue
        joined.append(event)
    return joined


#: Engines by the names that logs are read with.
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}
#: Kinds of mechanism, and what the report calls them.
KINDS: Mapping[str, str] = {
    "memory": "out of memory",
    "unsupported": "not supported here",
    "unknown-name": "an unknown name or value",
    "settings": "settings that contradict one another, or the model",
    "shape": "shapes that do not fit",
    "weights": "the checkpoint and the model code disagree",
    "damaged": "a damaged file",
    "missing": "something is missing",
    "patch": "a patch or mod that does not apply",
    "versions": "versions that do not belong together",
    "network": "a connection or rendezvous failed",
    "timeout": "a process that did not answer",
    "hang": "a process that hangs",
    "killed": "ended from outside",
    "request": "a request that failed",
    "compiler": "a compiler failed",
    "gpu-fault": "a fault on the GPU or in native code",
    "defect": "an error in a program's code",
}
#: Maximum length of a message that is classified.
LONGEST = 4000
#: Parts of the engines, and packages, by the beginning of a frame's path.
_PARTS = (
    ("vllm/vllm_flash_attn/cute", "FlashAttention 4"),
    ("flash_attn/cute", "FlashAttention 4"),
    ("vllm/vllm_flash_attn", "FlashAttention"),
    ("flash_attn/", "FlashAttention"),
    ("vllm/model_executor/model_loader", "vLLM's weight loader"),
    ("vllm/model_executor/layers/quantization", "vLLM's quantisation"),
    ("vllm/model_executor/layers/fused_moe", "vLLM's expert layers"),
    ("vllm/model_executor/kernels", "vLLM's kernels"),
    ("vllm/model_executor/models", "vLLM's model code"),
    ("vllm/v1/attention", "vLLM's attention"),
    ("vllm/attention", "vLLM's attention"),
    ("vllm/v1/spec_decode", "vLLM's speculative decoding"),
    ("vllm/third_party/flashmla", "FlashMLA"),
    ("vllm/third_party/deep_gemm", "DeepGEMM"),
    ("vllm/third_party/triton_kernels", "Triton"),
    ("vllm/distributed/kv_transfer", "vLLM's KV transfer"),
    ("vllm/distributed", "vLLM's communication between ranks"),
    ("vllm/lora", "vLLM's LoRA"),
    ("vllm/compilation", "vLLM's compilation"),
    ("vllm/config", "vLLM's configuration"),
    ("vllm/engine/arg_utils", "vLLM's configuration"),
    ("vllm/transformers_utils", "the model's config and tokenizer"),
    ("vllm/tokenizers", "the tokenizer"),
    ("vllm/entrypoints", "vLLM's API server"),
    ("vllm/multimodal", "vLLM's multimodal input"),
    ("vllm/platforms", "vLLM's platform check"),
    ("vllm/v1/core", "vLLM's KV cache and scheduler"),
    ("vllm/v1/executor", "vLLM's executor"),
    ("vllm/", "vLLM"),
    ("sglang/srt/layers/quantization", "SGLang's quantisation"),
    ("sglang/srt/layers/attention", "SGLang's attention"),
    ("sglang/srt/layers/moe", "SGLang's expert layers"),
    ("sglang/srt/models", "SGLang's model code"),
    ("sglang/srt/model_loader", "SGLang's weight loader"),
    ("sglang/srt/mem_cache", "SGLang's KV cache"),
    ("sglang/srt/server_args", "SGLang's configuration"),
    ("sglang/", "SGLang"),
    ("b12x/", "b12x"),
    ("flashinfer/", "FlashInfer"),
    ("deep_gemm/", "DeepGEMM"),
    ("triton/", "Triton"),
    ("tilelang/", "TileLang"),
    ("nvidia_cutlass_dsl", "the CuTe DSL"),
    ("cutlass/", "the CuTe DSL"),
    ("transformers/", "Transformers"),
    ("tokenizers/", "the tokenizer"),
    ("huggingface_hub/", "the Hugging Face Hub"),
    ("safetensors/", "a weight file"),
    ("compressed_tensors/", "compressed-tensors"),
    ("tensorrt_llm/", "TensorRT-LLM"),
    ("torch/_inductor", "torch.compile"),
    ("torch/_dynamo", "torch.compile"),
    ("torch/distributed", "PyTorch's communication between ranks"),
    ("torch/", "PyTorch"),
    ("ray/", "Ray"),
    ("xgrammar/", "structured output"),
    ("mistral_common/", "the tokenizer"),
    ("lmcache/", "LMCache"),
)
#: The same, by a name in the message.
_PARTS_IN_TEXT = (
    (
        re.compile(r"\bFA4\b|FlashAttention[- ]?4|flash_attn[./]cute|FlashAttention\w+Sm\d"),
        "FlashAttention 4",
    ),
    (re.compile(r"[Ff]lash[Ii]nfer"), "FlashInfer"),
    (re.compile(r"[Dd]eep_?[Gg][Ee][Mm][Mm]"), "DeepGEMM"),
    # FlashInfer has TensorRT-LLM's kernels, by these names
    (re.compile(r"[Tt]rtllm(?:_|-gen)|TRTLLM|[Tt]llm[Gg]en|nv_internal/"), "FlashInfer"),
    (re.compile(r"\bb12x\b|\bB12X\b|B12x"), "b12x"),
    (re.compile(r"[Mm]arlin"), "Marlin"),
    (re.compile(r"\bcutlass\.cute\b|\bcute\.\w|\bCuTe\b|\bCuteDSL\b"), "the CuTe DSL"),
    (re.compile(r"\b[Cc]utlass|CUTLASS"), "CUTLASS"),
    (re.compile(r"\b[Tt]riton\b"), "Triton"),
    (re.compile(r"\b[Tt]ile_?[Ll]ang\b"), "TileLang"),
    (re.compile(r"[Ff]lash_?[Aa]ttn|FlashAttention|FlashMLA|flash_mla"), "FlashAttention"),
    (re.compile(r"sgl_kernel|sgl-kernel"), "sgl-kernel"),
    (re.compile(r"\b[Pp]aged ?KV\b"), "attention kernels"),
    (re.compile(r"\b(?:LMCache|lmcache|CacheEngineKey)\b"), "LMCache"),
    (re.compile(r"[Tt]okenizer"), "the tokenizer"),
    (re.compile(r"auto_functionalized|[Ii]nductor|[Dd]ynamo|torch\.compile"), "torch.compile"),
    (re.compile(r"\b[Nn]ccl\b|NCCL"), "NCCL"),
    (re.compile(r"[Tt]ransformers"), "Transformers"),
)
#: What a process says of the error of another.
_QUOTED = re.compile(r"Worker failed with error (['\"])(.+)\1, please check")
_SEGMENT = re.compile(r"\[([^\[\]]*\{[a-z0-9]+\}[^\[\]]*)\]|\{([a-z0-9]+)\}")
#: Maximum length of a value that a message shows.
_VALUE = 400


class Rule(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One form of message, and what it means."""

    kind: Text
    pattern: Text
    message: Text
    fix: Text
    example: Annotated[Text, Meta(description="a message of this form")]
    component: str = always("")
    frame: Annotated[
        str, Meta(description="what the innermost relevant frame must match; absent: any")
    ] = always("")
    sglang: Annotated[str, Meta(description="the fix for SGLang")] = always("")


class Mechanism(NamedTuple):
    """What made a program fail."""

    kind: str
    component: str
    message: str
    fix: str


@cache
def rules() -> tuple[Rule, ...]:
    """The rules, in their order."""
    table = tomllib.loads(package_file("data", "mechanisms.toml").read_text("utf-8"))
    return read(table["rule"], tuple[Rule, ...])


@cache
def _compiled() -> tuple[tuple[re.Pattern[str], re.Pattern[str], Rule], ...]:
    return tuple(
        (whole_words(rule.pattern, re.MULTILINE), re.compile(rule.frame), rule) for rule in rules()
    )


def classify(text: str, *, frame: str = "", engine: str = "") -> Mechanism | None:
    """The mechanism of a failure: its message, innermost relevant frame, and the engine."""
    text = text[:LONGEST]
    if inner := _QUOTED.search(text):  # the frame is the messenger's
        text, frame = inner[2], ""
    for regex, place, rule in _compiled():
        if place.match(frame) and (match := regex.search(text)):
            groups = {k: _value(v) for k, v in match.groupdict().items()}
            return Mechanism(
                rule.kind,
                _refined(filled(rule.component, groups), frame)
                or _where(rule.kind, component(text, frame, engine)),
                filled(rule.message, groups),
                filled(fix_for(rule, engine), groups),
            )
    own = component("", frame, "")
    if own.endswith("configuration"):
        return Mechanism(
            "settings", own, "A check of the settings failed.", "change what the message names"
        )
    return None


def _where(kind: str, part: str) -> str:
    """A part that failed; of a fault of the GPU the engine only says that it came.

    CUDA tells of it at a later call, which may be in any part of the engine.
    """
    engine, _, _ = part.partition("'s ")
    return "a kernel on the GPU" if kind == "gpu-fault" and engine in _ENGINES.values() else part


def _refined(named: str, frame: str) -> str:
    """A rule's component; of a compiler's error, what was compiled says more."""
    own = component("", frame, "") if named in _COMPILERS else ""
    return own if own in _COMPILED_PARTS else named


_COMPILERS = frozenset({"the CuTe DSL", "ptxas", "nvcc", "Triton"})
_COMPILED_PARTS = frozenset({"FlashAttention 4"})


@cache
def engine_flags() -> Mapping[str, Mapping[str, str]]:
    """What each engine calls a flag of vLLM."""
    table = tomllib.loads(package_file("data", "mechanisms.toml").read_text("utf-8"))
    return read(table["flags"], dict[str, dict[str, str]])


_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
#: Names that only vLLM knows.
_VLLM_NAME = re.compile(r"\bVLLM_[A-Z]|\bcudagraph_capture_sizes\b|\bspark-build (?:lint|plan)\b")
#: Separates the pieces of advice of a fix.
_ADVICE = re.compile(r"; (?:else )?|, or (?=[^;]{20})")


def fix_for(rule: Rule, engine: str) -> str:
    """A rule's fix for an engine."""
    return rule.sglang if engine == "sglang" and rule.sglang else in_flags_of(engine, rule.fix)


def in_flags_of(engine: str, advice: str) -> str:
    """Advice in the flags of an engine: pieces with a flag of vLLM that it has not are left out."""
    flags = engine_flags().get(engine)
    if flags is None:  # not known
        return advice
    foreign = None if engine == "vllm" else _VLLM_NAME
    if not any(o in flags for o in _OPTION.findall(advice)) and not (
        foreign and foreign.search(advice)
    ):
        return advice
    kept = [
        _OPTION.sub(lambda match: flags.get(match[0], match[0]), piece)
        for piece in _ADVICE.split(advice)
        if not (foreign and foreign.search(piece))
        and all(flags.get(o, o) for o in _OPTION.findall(piece))
    ]
    return "; ".join(kept) or _NO_ADVICE


_NO_ADVICE = "read the lines before it, and search the issues of the engine for the message"


def component(text: str, frame: str, engine: str) -> str:
    """The part that failed, by its frame, or by a name in its message."""
    path = frame.partition(",")[0]
    own = next((name for start, name in _PARTS if path.startswith(start)), "")
    if own and own not in _MESSENGERS:
        return own
    named = next((name for regex, name in _PARTS_IN_TEXT if regex.search(text)), "")
    if named == "FlashInfer" and engine == "tensorrt-llm":
        named = "TensorRT-LLM"
    return named or own or _ENGINES.get(engine, "")


#: Parts that only say what another one did: a name in the message says more.
_MESSENGERS = ("vLLM", "SGLang", "PyTorch", "TensorRT-LLM", "vLLM's executor", "vLLM's attention")


def _value(text: str | None) -> str:
    text = " ".join((text or "").split()).rstrip(" .,:;")
    return text if len(text) <= _VALUE else f"{text[:_VALUE]}..."


def filled(template: str, groups: Mapping[str, str]) -> str:
    """A text with values in place of ``{name}``; a part in brackets without its value is left out.

    Other braces and brackets stay.
    """

    def put(match: re.Match[str]) -> str:
        if match[1] is None:
            return groups.get(match[2], match[0])
        names = re.findall(r"\{([a-z0-9]+)\}", match[1])
        if not all(groups.get(name) for name in names):
            return ""
        return re.sub(r"\{([a-z0-9]+)\}", lambda m: groups[m[1]], match[1])

    return _SEGMENT.sub(put, template)
