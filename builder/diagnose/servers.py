"""The state of a server in its log: the program, readiness, and waits."""

from __future__ import annotations

import collections
import dataclasses
import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from builder.common.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from builder.diagnose.logs import Line

#: Engines by name, with texts that only their logs have.  The first match decides.
ENGINES: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    (
        "sglang",
        "SGLang",
        re.compile(
            r"== SGLang ==|\bsglang[./]|sglang_router|SGLANG_|ServerArgs\(|sgl_kernel|sgl-kernel"
            r"|Scheduler hit an exception"
        ),
    ),
    (
        "tensorrt-llm",
        "TensorRT-LLM",
        re.compile(
            r"\[TensorRT-LLM\]|\[TRT-LLM\]|tensorrt_llm[./]|TensorRT[- ]LLM version|trtllm-serve"
        ),
    ),
    (
        "llama.cpp",
        "llama.cpp",
        re.compile(
            r"\bllama_(?:model|init|context|server|perf|new_context)|\bggml_(?:cuda|backend|init)"
            r"|llama-server|build: \d+ \([0-9a-f]{6,}\) with"
        ),
    ),
    (
        "nim",
        "NVIDIA NIM",
        re.compile(r"NVIDIA Inference Microservice|nim_llm|nimlib|NIM_[A-Z]+_|/opt/nim/"),
    ),
    (
        "vllm",
        "vLLM",
        re.compile(
            r"\((?:APIServer|EngineCore)\w* pid=|vllm[./]|\bvLLM\b|\bVLLM[_:]|non-default args: "
            r"|\bInitializing a V1 LLM engine|shm_broadcast\.py|\[core\.py:\d"
            r"|multiproc_executor|parallel_state\.py|gpu_worker\.py|RayWorkerWrapper"
        ),
    ),
    ("ray", "Ray", re.compile(r"\bray\.(?:exceptions|init)|\braylet\b|\(RayWorker")),
)


class Program(NamedTuple):
    """A program that is no model server."""

    name: str
    #: it decides even if an engine is named too
    strong: bool
    lines: re.Pattern[str]


@cache
def programs() -> tuple[Program, ...]:
    """The programs of ``builder/data/programs.toml``."""
    table = tomllib.loads(package_file("data", "programs.toml").read_text("utf-8"))
    return tuple(
        Program(row["name"], row.get("strong", False), re.compile("|".join(row["patterns"])))
        for row in table["program"]
    )


#: Anything of a model server or its machine, for texts without a line of an engine.
RELATED = re.compile(
    r"vllm|sglang|flashinfer|cutlass|\bcuda|nvidia|\bnccl|\bgloo\b|\btorch|triton|tensorrt|NVRM"
    r"|safetensors|hugging|hf\.co|transformers|\bgpus?\b|raylet|\bray\.|ibv_|EngineCore|kv.?cache"
    r"|\bnvcc|ptxas|\bllms?\b|tokenizer|\bNV_ERR",
    re.IGNORECASE,
)

_NAMES = (
    r"(?:nginx|apache2?|httpd|caddy|haproxy|traefik|mysqld?|mariadbd?|postgres(?:ql)?|mongod?"
    r"|redis(?:-server)?|sshd?|postfix|dovecot|cron|cups|rabbitmq(?:-server)?|elasticsearch"
    r"|memcached|jenkins|snapd)"
)
#: Lines about a service of the system that is no model server; a journal has many.
SERVICE = re.compile(
    rf"\b(?<![\w.-]){_NAMES}(?:@\S{{1,60}})?\.service\b"
    rf"|^{_NAMES}(?:\[\d{{1,9}}\])?: |[Kk]ill(?:ed)? process \d+,? \({_NAMES}\)"
)

_KERNELS = re.compile(r"nvcc|\.cuh?\b|flashinfer|triton|torch_compile|ptxas")

#: Lines of a server's start: the log is not only a fragment.
STARTED = re.compile(
    r"vLLM (?:API )?server version|█  version|non-default args: |== SGLang =="
    r"|server_args=ServerArgs"
    r"|TensorRT[- ]LLM version|build: \d+ \([0-9a-f]{6,}\) with|^llama_server"
    r"|Starting vLLM API server"
    r"|Initializing a V1 LLM engine|NVIDIA Inference Microservice|starting vllm|\bvllm serve \S"
)
READY = re.compile(
    r"Application startup complete|Uvicorn running on|The server is fired up and ready to roll"
    r"|server is listening on http|all slots are idle|Started HTTPService at"
    r"|Started GRPCInferenceService"
    r"|Avg prompt throughput: |\bPrefill batch[,. ].*#new-token|\bDecode batch[,. ].*#running-req"
    r"|\"(?:POST|GET) /(?:v1/\w+|generate|invocations|health)\S* HTTP/1\.1\" ?200"
    r"|Processed prompts: 100%|main: server is listening"
)
#: Those of them that are written once at a start.
UP = re.compile(
    r"Application startup complete|Uvicorn running on|fired up and ready|server is listening"
)
#: Lines of a server that answers requests.
ALIVE = re.compile(
    r"\"(?:POST /|GET /health|GET /v1/)\S* HTTP/1\.1\" ?200|Decode batch[,. ].*gen throughput"
    r"|Avg generation throughput: (?!0\.0 )\d"
)

