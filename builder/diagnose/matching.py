"""One pass over a log: selected kernels, requested settings, and matching lines.

The log is read once, in blocks, and not stored.  In a block each pattern is tried only on the
lines that have its fixed text, and only a limited number of distinct hits per entry is stored, so
time grows with the size of the log and memory does not.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from msgspec import Meta

from builder.common.document import Count, Part, Text
from builder.diagnose.entries import PROSE, SKIPPED, Condition, Entry, Pattern, Regex, fixed_text
from builder.diagnose.failures import LOUD, NAMED, QUOTED, Failures
from builder.diagnose.logs import Reader
from builder.diagnose.servers import SERVICE, has_any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from builder.diagnose.logs import Line


class Selection(Part, frozen=True):
    """One kernel that was selected for one kind of layer, and its first log line."""

    kind: Text
    kernel: Text
    line: Count
    file: Annotated[str, Meta(description="the log it is in, of several")] = ""


class Form(NamedTuple):
    """One form of such a line.  ``kernel`` is a group of the pattern."""

    kind: str
    pattern: str


FORMS = (
    # NVFP4: `Using NvFp4LinearBackend.MARLIN for` to 0.19, a class name from 0.20
    Form("nvfp4-linear", r"Using (?P<kernel>[\w.-]+) for NVFP4 GEMM"),
    Form("nvfp4-moe", r"Using '(?P<kernel>\w+)' NvFp4 MoE backend"),
    # FP8, per tensor and per block; the class name tells which
    Form("fp8-linear", r"Selected (?P<kernel>\w+Kernel) for \w+"),
    Form("fp8-moe", r"Using '?(?P<kernel>\w+)'? Fp8 MoE backend"),
    # MX formats
    Form("mxfp8-linear", r"Using (?P<kernel>\w+)(?: backend)? for MXFP8 GEMM"),
    Form("mxfp8-moe", r"Using '(?P<kernel>\w+)' MxFp8 MoE backend"),
    Form("mxfp4-linear", r"Using (?P<kernel>\w+) for MXFP4 GEMM"),
    Form("mxfp4-moe", r"Using '(?P<kernel>\w+)' Mxfp4 MoE backend"),  # from 0.19
    Form("mxfp4-moe", r"Using (?P<kernel>FlashInfer MXFP4 [\w ]+?) backend"),
    Form("mxfp4-moe", r"Using (?P<kernel>Marlin|Triton) backend$"),  # to 0.18
    # weight-only integers
    Form("wna16-linear", r"Using (?P<kernel>\w+LinearKernel) for \w*(?:GPTQ|AWQ|WNA16)\w*"),
    Form("wna16-moe", r"Using '(?P<kernel>\w+)' WNA16 MoE backend"),
    Form("wna16-moe", r"Using (?P<kernel>\w+) backend for WNA16 MoE"),  # to 0.22
    Form("w4a8-linear", r"Using (?P<kernel>\w+) for CompressedTensorsW4A8\w+"),
    Form("w4a8-moe", r"Using '?(?P<kernel>\w+)'? W4A8 (?:Int8 )?MoE backend"),
    Form("int8-moe", r"Using '?(?P<kernel>\w+)'? Int8 MoE backend"),
    # unquantised experts, usually of a draft model
    Form("unquantized-moe", r"Using (?P<kernel>\w+) Unquantized MoE (?:LoRA )?backend"),
    Form("unquantized-moe", r"Using (?P<kernel>[\w ]+?) backend for Unquantized MoE"),  # to 0.19
    # attention: selected automatically, or requested
    Form("attention", r"Using (?P<kernel>\w+) attention backend out of potential backends"),
    Form("attention", r"Using AttentionBackendEnum\.(?P<kernel>\w+) backend\."),
    Form("mla-prefill", r"Using (?P<kernel>\w+) MLA prefill backend"),
    Form("vision-attention", r"Using (?:AttentionBackendEnum\.)?(?P<kernel>\w+) for MMEncoder"),
    Form(
        "vision-attention",
        r"Using backend (?:AttentionBackendEnum\.)?(?P<kernel>\w+) for vit attention",
    ),
    # TensorRT-LLM logs little: its fall-back, and its configuration
    Form("moe", r"Using (?P<kernel>CutlassFusedMoE) instead"),
    Form("moe", r"moe_config=MoeConfig\([^)]*?backend=['\"](?P<kernel>\w+)['\"]"),
    Form("moe", r"\bmoe_backend='(?P<kernel>CUTLASS|CUTEDSL|TRTLLM|VANILLA|TRITON|WIDEEP)'"),
    Form("attention", r"\battn_backend=['\"](?P<kernel>\w+)['\"]"),
)

#: Names of kinds in the report.
LABELS: Mapping[str, str] = {
    "nvfp4-linear": "NVFP4 linear",
    "nvfp4-moe": "NVFP4 MoE",
    "fp8-linear": "FP8 linear",
    "fp8-block": "FP8 linear, block scales",
    "fp8-moe": "FP8 MoE",
    "int8-linear": "INT8 linear",
    "int8-moe": "INT8 MoE",
    "mxfp8-linear": "MXFP8 linear",
    "mxfp8-moe": "MXFP8 MoE",
    "mxfp4-linear": "MXFP4 linear",
    "mxfp4-moe": "MXFP4 MoE",
    "wna16-linear": "WNA16 linear",
    "wna16-moe": "WNA16 MoE",
    "w4a8-linear": "W4A8 linear",
    "w4a8-moe": "W4A8 MoE",
    "unquantized-moe": "unquantised MoE",
    "attention": "attention",
    "mla-prefill": "MLA prefill attention",
    "vision-attention": "vision attention",
    "moe": "MoE",
}


def selection(kind: str, match: re.Match[str], line: int) -> Selection:
    """The selection in a matching line."""
    kernel = match["kernel"].removeprefix("NvFp4LinearBackend.")
    if kind == "fp8-linear":
        if re.search(r"Int8", kernel):
            kind = "int8-linear"
        elif re.search(r"Block|DeepG(?:EMM|emm)", kernel):
            kind = "fp8-block"
    return Selection(kind, kernel, line)


_FLAGS = (
    "linear_backend",
    "moe_backend",
    "attention_backend",
    "reasoning_parser",
    "tool_call_parser",
    "quantization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "nnodes",
)
_BACKENDS = (
    "auto|cutlass|b12x|marlin|triton|emulation|humming|deep[-_]gemm|flashinfer[-_](?:b12x|cutlass|"
    "cutedsl|trtllm|cudnn)"
)
_VARIABLE = re.compile(
    r"\b((?:VLLM|TLLM|FLASHINFER)_[A-Z0-9_]+|CUTE_DSL_ARCH|(?:GLOO|NCCL)_SOCKET_IFNAME)="
    r"[\"']?([^\s\"',;)\]}]*)"
)
_FLAG = re.compile(rf"--(linear|moe)[-_]backend[= ][\"']?({_BACKENDS})\b")
_ARGUMENT = re.compile(rf"'({'|'.join(_FLAGS)})': '?([\w.-]+)")
_CONFIG = re.compile(r"\b(linear_backend|moe_backend|quantization)='?([\w.-]+)")
_DRAFT = re.compile(
    r"'speculative_config': \{[^{}]*\}|speculative_config=SpeculativeConfig\([^)]*\)"
)
_DRAFT_ENTRY = re.compile(r"'?moe_backend'?[:=] ?'([\w-]+)'")
#: Prefixes of NAME=VALUE in an assignment.
_SETTERS = (
    "export",
    "-e",
    "-e=",
    "--env",
    "--env=",
    "env",
    "ENV",
    "+",
    "-",
    "-x",
    '"',
    "'",
    "[",
    ",",
    "{",
)

#: Text before a flag that a message only recommends.
_ADVICE = ("use ", "pass ", "set ", "try ", "with ", "to ")

#: Texts, one of which is in every line with a setting.
TRIGGERS = (
    "VLLM_",
    "TLLM_",
    "FLASHINFER_",
    "CUTE_DSL_ARCH=",
    "_SOCKET_IFNAME=",
    "-backend",
    "non-default args",
    "KernelConfig(",
)


class Setting(NamedTuple):
    """One requested setting."""

    name: str
    value: str
    line: int


def settings_in(text: str, line: int) -> list[Setting]:
    """Settings requested in one line of a log."""
    settings = [
        Setting(match[1], match[2], line)
        for match in _VARIABLE.finditer(text)
        if _is_set(text, match.start())
    ]
    echo = "non-default args" in text or "KernelConfig(" in text
    if not echo:
        settings += [
            Setting(f"{match[1]}_backend", match[2].replace("-", "_"), line)
            for match in _FLAG.finditer(text)
            if not text[: match.start()].lower().endswith(_ADVICE)
        ]
        return [s for s in settings if s.value != "auto"]
    for draft in _DRAFT.findall(text):
        settings += [Setting("draft.moe_backend", m, line) for m in _DRAFT_ENTRY.findall(draft)]
    own = _DRAFT.sub("", text)
    for match in [*_ARGUMENT.finditer(own), *_CONFIG.finditer(own)]:
        settings.append(Setting(match[1], match[2], line))
    return [s for s in settings if s.value not in ("auto", "None")]


def _is_set(text: str, start: int) -> bool:
    """Whether NAME=VALUE at ``start`` is an assignment, not advice in a message."""
    before = text[:start].rstrip()
    if not before or before.endswith(_SETTERS):
        return True
    last = before.rsplit(None, 1)[-1]
    return bool(re.fullmatch(r"[\"']?[A-Z][A-Z0-9_]+=\S*", last))


_BLOCK = 1 << 18
#: Maximum number of distinct hits of one entry.
_KEPT = 16

_VLLM_VERSIONS = (
    r"Initializing a V1 LLM engine \(v(?P<version>[\w.+]+)\)",
    r"vLLM server version (?P<version>\d[\w.+]*)",
    r"vLLM API server version (?P<version>\d[\w.+]*)",
    r"█  version (?P<version>\d[\w.+]*)",
)
_TRTLLM_VERSIONS = (r"TensorRT[- ]LLM version: (?P<version>\d[\w.+]*)",)


class Hit(NamedTuple):
    """A line that an entry's pattern matched, with the pattern's named groups."""

    line: int
    groups: Mapping[str, str]
    by_setting: bool = False
    text: str = ""


@dataclass
class Scan:
    """What one attempt of one server wrote."""

    lines: int = 0
    #: number of attempted regular expressions, which the work is proportional to
    searches: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    trtllm: dict[str, int] = field(default_factory=dict)
    selections: dict[tuple[str, str], Selection] = field(default_factory=dict)
    settings: dict[tuple[str, str], Setting] = field(default_factory=dict)
    hits: dict[str, list[Hit]] = field(default_factory=dict)
    #: number of lines of each entry
    times: dict[str, int] = field(default_factory=dict)
    #: the last lines of each entry, as many as it needs
    lasts: dict[str, collections.deque[int]] = field(default_factory=dict)
    #: the last joined line of each entry
    joined: dict[str, int] = field(default_factory=dict)
    failures: Failures = field(default_factory=Failures)
    #: the same for the physical lines of a log that may be wrapped
    unjoined: Failures = field(default_factory=Failures)
    #: sources of the patterns of ``with`` and ``without`` that are somewhere in the log
    present: set[str] = field(default_factory=set)
    #: every line so far was a physical line alone, so ``unjoined`` is as ``failures``
    _alike: bool = False
    _parted: bool = False

    def take(self, line: Line, *, wrapped: bool) -> None:
        """Read one line for failures."""
        alone = line.pieces == 1 and not line.again
        if wrapped and not alone:
            self.part()
        if not line.again:
            self.failures.feed(line)
        if wrapped and line.pieces == 1:
            if self._parted:
                self.unjoined.feed(line)
            else:
                self._alike = True

    def part(self) -> None:
        """Let the two readings differ from here on; until then only one is made."""
        if not self._parted:
            self._parted = True
            if self._alike:
                self.unjoined = self.failures.copy()

    def with_settings(self, more: Mapping[tuple[str, str], Setting]) -> Scan:
        """The same with settings of an earlier attempt."""
        return dataclasses.replace(self, settings={**more, **self.settings}) if more else self

    def with_nodes(self, others: Sequence[Scan]) -> Scan:
        """The same with what other nodes of the same server wrote."""
        hits = {key: list(same) for key, same in self.hits.items()}
        for other in others:
            for key, same in other.hits.items():
                hits.setdefault(key, []).extend(same)
        every = [self, *others]
        return dataclasses.replace(
            self,
            versions=_first_of(s.versions for s in every),
            trtllm=_first_of(s.trtllm for s in every),
            selections=_first_of(s.selections for s in every),
            settings=_first_of(s.settings for s in every),
            hits=hits,
            times=dict(sum((collections.Counter(s.times) for s in every), collections.Counter())),
            lasts=_first_of(s.lasts for s in every),
            failures=self.failures.with_others([s.failures for s in others]),
            unjoined=self.unjoined.with_others([s.unjoined for s in others]),
            present=set().union(*(s.present for s in every)),
        )

    def troubled(self) -> bool:
        """Whether it was ready, or something failed."""
        state = self.failures
        return bool(state.exceptions or state.events or state.course.ready or state.course.waits)

    def broken(self) -> bool:
        """Whether it ended with a failure."""
        return any(not failure.survived for failure in self.failures.failures())

    def passed(self, entry: Entry, line: int) -> bool:
        """Whether the server became ready, or answered, after as many lines as an entry needs."""
        lasts = self.lasts.get(entry.id, (line,))
        state = self.failures.course
        # an answered request ends no wait: the line of a stream is written before its first token
        return max(state.up, state.generated if entry.times > 1 else state.alive) > lasts[0]

    def shows(self, entry: Entry) -> bool:
        """Whether the rest of the log meets an entry's conditions."""
        required = self._holds(entry.required, every=True)
        return required and not self._holds(entry.forbidden, every=False)

    def _holds(self, condition: Condition, *, every: bool) -> bool:
        """Whether all (or any) of a condition's patterns and settings are in the log."""
        facts = [pattern.regex.pattern in self.present for pattern in condition.patterns]
        facts += [
            any(asked.holds(s.name, s.value) for s in self.settings.values())
            for asked in condition.settings
        ]
        return all(facts) if every else any(facts)


