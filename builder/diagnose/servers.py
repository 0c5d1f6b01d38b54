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
from builder.diagnose.prose import Speech

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
            r"\[TRT-LLM\]|TensorRT[- ]LLM version|\btrtllm-serve\b|\bTLLM_\w"
            r"|(?<!nv_internal/)(?<!cpp/)\btensorrt_llm(?:\.|/(?!kernels|common|cutlass|runtime/cpp))"
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
            r"|^(?:usage: )?vllm\b(?!==)"
        ),
    ),
    ("ray", "Ray", re.compile(r"\bray\.(?:exceptions|init)|\braylet\b|\(RayWorker")),
)
#: An address names an engine, and is not of its log.
_URL = re.compile(r"https?://\S+")
#: What FlashInfer's copy of TensorRT-LLM's code writes too, in a log of any engine.
_COPIED = re.compile(r"\[TensorRT-LLM\]")
#: Lines by which a server names itself.
_BANNERS = (
    ("vllm", re.compile(r"vLLM (?:API )?server version \d|Initializing a V1 LLM engine")),
    ("sglang", re.compile(r"== SGLang ==|server_args=ServerArgs\(")),
    ("tensorrt-llm", re.compile(r"TensorRT[- ]LLM version")),
)
#: Signs of a fork or a development build: its flags are not those of a release.
_FORK = re.compile(
    r"Registered model loader .{0,120}\bb12x\b|vllm-node-b12x|spark-vllm-b12x|\bvllm[-_]fork\b"
    r"|(?:vLLM (?:API )?server|█ ) version \d[\w.]*(?:\+|\.dev|rc\d)\S*"
    r"|V1 LLM engine \(v\d[\w.]*(?:\+|\.dev|rc\d)[^)]*\)"
)
_BANNER_SIGNS = ("ersion", "b12x", "LLM engine", "fork", "ServerArgs(", "== SGLang")


#: Of how many lines of a text one must show what it is.
_SHARE = 5
#: What a text is called that people wrote.
TALK = "a conversation or a page"


class Program(NamedTuple):
    """A program that is no model server."""

    name: str
    #: it decides even if an engine is named too
    strong: bool
    #: it quotes what programs write, so lines of a log in it are one
    text: bool
    lines: re.Pattern[str]


@cache
def programs() -> tuple[Program, ...]:
    """The programs of ``builder/data/programs.toml``."""
    table = tomllib.loads(package_file("data", "programs.toml").read_text("utf-8"))
    return tuple(
        Program(
            row["name"],
            row.get("strong", False),
            row.get("text", False),
            re.compile("|".join(row["patterns"])),
        )
        for row in table["program"]
    )


#: Anything of a model server or its machine, for texts without a line of an engine.
RELATED = re.compile(
    r"vllm|sglang|flashinfer|cutlass|\bcuda|nvidia|\bnccl|\bgloo\b|\btorch|triton|tensorrt|NVRM"
    r"|safetensors|hugging|hf\.co|transformers|\bgpus?\b|raylet|\bray\.|ibv_|EngineCore|kv.?cache"
    r"|\bnvcc|ptxas|\bllms?\b|tokenizer|\bNV_ERR|trt-?llm|deep_?gemm|fused_?moe|[._]experts\b"
    r"|speculative decod|paged.?kv|layers\.\d|[._]attn\b|attention.?backend|nvfp4|\bmxfp[48]"
    r"|weight_scale|lm_head|in features size|\bgb10\b|\bb12x\b|\bmlx5_core\b|\bpcieport\b",
    re.IGNORECASE,
)

_NAMES = (
    r"(?:nginx|apache2?|httpd|caddy|haproxy|traefik|mysqld?|mariadbd?|postgres(?:ql)?|mongod?"
    r"|redis(?:-server)?|sshd|postfix|dovecot|cron|cups|rabbitmq(?:-server)?|elasticsearch"
    r"|memcached|jenkins|snapd)"
)
#: Names of containers that are parts of an installation, and no model server.
SIDECAR = re.compile(
    rf"(?:^|[-_./])(?:{_NAMES}|ssh|(?:open-?)?webui|web|frontend|ui|db|database|grafana|prometheus|loki"
    r"|promtail|exporter|watchtower|portainer|keycloak|minio|qdrant|milvus|chroma|n8n|searxng"
    r"|node[-_]exporter|dcgm(?:[-_]exporter)?|tailscale|cloudflared|certbot|adminer|pgadmin)"
    r"(?=$|[-_./]|\d)"
)
#: Lines about a service of the system that is no model server; a journal has many.
SERVICE = re.compile(
    rf"\b(?<![\w.-]){_NAMES}(?:@\S{{1,60}})?\.service\b"
    rf"|^{_NAMES}(?:\[\d{{1,9}}\])?: |[Kk]ill(?:ed)? process \d+,? \({_NAMES}\)"
)