#: vLLM's health check fails only if the engine is dead (EngineDeadError in health.py).
UNHEALTHY = re.compile(r"\"GET /health HTTP/1\.1\" ?503")

#: Lines of a server that was stopped on request.
ENDING = re.compile(
    r"shut(?:ting)? ?down|Finished server process|Application shutdown|terminat|clean(?:ing)? ?up"
    r"|exit|kill|abort|stop|clos|dump|SIGTERM|Traceback|rror|xception|ailed",
    re.IGNORECASE,
)

#: Texts, one of which is in every line in ASCII that ``ENDING`` matches, in lower case.
_ENDINGS = (
    "shut", "finished server", "application shutdown", "terminat", "clean", "exit", "kill", "abort",
    "stop", "clos", "dump", "sigterm", "traceback", "rror", "xception", "ailed",
)  # fmt: skip


def has_any(words: Iterable[str], text: str) -> bool:
    """Whether one of the words is in a text; a loop, as ``any`` takes twice as long for a line."""
    for word in words:  # noqa: SIM110
        if word in text:
            return True
    return False


def ends(text: str) -> bool:
    """Whether a line is of a server that was stopped on request."""
    if text.isascii():  # as most lines are; a search that ignores case takes 20 times as long
        low = text.lower()
        if not has_any(_ENDINGS, low):
            return False
    return ENDING.search(text) is not None


ENGINE_NAMES = {key: name for key, name, _ in ENGINES} | {"": "an unknown program"}
#: Engines in the catalogue.
COVERED = frozenset({"vllm", "tensorrt-llm"})

#: Process names of vLLM.
_VLLM = ("APIServer", "EngineCore", "Worker_", "VllmWorker")
#: One line about a missing broadcast block is harmless; a hang repeats it every 60 seconds.
_WAITS = 3
#: Ray logs its wait for a placement group, which a suitable cluster provides immediately.
_LONG = 60
_WAITING = (
    re.compile(r"No available shared memory broadcast block found in \d+ seconds"),
    re.compile(r"Waiting for creating a placement group of specs for (?P<seconds>\d+) seconds"),
    re.compile(
        r"Waiting for \d+ (?:local|remote),? .{0,40}(?:core|engine).{0,40}to (?:start|connect)"
    ),
    re.compile(r"Still waiting for .{3,80}"),
)
#: Texts, one of which is in every line with a state.
_WORDS = (
    "omplete",
    "Uvicorn",
    "HTTP/1.1",
    "throughput",
    "ready to",
    "listening",
    "slots are",
    "Started ",
    "batch",
    "Processed",
    "aiting for",
    "broadcast block",
)
#: Characters of a line that are searched for its program.
_LOOKED = 2000
#: Maximum number of stored lines about one wait.
_KEPT = 64
#: Number of lines from the start that are searched for the engine.
_FIRST = 400


class NumberedLine(NamedTuple):
    """A line with its number."""

    line: int
    text: str
    source: str = ""