_T = TypeVar("_T")


def _first_of(tables: Iterable[Mapping[Any, _T]]) -> dict[Any, _T]:
    """Several tables as one; of a key in several, the first value."""
    firsts: dict[Any, _T] = {}
    for table in tables:
        for key, value in table.items():
            firsts.setdefault(key, value)
    return firsts


#: Texts that a server writes once in each attempt, and cheap signs of them.
_STAGES = (
    re.compile(r"== SGLang ==|NVIDIA Inference Microservice"),
    re.compile(r"vLLM (?:API )?server version \d"),
    re.compile(r"█  version \d"),
    re.compile(r"server_args=ServerArgs\("),
    re.compile(r"Initializing an? (?:V1 )?LLM engine"),
)
_STAGE_SIGNS = ("ersion", "== SGLang", "ServerArgs(", "Initializing a", "Microservice")
#: The engine's process: several of one server may begin.
_ENGINE = len(_STAGES) - 1
#: The end of a container or unit, after which the next line is of another attempt.
_ENDED = re.compile(
    r"^(?P<name>[\w.-]{1,80}) exited with code \d+|Scheduled restart job, restart counter is at"
)
#: Maximum number of servers to tell apart.
_SERVERS = 32


@dataclass
class Server:
    """The attempts of one server; all but the last two are only counted."""

    name: str
    last: Scan = field(default_factory=Scan)
    before: Scan | None = None
    attempts: int = 1
    #: earlier attempts that ended with a failure
    failed: int = 0
    lines: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    #: variables that were set before the first start
    preamble: dict[tuple[str, str], Setting] = field(default_factory=dict)
    first: int = 0
    _stages: set[tuple[int, str]] = field(default_factory=set)
    #: the line that says that the container or unit ended
    _ended: int = 0

    def begins(self, line: Line) -> bool:
        """Whether a line is the first of another attempt."""
        after = self._ended and line.number > self._ended  # a joined line has its first number
        if after and line.text and not _ENDED.search(line.text):
            return True
        if line.again or not has_any(_STAGE_SIGNS, line.text):
            return False
        for index, regex in enumerate(_STAGES):
            if regex.search(line.text):
                stage = (index, line.source.partition(" ")[0] if index == _ENGINE else "")
                if stage not in self._stages:
                    self._stages.add(stage)
                    self.first = self.first or line.number
                    return False
                return index != _ENGINE or self.last.troubled()
        return False

    def again(self, line: Line) -> None:
        """Begin another attempt; the last one is kept until the next."""
        self.last.part()
        self.failed += self.last.broken()
        self.before, self.last = self.last, Scan()
        self.attempts += 1
        self._stages, self._ended = set(), 0
        self.begins(line)

    def with_nodes(self, others: Sequence[Server]) -> Server:
        """The same with what other nodes of it wrote in the last attempt."""
        if not others:
            return self
        return dataclasses.replace(self, last=self.last.with_nodes([s.last for s in others]))

    def ended(self, line: Line) -> None:
        """The container or unit ended, as a line says."""
        self._ended = line.number


