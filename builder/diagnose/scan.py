"""One pass over a log: selected kernels, requested settings, and matching lines.

The log is read once, in blocks, and not stored.  In a block each pattern is tried only on the
lines that have its fixed text, and only a limited number of distinct hits per entry is stored, so
time grows with the size of the log and memory does not.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from builder.diagnose.catalog import SKIPPED, Condition, Entry, Pattern, Regex, fixed_text
from builder.diagnose.failures import QUOTED, Failures
from builder.diagnose.lines import Reader
from builder.util.documents import Count, Part, Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from builder.diagnose.lines import Line


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
    found = [
        Setting(match[1], match[2], line)
        for match in _VARIABLE.finditer(text)
        if _is_set(text, match.start())
    ]
    echo = "non-default args" in text or "KernelConfig(" in text
    if not echo:
        found += [
            Setting(f"{match[1]}_backend", match[2].replace("-", "_"), line)
            for match in _FLAG.finditer(text)
            if not text[: match.start()].lower().endswith(_ADVICE)
        ]
        return [s for s in found if s.value != "auto"]
    for draft in _DRAFT.findall(text):
        found += [Setting("draft.moe_backend", m, line) for m in _DRAFT_ENTRY.findall(draft)]
    own = _DRAFT.sub("", text)
    for match in [*_ARGUMENT.finditer(own), *_CONFIG.finditer(own)]:
        found.append(Setting(match[1], match[2], line))
    return [s for s in found if s.value not in ("auto", "None")]


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
    """The result of one pass over a log."""

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
    #: the last joined line of each entry
    joined: dict[str, int] = field(default_factory=dict)
    failures: Failures = field(default_factory=Failures)
    #: the same for the physical lines of a log that may be wrapped
    unjoined: Failures = field(default_factory=Failures)
    #: processes pending lines of a block
    flush: Callable[[], None] = lambda: None
    #: sources of the patterns of ``with`` and ``without`` that are somewhere in the log
    present: set[str] = field(default_factory=set)

    def take(self, line: Line, *, wrapped: bool) -> None:
        """Read one line for failures."""
        self.lines = line.number
        if not line.again:
            self.failures.feed(line)
        if wrapped and line.pieces == 1:
            self.unjoined.feed(line)

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


#: The effect of a matching line on the result.
_Note = Callable[[Scan, "re.Match[str]", "Line"], object]


class _Watch(NamedTuple):
    """A pattern, and the action for matching lines."""

    pattern: Pattern
    note: _Note


def scan(lines: Iterable[Line], catalog: Iterable[Entry], result: Scan | None = None) -> Scan:
    """Read a log once; a given ``result`` can be read meanwhile."""
    result = Scan() if result is None else result
    by_needle = _by_needle(tuple(catalog))
    block: list[Line] = []

    def flush() -> None:
        if block:
            _read_block(block, by_needle, result)
            block.clear()

    result.flush = flush
    size = 0
    for line in lines:
        block.append(line)
        result.take(line, wrapped=isinstance(lines, Reader) and lines.wrapped)
        size += len(line.text) + 1
        if size >= _BLOCK:
            flush()
            size = 0
    flush()
    if isinstance(lines, Reader):
        result.lines = lines.lines
        result.failures.course.passed_over(lines.passed_over())
    return result


def _read_block(block: list[Line], by_needle: Mapping[str, list[_Watch]], result: Scan) -> None:
    text = "\n".join(line.text for line in block)
    starts = [0]
    for line in block:
        starts.append(starts[-1] + len(line.text) + 1)
    for needle, watches in by_needle.items():
        if needle not in text:  # most are in no log
            continue
        for index in _lines_with(needle, text, starts):
            line = block[index]
            for watch in watches:
                result.searches += 1
                if match := watch.pattern.regex.search(line.text):
                    watch.note(result, match, line)
    seen: set[int] = set()
    for trigger in TRIGGERS:
        seen.update(_lines_with(trigger, text, starts))
    for index in sorted(seen):
        result.searches += 1
        for setting in settings_in(block[index].text, block[index].number):
            result.settings.setdefault((setting.name, setting.value), setting)


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
    found: defaultdict[str, list[_Watch]] = defaultdict(list)
    for watch in _watches(catalog):
        found[watch.pattern.needle].append(watch)
    return dict(found)


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
        found = selection(kind, match, line.number)
        key = (found.kind, found.kernel)
        if key not in result.selections or result.selections[key].line > line.number:
            result.selections[key] = found

    return note


def _note_hit(entry: Entry) -> _Note:
    def note(result: Scan, match: re.Match[str], line: Line) -> None:
        if any(unless.search(match.string) for unless in entry.unless):
            return
        if entry.severity == "error" and SKIPPED.search(match.string):
            return
        # a part is counted with its whole line, and only once for all readings
        if not line.again if line.pieces == 1 else line.number != result.joined.get(entry.id):
            result.times[entry.id] = result.times.get(entry.id, 0) + 1
            if line.pieces > 1:
                result.joined[entry.id] = line.number
        groups = {name: value or "" for name, value in match.groupdict().items()}
        fresh = Hit(line.number, groups, text=match.string.strip()[:QUOTED])
        kept = result.hits.setdefault(entry.id, [])
        for index, hit in enumerate(kept):
            if hit.groups == groups:
                if line.number < hit.line and line.pieces == 1:
                    kept[index] = fresh
                return
        if len(kept) < _KEPT:
            kept.append(fresh)

    return note


def _note_present(pattern: Pattern) -> _Note:
    return lambda result, _match, _line: result.present.add(pattern.regex.pattern)