#: Lines that a text quotes as a whole.
_RECORD = re.compile(
    r"Traceback \(most recent call last|\s+File \"[^\"]+\", line \d|NVRM: |ninja: |ptxas "
    r"|terminate called |\s+what\(\): "
    r"|(?:[a-z_]\w*\.)*[A-Z]\w{2,}(?:Error|Exception): \S|vllm: error: |usage: |docker: "
    r"|(?:ERROR|FATAL): \S"
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
#: Lines that a server writes once at a start.  They say that it came up then, and nothing later.
UP = re.compile(
    r"Application startup complete|Uvicorn running on|fired up and ready|server is listening"
    r"|\ball slots are idle|Started HTTPService at|Started GRPCInferenceService"
    r"|\bRoute: /\S{1,80}, Methods: "
)
#: A request that generates or computes, and the status of its answer.  Checks such as /health and
#: /v1/models are answered by a process that stays alive when the engine is dead or hangs.
REQUEST = re.compile(
    r"\"(?:POST \S{0,200}?/(?:chat/completions|completions|responses|messages|embeddings|rerank"
    r"|score|pooling|classify|audio/\w+|images/\w+|generate|generate_stream|invocations|chat|embed|encode)"
    r"|GET /health_generate)(?:\?\S{0,400})? HTTP/[\d.]+\" ?(?P<status>\d{3})"
)
#: What vLLM's statistics say: tokens in a second, and requests that run.
STATISTICS = re.compile(
    r"Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, Avg generation throughput: "
    r"(?P<tokens>[\d.]+) tokens/s, Running: (?P<running>\d+)"
)
#: SGLang's scheduler after some steps; a batch of requests given to vLLM without a server.
_GENERATED = re.compile(
    r"Decode batch[,. ].*gen throughput[^:]{0,20}: (?!0\.0*\b)[\d.]+|Processed prompts: 100%"
)
#: An answer to a check.
CHECKED = re.compile(
    r"\"(?:GET|HEAD) /(?:v1/models|v1/health\w*|health|healthz|ping|metrics|ready|live\w*|load"
    r"|version|get_model_info|model_info|server_info|get_server_info)\b[^\"\s]* HTTP/[\d.]+\" ?200"
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
    "HTTP/",
    "throughput",
    "ready to",
    "listening",
    "slots are",
    "Started ",
    "batch",
    "Processed",
    "aiting for",
    "broadcast block",
    ", Methods: ",
    "utotun",
)
#: Texts of lines that a server writes while it does no work.
_IDLE = ("HTTP/1.", "throughput", "broadcast block", "INFO:  ")
#: Characters of a line that are searched for its program.
_LOOKED = 2000
#: Maximum number of stored lines about one wait.
_KEPT = 64
#: Different texts from which on a text is more than a paste of the lines that matter.
_FEW = 8
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
    #: the first line that shows that the server was ready
    first_ready: int = 0
    #: the first and last line that says that the server came up
    first_up: int = 0
    up: int = 0
    #: the last answered request.  A stream's line is written before its first token.
    answered: int = 0
    #: the last line that shows that tokens were generated and a request ended
    generated: int = 0
    #: the last line with statistics
    counted: int = 0
    #: the last answered check, which a server with a dead engine answers too
    checked: int = 0
    #: requests that were refused (4xx), or failed (5xx) since one was answered
    refused: list[NumberedLine] = field(default_factory=list)
    failed: list[NumberedLine] = field(default_factory=list)
    #: the last failed health check
    unhealthy: int = 0
    #: the last line about a search for the fastest kernels
    tuning: int = 0
    #: statistics with running requests and no tokens, since the last tokens
    stuck: collections.deque[NumberedLine] = field(
        default_factory=lambda: collections.deque(maxlen=_KEPT)
    )
    #: requests that ran at the last statistics, and its line if it had tokens
    _ran: int = 0
    _flowed: int = 0
    #: the last line that a server writes while it does no work
    _idle: int = 0
    last: NumberedLine = field(default_factory=lambda: NumberedLine(0, ""))
    waits: dict[int, collections.deque[NumberedLine]] = field(default_factory=dict)
    #: the last progress lines by process
    progress: dict[str, collections.deque[int]] = field(default_factory=dict)
    votes: collections.Counter[str] = field(default_factory=collections.Counter)
    #: lines of programs that are no model server, by name
    foreign: collections.Counter[str] = field(default_factory=collections.Counter)
    #: whether one is as a log or a traceback has it, and not only a text about one
    records: bool = False
    speech: Speech = field(default_factory=Speech)
    #: whether one of the first lines has anything of a model server or its machine
    related: bool = False
    #: lines that TensorRT-LLM writes, and FlashInfer's copy of its code
    copied: int = 0
    #: the engine that named itself
    named: str = ""
    #: the first line that shows a fork or a development build
    fork: NumberedLine | None = None
    #: the first different texts
    texts: set[str] = field(default_factory=set)
    #: whether one is of a compiler of CUDA code, as an engine starts it
    kernels: bool = False
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
        if len(self.texts) < _FEW:
            self.texts.add(text[:_LOOKED])
        if not self.started and self.lines <= _FIRST and STARTED.search(text):
            self.started = line.number
        if has_any(_WORDS, text):
            self._state(line)

    def _vote(self, line: Line) -> None:
        text = line.text[:_LOOKED]
        self.records = (
            self.records or bool(line.level and line.head) or _RECORD.match(text) is not None
        )
        if self.lines <= _FIRST:
            self._read_as_foreign(text)
        self.kernels = self.kernels or bool(_KERNELS.search(text))
        self.related = self.related or bool(RELATED.search(text) or RELATED.search(line.source))
        if has_any(_BANNER_SIGNS, text):
            self._banner(line)
        if "TRT-LLM]" in line.head:
            self.votes["tensorrt-llm"] += 1
            return
        own = _URL.sub("", text) if "://" in text else text
        for key, _, regex in ENGINES:
            if regex.search(own) or (key == "vllm" and line.source.startswith(_VLLM)):
                self.votes[key] += 1
                return
        self.copied += bool(_COPIED.search(text))

    def _read_as_foreign(self, text: str) -> None:
        """Read a line for what it would be if no model server wrote it."""
        if not self.records:
            self.speech.feed(text)
        for program in programs():
            if program.lines.search(text):
                self.foreign[program.name] += 1
                return

    def _banner(self, line: Line) -> None:
        """Read a line by which a server may name itself, or what it was built from."""
        if not self.named:
            self.named = next((key for key, regex in _BANNERS if regex.search(line.text)), "")
        if self.fork is None and _FORK.search(line.text):
            self.fork = NumberedLine(line.number, line.text.strip())

    def other(self) -> str:
        """The program that wrote it, if it is no model server; else empty."""
        quotes = self.records or bool(self.named) or self.ready or self.checked
        if not quotes and self.speech.is_talk():
            return TALK
        if not self.foreign:
            return ""
        name = self.foreign.most_common(1)[0][0]
        program = next(program for program in programs() if program.name == name)
        strong = program.strong
        if program.text:
            part = self.foreign[name] * _SHARE >= min(self.lines, _FIRST)
            return name if part and not quotes else ""
        engine = self.votes.total() - self.votes["llama.cpp"]
        if name == "a build" and self.kernels:
            return ""
        if name == "pytest" or not engine:
            return name if not self.started or name in ("pytest", "llama.cpp") else ""
        return name if strong and not self.started and not self.ready else ""

    @property
    def alive(self) -> int:
        """The last line that shows that a request was answered."""
        return max(self.answered, self.generated)

    @property
    def ready(self) -> int:
        """The last line of a start or of an answered request; answered checks show nothing."""
        return max(self.up, self.alive)

    def _state(self, line: Line) -> None:
        text, number = line.text[:_LOOKED], line.number
        if has_any(_IDLE, text):
            self._idle = number
        if UP.search(text):
            self.first_up = self.first_up or number
            self.up = max(self.up, number)
        if "utotun" in text:
            self.tuning = number
        if "HTTP/" in text:
            self._access(text, line)
        elif match := STATISTICS.search(text):
            self._statistics(match, line)
        elif _GENERATED.search(text):
            self.generated = max(self.generated, number)
        if self.ready and not self.first_ready:
            self.first_ready = number
        if "aiting for" in text or "broadcast block" in text:
            self._waits(text, line)

    def _waits(self, text: str, line: Line) -> None:
        """Read a line about a wait."""
        for index, regex in enumerate(_WAITING):
            if regex.search(text):
                waits = self.waits.setdefault(index, collections.deque(maxlen=_KEPT))
                waits.append(NumberedLine(line.number, text, line.source))

    def _access(self, text: str, line: Line) -> None:
        """Read a line about a request."""
        if match := REQUEST.search(text):
            status = match["status"]
            if status == "200":
                self.answered = max(self.answered, line.number)
                self.failed = [one for one in self.failed if one.line > line.number]
            elif status in ("400", "422") or status[0] == "5":  # 401 says nothing of the server
                kept = self.failed if status[0] == "5" else self.refused
                del kept[_KEPT:]
                kept.append(NumberedLine(line.number, text.strip(), line.source))
        elif CHECKED.search(text):
            self.checked = max(self.checked, line.number)
        elif UNHEALTHY.search(text):
            self.unhealthy = max(self.unhealthy, line.number)

    def _statistics(self, match: re.Match[str], line: Line) -> None:
        """Read vLLM's statistics: tokens count when a request ended, as the last ones of a dead
        engine are told too.
        """
        self.counted = max(self.counted, line.number)
        running, tokens = int(match["running"]), float(match["tokens"])
        if tokens or float(match["prompt"]) or not running:
            later = (one for one in self.stuck if one.line > line.number)
            self.stuck = collections.deque(later, maxlen=_KEPT)
        else:
            self.stuck.append(NumberedLine(line.number, line.text[:_LOOKED], line.source))
        if tokens and (not running or running < self._ran):
            self.generated = max(self.generated, line.number)
        elif tokens:  # of two in a row the first one: the second shows that they went on after it
            self.generated = max(self.generated, self._flowed)
        self._ran, self._flowed = running, line.number if tokens else 0

    def goes_on(self, line: Line) -> None:
        """Read a line that is not part of a failure: of work, not of a request or of waiting."""
        plain = line.level == "INFO" or (not line.level and line.head.startswith("[20"))  # SGLang
        if plain and line.number != self._idle and not ends(line.text):
            lines = self.progress.setdefault(line.source, collections.deque(maxlen=_KEPT))
            lines.append(line.number)

    def passed_over(self, lines: Iterable[Line]) -> None:
        """Read the last lines of skipped groups."""
        for line in sorted(lines):
            self._state(line)
            self.goes_on(line)
            if line.number > self.last.line:
                self.last = NumberedLine(line.number, line.text, line.source)

    def with_others(self, others: Sequence[ServerState]) -> ServerState:
        """The same with the states of other nodes of the same server."""
        every = [self, *others]
        return dataclasses.replace(
            self,
            first_ready=min((s.first_ready for s in every if s.first_ready), default=0),
            first_up=min((s.first_up for s in every if s.first_up), default=0),
            up=max(s.up for s in every),
            answered=max(s.answered for s in every),
            generated=max(s.generated for s in every),
            counted=max(s.counted for s in every),
            checked=max(s.checked for s in every),
            refused=[line for s in every for line in s.refused],
            failed=[line for s in every for line in s.failed],
            unhealthy=max(s.unhealthy for s in every),
            last=max((s.last for s in every), key=lambda n: n.line),
            waits={k: v for s in reversed(every) for k, v in s.waits.items()},
            stuck=max((s.stuck for s in every), key=len),
            progress={k: v for s in every for k, v in s.progress.items()},
            votes=sum((s.votes for s in every), collections.Counter()),
            named=next((s.named for s in every if s.named), ""),
            fork=next((s.fork for s in every if s.fork), None),
            levelled=any(s.levelled for s in every),
        )

    def after(self, source: str, line: int) -> int:
        """The number of progress lines of a process after a line."""
        return sum(number > line for number in self.progress.get(source, ()))

    def wrote(self) -> str:
        """The engine that wrote the log; empty if unknown."""
        if self.named and not self.votes["nim"]:
            return self.named
        for key in ("nim", "tensorrt-llm", "sglang", "llama.cpp"):
            if self.votes[key] >= max(1, self.votes["vllm"] // 3):
                return key
        own = next((key for key, _ in self.votes.most_common(1)), "")
        return own or ("tensorrt-llm" if self.copied else "")

    def certain(self, engine: str) -> bool:
        """Whether an engine named itself, or several lines name it, and none names vLLM."""
        return self.named == engine or (self.votes[engine] > 1 and not self.votes["vllm"])

    def came_up(self, line: int) -> bool:
        """Whether the server was up before a line."""
        return 0 < self.first_up < line or 0 < self.first_ready < line

    def hang(self) -> list[NumberedLine]:
        """The lines of an endless wait.

        An answered request ends none: the line of a stream is written before its first token.
        """
        moved = max(self.up, self.generated)
        for index, every in self.waits.items():
            waits = [wait for wait in every if wait.line > moved]
            seconds = _WAITING[index].search(waits[-1].text) if waits else None
            if seconds is None:
                continue
            long = int(seconds.groupdict().get("seconds") or 0) >= _LONG
            after = sum(self.after(source, waits[-1].line) for source in self.progress)
            if (long or len(waits) >= _WAITS) and after < _WAITS:
                return waits
        return list(self.stuck) if len(self.stuck) >= _WAITS else []

    def stalls(self) -> NumberedLine | None:
        """The last line of a wait, since which nothing was answered, of a server that was up."""
        waits = [every[-1] for every in self.waits.values() if every]
        last = max(waits, key=lambda wait: wait.line, default=None)
        if last is None or not 0 < self.up < last.line or self.alive > last.line:
            return None
        return last