@dataclass
class Log:
    """The servers of one log."""

    servers: dict[str, Server] = field(default_factory=dict)
    lines: int = 0
    turned: int = 0
    #: processes pending lines of a block
    flush: Callable[[], None] = lambda: None
    _prefixed: int = 0
    _read: int = 0

    def server(self, line: Line) -> Server:
        """The server that wrote a line."""
        self._read += 1
        name = line.server
        if name and "pod/" not in name and not name.replace(".", "").isdigit():
            self._prefixed += 1  # a table has such lines too; a log of compose has no others
            name = name if self._prefixed * 2 >= self._read else ""
        server = self.servers.get(name)
        if server is None:
            if len(self.servers) >= _SERVERS:
                return next(iter(self.servers.values()))
            server = self.servers[name] = Server(name)
        return server

    def broken(self) -> bool:
        """Whether the last attempt of a server ended with a failure, as far as it was read."""
        return any(server.last.failures.dead() for server in self.servers.values())

    @property
    def searches(self) -> int:
        """Number of attempted regular expressions."""
        return sum(s.last.searches + (s.before.searches if s.before else 0) for s in self.all())

    def all(self) -> list[Server]:
        """Every server, in order of appearance."""
        return list(self.servers.values())


#: The effect of a matching line on the result.
_Note = Callable[[Scan, "re.Match[str]", "Line"], object]


