"""Python tracebacks in a log: chains, frames, and the exception that each ends with.

Lines of several processes may be interleaved, so each process is read separately.  A paste may have
lost indentation, or its first lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.diagnose.lines import Line

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
    "deep_gemm",
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
    found = words[:12]
    if name and name[:1].isupper() and not any(name in word for word in found):
        found.insert(0, name)
    if len(found) < 5 and frame:
        found += [frame.partition(",")[0].rpartition("/")[2], frame.partition(", in ")[2]]
    first = {"": "", "nim": "NIM", "tensorrt-llm": "TensorRT-LLM"}.get(engine, engine)
    return " ".join(word for word in (first, *found) if word)


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
_NAMED = re.compile(
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
_LOUD = frozenset({"ERROR", "CRITICAL", "FATAL"})
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
        found: list[LoggedException] = []
        at: LoggedException | None = self
        while at is not None and len(found) < 20:
            found.append(at)
            at = at.cause
        return found[::-1]


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
            head = _NAMED.match(bare)
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
        found = LoggedException(
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
        state.ended, state.chained, state.cause, state.frames = found, False, None, []
        return found

    def _after(self, line: Line, text: str, state: _State) -> tuple[LoggedException | None, bool]:
        """Read a line after an exception: more of its message, or another line."""
        ended = state.ended
        assert ended is not None
        bare = text.strip()
        same = line.level == ended.level and line.number - ended.end <= 2
        fresh = bool(line.level) and not same
        if not fresh and same and bare and len(ended.more) < MESSAGE_LINES:
            if (head := _NAMED.match(bare)) and _credible(head, bare) and text[:1] not in " \t":
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
        head = _NAMED.match(bare)
        inner = False
        if not head and line.level in _LOUD:
            head, inner = _INNER.search(bare), True
        if not head:
            return None, False
        found = LoggedException(
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
            self.states[line.source] = _State(line.number, ended=found)
        return found, True


def _credible(head: re.Match[str], bare: str) -> bool:
    """Whether a line that looks like ``name: text`` is an exception rather than code."""
    last = head["name"].rpartition(".")[2]
    return not _CODE.match(bare) and (last[:1].isupper() or "." in head["name"])


def _is_wrapper_of_more(ended: LoggedException) -> bool:
    return "terminated with the following error" in ended.message