@dataclass
class ServerState:
    """The state of a server in its log, without failures."""

    started: int = 0
    #: the first and last line that report readiness
    first_ready: int = 0
    ready: int = 0
    #: the last line that says that the server came up
    up: int = 0
    #: the last line with an answered request
    alive: int = 0
    #: the last failed health check
    unhealthy: int = 0
    last: NumberedLine = field(default_factory=lambda: NumberedLine(0, ""))
    waits: dict[int, list[NumberedLine]] = field(default_factory=dict)
    #: the last progress lines by process
    progress: dict[str, collections.deque[int]] = field(default_factory=dict)
    votes: collections.Counter[str] = field(default_factory=collections.Counter)
    #: lines of programs that are no model server, by name
    foreign: collections.Counter[str] = field(default_factory=collections.Counter)
    #: lines with anything of a model server or its machine, of the first ones
    related: int = 0
    #: lines of a compiler of CUDA code, as an engine starts it
    kernels: int = 0
    lines: int = 0
    #: whether a line has the level of a log
    levelled: bool = False

    def feed(self, line: Line) -> None:
        """Read one line."""
        text = line.text
        self.last = NumberedLine(line.number, text, line.source)
        self.levelled = self.levelled or bool(line.level)
        self.lines += 1
        if self.lines <= _FIRST or (
            self.votes.total() < _WAITS and ("vllm" in text or "sglang" in text or line.source)
        ):
            self._vote(line)
        if not self.started and self.lines <= _FIRST and STARTED.search(text):
            self.started = line.number
        if has_any(_WORDS, text):
            self._state(line)

    def _vote(self, line: Line) -> None:
        text = line.text[:_LOOKED]
        for program in programs() if self.lines <= _FIRST else ():
            if program.lines.search(text):
                self.foreign[program.name] += 1
                break
        self.kernels += bool(_KERNELS.search(text))
        self.related += bool(RELATED.search(text) or RELATED.search(line.source))
        for key, _, regex in ENGINES:
            if regex.search(text) or (key == "vllm" and line.source.startswith(_VLLM)):
                self.votes[key] += 1
                return

    def other(self) -> str:
        """The program that wrote it, if it is no model server; else empty."""
        if not self.foreign:
            return ""
        name = self.foreign.most_common(1)[0][0]
        strong = next(program.strong for program in programs() if program.name == name)
        engine = self.votes.total() - self.votes["llama.cpp"]
        if name == "a build" and self.kernels:
            return ""
        if name == "pytest" or not engine:
            return name if not self.started or name in ("pytest", "llama.cpp") else ""
        return name if strong and not self.started and not self.ready else ""

    def _state(self, line: Line) -> None:
        text, number = line.text, line.number
        text = text[:_LOOKED]
        if READY.search(text):
            self.first_ready = self.first_ready or number
            self.ready = max(self.ready, number)
        if UP.search(text):
            self.up = max(self.up, number)
        if ALIVE.search(text):
            self.alive = max(self.alive, number)
        if UNHEALTHY.search(text):
            self.unhealthy = max(self.unhealthy, number)
        if "aiting for" in text or "broadcast block" in text:
            for index, regex in enumerate(_WAITING):
                if regex.search(text):
                    waits = self.waits.setdefault(index, [])
                    del waits[_KEPT:]
                    waits.append(NumberedLine(number, text, line.source))

    def goes_on(self, line: Line) -> None:
        """Read a line that is not part of a failure."""
        if line.level == "INFO" and not ends(line.text):
            lines = self.progress.setdefault(line.source, collections.deque(maxlen=_KEPT))
            lines.append(line.number)

    def passed_over(self, lines: Iterable[Line]) -> None:
        """Read the last lines of skipped groups."""
        for line in lines:
            self._state(line)
            self.goes_on(line)
            if line.number > self.last.line:
                self.last = NumberedLine(line.number, line.text, line.source)

    def with_others(self, others: Sequence[ServerState]) -> ServerState:
        """The same with the states of other nodes of the same server."""
        every = [self, *others]
        return dataclasses.replace(
            self,
            ready=max(s.ready for s in every),
            first_ready=min((s.first_ready for s in every if s.first_ready), default=0),
            up=max(s.up for s in every),
            alive=max(s.alive for s in every),
            unhealthy=max(s.unhealthy for s in every),
            last=max((s.last for s in every), key=lambda n: n.line),
            waits={k: list(v) for s in reversed(every) for k, v in s.waits.items()},
            progress={k: v for s in every for k, v in s.progress.items()},
            votes=sum((s.votes for s in every), collections.Counter()),
            levelled=any(s.levelled for s in every),
        )

    def after(self, source: str, line: int) -> int:
        """The number of progress lines of a process after a line."""
        return sum(number > line for number in self.progress.get(source, ()))

    def wrote(self) -> str:
        """The engine that wrote the log; empty if unknown."""
        for key in ("nim", "tensorrt-llm", "sglang", "llama.cpp"):
            if self.votes[key] >= max(1, self.votes["vllm"] // 3):
                return key
        return next((key for key, _ in self.votes.most_common(1)), "")

    def certain(self, engine: str) -> bool:
        """Whether several lines name an engine, and none names vLLM."""
        return self.votes[engine] > 1 and not self.votes["vllm"]

    def hang(self) -> list[NumberedLine]:
        """The lines of an endless wait."""
        for index, waits in self.waits.items():
            seconds = _WAITING[index].search(waits[-1].text) if waits else None
            if seconds is None or self.ready > waits[-1].line:
                continue
            long = int(seconds.groupdict().get("seconds") or 0) >= _LONG
            after = sum(self.after(source, waits[-1].line) for source in self.progress)
            if (long or len(waits) >= _WAITS) and after < _WAITS:
                return waits
        return []