class _Watch(NamedTuple):
    """A pattern, and the action for matching lines."""

    pattern: Pattern
    note: _Note


def scan(lines: Iterable[Line], catalog: Iterable[Entry], result: Log | None = None) -> Log:
    """Read a log once; a given ``result`` can be read meanwhile."""
    log = Log() if result is None else result
    by_needle = _by_needle(tuple(catalog))
    block: list[Line] = []
    owners: list[Server] = []
    scans: list[Scan] = []

    def flush() -> None:
        if block:
            _read_block(block, owners, scans, by_needle)
            for part in (block, owners, scans):
                part.clear()

    log.flush = flush
    reader = lines if isinstance(lines, Reader) else None
    size = 0
    for line in lines:
        server = log.server(line)
        if "exited with" in line.text or "restart counter" in line.text:
            server = _ending(log, server, line)
        if server.begins(line):
            _restart(log, server, line, reader)
        block.append(line)
        owners.append(server)
        scans.append(server.last)
        server.last.take(line, wrapped=reader is not None and reader.wrapped)
        log.lines = line.number
        size += len(line.text) + 1
        if size >= _BLOCK:
            flush()
            size = 0
    flush()
    if reader is not None:
        log.lines, log.turned = reader.lines, reader.turned
        _passed_over(log, reader)
    return log


def _restart(log: Log, server: Server, line: Line, reader: Reader | None) -> None:
    if reader is not None:
        _passed_over(log, reader)
        reader.forget()
    server.again(line)
    for other in log.all():  # Ray's nodes begin again with it
        if other is not server and not other.first and other.name.replace(".", "").isdigit():
            other.again(line)


def _passed_over(log: Log, reader: Reader) -> None:
    """Give each server the last lines of skipped groups."""
    for every in log.all():
        every.last.part()
    for line in reader.passed_over():
        server = log.servers.get(line.server) or log.servers.get("")
        if server is not None:
            server.last.failures.course.passed_over([line])


def _ending(log: Log, server: Server, line: Line) -> Server:
    """The server that a line about the end of a container or unit is about."""
    if match := _ENDED.search(line.text):
        server = log.servers.get(match["name"] or "") or server
        server.ended(line)
    return server


def _read_block(
    block: list[Line],
    owners: list[Server],
    scans: list[Scan],
    by_needle: Mapping[str, list[_Watch]],
) -> None:
    text = "\n".join(line.text for line in block)
    starts = [0]
    for line in block:
        starts.append(starts[-1] + len(line.text) + 1)
    for needle, watches in by_needle.items():
        if needle not in text:  # most are in no log
            continue
        for index in _lines_with(needle, text, starts):
            line, result = block[index], scans[index]
            for watch in watches:
                result.searches += 1
                if match := watch.pattern.regex.search(line.text):
                    watch.note(result, match, line)
    _read_settings(block, owners, scans, text, starts)
    for server, result in {id(s): (o, s) for o, s in zip(owners, scans, strict=True)}.values():
        for version, number in result.versions.items():
            server.versions.setdefault(version, number)


def _read_settings(
    block: list[Line], owners: list[Server], scans: list[Scan], text: str, starts: list[int]
) -> None:
    seen: set[int] = set()
    for trigger in TRIGGERS:
        seen.update(_lines_with(trigger, text, starts))
    for index in sorted(seen):
        line, result, server = block[index], scans[index], owners[index]
        result.searches += 1
        for setting in settings_in(line.text, line.number):
            result.settings.setdefault((setting.name, setting.value), setting)
            if setting.name.isupper() and (not server.first or line.number < server.first):
                server.preamble.setdefault((setting.name, setting.value), setting)


def _lines_with(needle: str, text: str, starts: list[int]) -> Iterator[int]:
    """Indices of the lines that have a text, without repetition."""
    at = text.find(needle)
    while at >= 0:
        index = bisect.bisect_right(starts, at) - 1
        yield index
        at = text.find(needle, starts[index + 1])


@lru_cache(maxsize=2)
def _by_needle(catalog: tuple[Entry, ...]) -> Mapping[str, list[_Watch]]:
    """Patterns by the text that a line must have to try them."""
    watches: defaultdict[str, list[_Watch]] = defaultdict(list)
    for watch in _watches(catalog):
        watches[watch.pattern.needle].append(watch)
    return dict(watches)


def _watches(catalog: Iterable[Entry]) -> Iterator[_Watch]:
    for source in _VLLM_VERSIONS:
        yield _Watch(_pattern(source), _note_version)
    for source in _TRTLLM_VERSIONS:
        yield _Watch(_pattern(source), _note_trtllm_version)
    for form in FORMS:
        yield _Watch(_pattern(form.pattern), _note_selection(form.kind))
    for entry in catalog:
        for pattern in entry.patterns:
            yield _Watch(pattern, _note_hit(entry))
        for condition in (entry.required, entry.forbidden):
            for pattern in condition.patterns:
                yield _Watch(pattern, _note_present(pattern))


@cache
def _pattern(source: str) -> Pattern:
    return Pattern(Regex(source), fixed_text(source))


def _note_version(result: Scan, match: re.Match[str], line: Line) -> None:
    result.versions.setdefault(match["version"].rstrip("."), line.number)


def _note_trtllm_version(result: Scan, match: re.Match[str], line: Line) -> None:
    result.trtllm.setdefault(match["version"].rstrip("."), line.number)


def _note_selection(kind: str) -> _Note:
    def note(result: Scan, match: re.Match[str], line: Line) -> None:
        selected = selection(kind, match, line.number)
        key = (selected.kind, selected.kernel)
        if key not in result.selections or result.selections[key].line > line.number:
            result.selections[key] = selected

    return note


def _is_no_failure(entry: Entry, text: str, line: Line) -> bool:
    """Whether a line is of an attempt that was given up, or of a page about failures."""
    raised = line.level in LOUD or NAMED.match(text.strip())  # no word acquits an exception
    skipped = entry.severity == "error" and not raised and SKIPPED.search(text)
    return bool(skipped or (not line.head and PROSE.search(text)) or SERVICE.search(text))


def _note_hit(entry: Entry) -> _Note:
    def note(result: Scan, match: re.Match[str], line: Line) -> None:
        if any(unless.search(match.string) for unless in entry.unless):
            return
        if _is_no_failure(entry, match.string, line):
            return
        # a part is counted with its whole line, and only once for all readings
        if not line.again if line.pieces == 1 else line.number != result.joined.get(entry.id):
            result.times[entry.id] = result.times.get(entry.id, 0) + 1
            lasts = result.lasts.setdefault(entry.id, collections.deque(maxlen=entry.times))
            lasts.append(line.number)
            if line.pieces > 1:
                result.joined[entry.id] = line.number
        groups = {name: value or "" for name, value in match.groupdict().items()}
        fresh = Hit(line.number, groups, text=match.string.strip()[:QUOTED])
        hits = result.hits.setdefault(entry.id, [])
        for index, hit in enumerate(hits):
            if hit.groups == groups:
                if line.number < hit.line and line.pieces == 1:
                    hits[index] = fresh
                return
        if len(hits) < _KEPT:
            hits.append(fresh)

    return note


def _note_present(pattern: Pattern) -> _Note:
    return lambda result, _match, _line: result.present.add(pattern.regex.pattern)
