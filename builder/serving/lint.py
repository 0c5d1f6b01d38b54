"""Checks serve commands that users already have, against a release and what is known of a model."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from packaging.version import InvalidVersion, Version

from builder import __version__
from builder.common.document import Document, Part, Text
from builder.common.hints import again, reason
from builder.errors import NotServed, UsageError
from builder.layers.catalog import Catalog
from builder.layers.shell import UNKNOWN
from builder.proof.variables import LEFT_OUT, is_read
from builder.serving.asked import Question, ask_release
from builder.serving.commands import (
    GivenVariable,
    ServeCommand,
    Word,
    is_flag,
    open_quotes,
    read_commands,
)
from builder.serving.memory import GIB, LARGEST_FRACTION, UTILIZATION, fraction_refusal
from builder.serving.recipe import MOE_BACKEND, SET, recipe_of, w4a16_as_w4a4
from builder.serving.release import CUDA_13, patched_interface, release_base
from builder.serving.serveflags import (
    PLUGINS,
    VARIABLES,
    canonical,
    in_json,
    interface_of,
    replaced,
    shortened,
    wrong_kind,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from builder.serving.asked import Ask, Asked
    from builder.serving.commands import GivenFlag
    from builder.serving.models import Model, Models
    from builder.serving.recipe import Recipe, RecipeRequest, Setting
    from builder.serving.serveflags import ServeInterface


#: ``error``: the server does not start, or not as configured.  ``warning``: it starts.
Severity = Literal["error", "warning"]


#: The machine that a file is for, as far as it says so.
Machine = Literal["spark", "other", "unknown"]


class Rule(Part, frozen=True, kw_only=True):
    """One rule."""

    id: Text
    severity: Severity
    summary: Text
    source: Annotated[Text, Meta(description="the source of the value")]


class RuleList(Document, frozen=True, kw_only=True):
    """All rules."""

    rules: tuple[Rule, ...]


class Finding(Part, frozen=True, kw_only=True):
    """A finding at one place."""

    file: Text
    line: Annotated[int, Meta(ge=0)]
    rule: Text
    severity: Severity
    message: Text
    help: Annotated[str, Meta(description="what to write instead; absent: unknown")] = ""


class AskedCommand(Part, frozen=True, kw_only=True):
    """What a release said of one command."""

    file: Text
    line: Annotated[int, Meta(ge=0)]
    vllm: Text
    answer: Literal["starts", "refused", "settings accepted", "not run"]
    left_out: Annotated[tuple[str, ...], Meta(description="what it was not asked, and why")] = ()


class LintReport(Document, frozen=True, kw_only=True):
    """The findings in the files."""

    vllm: Annotated[str, Meta(description="the release; absent: the files name several")] = ""
    files: tuple[Text, ...]
    commands: Annotated[int, Meta(ge=0, description="serve commands that were checked")]
    findings: tuple[Finding, ...]
    ignored: Annotated[int, Meta(ge=0, description="findings that a comment switched off")] = 0
    skipped: Annotated[tuple[Text, ...], Meta(description="files without a serve command")] = ()
    cut: Annotated[
        tuple[Text, ...], Meta(description="files with more findings than are listed")
    ] = ()
    asked: Annotated[
        tuple[AskedCommand, ...], Meta(description="with --ask: what the release itself was asked")
    ] = ()


def _rule(name: str, severity: Severity, summary: str, source: str) -> Rule:
    return Rule(id=name, severity=severity, summary=summary, source=source)


_ARGS = "the release's own argument parser (vllm/engine/arg_utils.py)"
RULES = {
    rule.id: rule
    for rule in (
        _rule("unknown-flag", "error", "the release has no such flag", _ARGS),
        _rule("bad-value", "error", "the release refuses the value of a flag",
              f"{_ARGS} and configuration (vllm/config)"),
        _rule("refused", "error", "with --ask: the release's own code refuses the settings",
              "the release, which builds the model on a simulated GB10: docs/preflight.md"),
        _rule("transformers-version", "warning",
              "with --ask: the newest Transformers that the release takes refuses the model",
              "Transformers in the sandbox; an image has that of its day: vllm-project/vllm#53836"),
        _rule("kernel-trouble", "warning",
              "with --ask: the model gets a kernel that failed on GB10s",
              "threads that docs/preflight.md names"),
        _rule("does-not-fit", "warning", "with --ask: the weights leave no room for a cache",
              "the release's own parameters, and 128 GB of a GB10: docs/preflight.md"),
        _rule("quantization-name", "warning",
              "the release has no such method, but the checkpoint's own one may replace it",
              "vllm/config/model.py of the release: override_quantization_method"),
        _rule("unknown-parser", "error", "the release has no such parser, and no plugin is given",
              "vllm/reasoning/__init__.py and vllm/tool_parsers/__init__.py of the release"),
        _rule("unknown-variable", "warning", "the release does not read the variable",
              "vllm/envs.py of the release; it warns about such variables from 0.17.0 on"),
        _rule("variable-value", "error", "the release refuses the value of a variable",
              "vllm/envs.py of the release: ValueError at start"),
        _rule("b12x-name", "warning", "b12x is the package b12x, not FlashInfer's kernels",
              "vllm/model_executor/kernels/linear/nvfp4 from 0.28.0 on"),
        _rule("b12x-unreachable", "error", "the release has the flag, but not the kernel",
              "vLLM 0.24.0 to 0.27.1: ValueError at start, without the layer vllm-b12x-reachable"),
        _rule("w4a16-rounded", "warning", "experts with 16-bit activations run with 4-bit ones",
              "vLLM #56535, and level numbers of 0.33.0: docs/kernel-defects.md, W4A16 experts"),
        _rule("batched-tokens", "error", "fewer batched tokens than the block of a hybrid model",
              "write-up of one GB10, 2026-03: vLLM does not start"),
        _rule("eager-autotune", "error", "--enforce-eager crashes while MoE kernels are tuned",
              "write-up of one GB10, 2026-03"),
        _rule("short-context", "warning",
              "on a Spark, a context that the model's users found too short",
              "the model's file: spark-build models show"),
        _rule("memory-fraction", "warning", "more than 0.90 of a memory that the system shares",
              "vllm-project/vllm#56824 and NVIDIA/dgx-spark-playbooks#97: the machine freezes"),
        _rule("memory-unset", "warning",
              "on a Spark, no share of the memory that the system uses too",
              "vllm/config/cache.py: 0.92 from 0.20.0 on; vllm-project/vllm#56824"),
        _rule("many-batched-tokens", "warning",
              "batched tokens whose activations take much of a GB10's memory",
              "AEON-7/vllm-dflash#1: a GB10 hangs with 65536, and served with 32768"),
        _rule("draft-experts", "error",
              "--moe-backend is for the draft's experts too, which are mostly unquantised",
              "vllm-project/vllm#56832 and #51960: ValueError at start"),
        _rule("no-ray", "error", "Ray is requested, and the image does not have it",
              "metadata of vLLM's wheels: 0.17.x requires Ray, 0.18.0 and later do not"),
        _rule("ray-needed", "warning", "Ray is requested where nothing says that it is installed",
              "metadata of vLLM's wheels: 0.18.0 and later do not require it"),
        _rule("gloo-interface", "warning", "NCCL_SOCKET_IFNAME without GLOO_SOCKET_IFNAME",
              "write-up of two GB10, 2026: needed from 0.17.2 on"),
        _rule("least-busy", "error",
              "LiteLLM's least-busy leaves one of two equal servers mostly idle",
              "write-up of two GB10, 2026: 99 against 156 tokens/s; sparkrun's LiteLLM plugin"),
        _rule("cuda-12-image", "error",
              "an image for CUDA 12, whose FP4 kernels do not run on a GB10",
              "releases of vLLM: -cu129 tags, and tags before 0.20.0 without -cu130"),
        _rule("no-effect", "warning", "a setting that another one switches off",
              "vllm/envs.py and vllm/config/kernel.py of the releases"),
        _rule("open-quote", "error", "a quote that is not closed: the shell rejects the command",
              "POSIX, Shell Command Language, 2.2 Quoting"),
        _rule("given-twice", "warning", "a flag that is given twice: only the last one counts",
              "argparse"),
    )
}  # fmt: skip


#: vLLM's metadata requires Ray before this release.
_NO_RAY = Version("0.18.0rc0")
#: Releases whose ``--linear-backend`` accepts flashinfer_b12x, but whose kernel list lacks it.
_UNREACHABLE = (Version("0.24.0rc0"), Version("0.28.0rc0"))
_PATCHED = "an image with the profile b12x-full, or vLLM 0.28.0 and later"
#: What to do on those releases in place of a value of ``--linear-backend`` with which a model
#: whose layers are not all NVFP4 does not start (vllm/model_executor/kernels/linear of 0.27.1).
_INSTEAD = {
    "flashinfer_b12x": f"--linear-backend flashinfer_b12x, with {_PATCHED}",
    "flashinfer_cutlass": "leave it out: FlashInfer's CUTLASS kernels are the default on a GB10",
}
_QUANTIZATION = "--quantization"
_BATCHED, _CACHE_BYTES = "--max-num-batched-tokens", "--kv-cache-memory-bytes"
#: Flags whose product is the number of GPUs.
_GPUS = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
#: Values of ``--moe-backend`` that unquantised experts have (vLLM's own error, #56832).
_UNQUANTIZED = {"auto", "triton", "batched_triton", "flashinfer_trtllm", "flashinfer_cutlass",
                "aiter", "b12x"}  # fmt: skip
#: Methods of speculation whose draft is a part of the model.
_OWN_DRAFT = re.compile(r"(^|_)mtp$")
#: The most batched tokens that a GB10 was seen to serve with.
_MOST_BATCHED = 32768
#: From this release on the default share of the memory is 0.92 (vllm/config/cache.py).
_LARGE_SHARE = Version("0.20.0rc0")
#: What a file says of the machine that it is for.
_SPARK = re.compile(
    r"\bGB10\b|\bDGX[ _-]?Spark|\bsm_?121|^recipe_version:", re.IGNORECASE | re.MULTILINE
)
_OTHER = re.compile(
    r"\b(H[12]00|B[23]00|GB[23]00|A100|A6000|L40S?|V100|RTX[ _-]?(PRO|\d{4})|MI\d{3}X?)\b",
    re.IGNORECASE,
)
_OFFICIAL = re.compile(r"vllm/vllm-openai:(?:v)?(?P<version>\d[^-@]*)?(?P<rest>[^@]*)")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A command as a release's parser reads it."""

    command: ServeCommand
    interface: ServeInterface
    flags: tuple[GivenFlag, ...]
    model: Model | None
    #: whose changes its vLLM has
    profile: str = ""
    #: what its file says of the machine
    machine: Machine = "unknown"

    @classmethod
    def of(
        cls,
        command: ServeCommand,
        interface: ServeInterface,
        models: Mapping[str, Model],
        profile: str = "",
        machine: Machine = "unknown",
    ) -> Checked:
        """Read a command as the release does."""
        flags = tuple(command.flags(interface))
        model = models.get(command.model)
        return cls(
            command=command, interface=interface, flags=flags, model=model, profile=profile,
            machine=machine,
        )  # fmt: skip

    def last(self, name: str) -> GivenFlag | None:
        """A given flag by its long name; the last one counts."""
        known = self.interface.flag(name)
        names = known.names if known else (name,)
        return next((f for f in self.flags[::-1] if canonical(f.name) in names), None)

    def value(self, name: str) -> str:
        """The value of a flag; empty if it is not given, or unknown before the start."""
        flag = self.last(name)
        return "" if flag is None or flag.value is None or UNKNOWN in flag.value else flag.value

    @property
    def unreachable(self) -> bool:
        """Whether the release accepts b12x for linear layers, but cannot select it."""
        first, last = _UNREACHABLE
        return not self.profile and first <= Version(self.interface.vllm) < last

    @property
    def elsewhere(self) -> bool:
        """Whether the command is for a machine that is no Spark."""
        return self.machine == "other" or self._several_gpus()

    def _several_gpus(self) -> bool:
        """Whether the command needs several GPUs in one machine."""
        if "," in self.env().get("CUDA_VISIBLE_DEVICES", ""):
            return True
        gpus = 1
        for name in _GPUS:
            gpus *= _whole(self.value(name)) or 1
        joined = self.last("--nnodes") or self.last("--headless")
        ray = self.value("--distributed-executor-backend") == "ray"
        return gpus > 1 and not joined and not ray

    def taken(self, name: str) -> str:
        """The value of a flag if the release accepts it; else empty."""
        value = self.value(name)
        return "" if self.interface.refusal(name, value) else value

    def env(self) -> dict[str, str]:
        """The variables that are set."""
        return {one.name: one.value for one in self.command.env}

    def finding(self, rule: str, line: int, message: str, help_: str = "") -> Finding:
        """A finding of a rule."""
        return Finding(
            file=self.command.file, line=line, rule=rule, severity=RULES[rule].severity,
            message=message, help=help_,
        )  # fmt: skip


def check(checked: Checked) -> Iterator[Finding]:
    """All problems of one command."""
    return (finding for one in _CHECKS for finding in one(checked))


def _flags(checked: Checked) -> Iterator[Finding]:
    for flag in checked.flags:
        if UNKNOWN in flag.name:
            continue
        known = checked.interface.flag(canonical(flag.name).partition(".")[0])
        unknown = known is not None and flag.value is not None and UNKNOWN in flag.value
        why = "" if unknown else checked.interface.refusal(flag.name, flag.value)
        if why and known is not None and _QUANTIZATION in known.names and flag.value is not None:
            message = f"{why}; it has an effect only if the checkpoint's own method replaces it"
            yield checked.finding("quantization-name", flag.line, message, "leave it out")
        elif why:
            rule = "bad-value" if known is not None else "unknown-flag"
            yield checked.finding(rule, flag.line, why)


def _twice(checked: Checked) -> Iterator[Finding]:
    seen: dict[str, GivenFlag] = {}
    for flag in checked.flags:
        name = canonical(flag.name)
        before = seen.get(name)
        if before is not None and before.value != flag.value and "." not in name:
            shown = shortened(before.value or "").replace(UNKNOWN, "...") or "it"
            message = f"{name} is given twice: {shown} on line {before.line} has no effect"
            yield checked.finding("given-twice", flag.line, message)
        seen[name] = flag


def _parsers(checked: Checked) -> Iterator[Finding]:
    for name, plugin in PLUGINS.items():
        flag, value = checked.last(name), checked.value(name)
        message = checked.interface.parser_refusal(name, value)
        if flag is None or not message or checked.last(plugin):
            continue
        choices = [c for m in [checked.model] if m for c in (*m.reasoning_parsers, *m.tool_parsers)]
        plugged = next((c.plugin for c in choices if c.name == value and c.plugin), "")
        advice = f"it has {', '.join(checked.interface.parsers(name))}"
        if plugged:
            advice = f"it comes with the checkpoint: {plugin} {plugged}"
        yield checked.finding("unknown-parser", flag.line, message, advice)


def _variables(checked: Checked) -> Iterator[Finding]:
    interface = checked.interface
    for one in checked.command.env:
        if not one.name.startswith(VARIABLES):
            continue
        value = "" if UNKNOWN in one.value else one.value
        known = one.name in interface.variables
        why = interface.variable_refusal(one.name, value) if value or not known else ""
        if not why:
            continue
        other = replaced().get(one.name)
        advice = ""
        if other is not None:
            why = why.partition("; did you mean")[0]
            flag = f"{other.flag} {other.value(value) or 'VALUE'}"
            advice = f"use the flag {flag}" if other.value(value) else "leave it out"
            if other.flag_refusal(interface, value):
                advice = "" if known else f"this release has no replacement; {other.source}"
            elif other.flag == "--linear-backend" and checked.unreachable:
                # the flag chooses among the kernels of all linear layers, not only NVFP4's
                advice = _INSTEAD.get(other.value(value), advice)
        rule = "variable-value" if known else "unknown-variable"
        yield checked.finding(rule, one.line, why, advice)


def _b12x(checked: Checked) -> Iterator[Finding]:
    for name in ("--linear-backend", "--moe-backend"):
        flag, value = checked.last(name), checked.value(name).lower().replace("-", "_")
        if flag is None:
            continue
        if value == "b12x":
            message = f"{name} b12x selects the package b12x, which images do not have"
            yield checked.finding("b12x-name", flag.line, message, f"{name} flashinfer_b12x")
        model = checked.model if name == MOE_BACKEND else None
        if model and (message := w4a16_as_w4a4(model, checked.interface.vllm, value)):
            yield checked.finding("w4a16-rounded", flag.line, message, f"leave {name} out")
        if name == "--linear-backend" and value == "flashinfer_b12x" and checked.unreachable:
            release = checked.interface.vllm
            message = f"vLLM {release} accepts {name} flashinfer_b12x, but has no such kernel"
            if _OFFICIAL.search(checked.command.image) or not checked.command.image:
                yield checked.finding("b12x-unreachable", flag.line, message, _PATCHED)


def _model(checked: Checked) -> Iterator[Finding]:
    model = checked.model
    if model is None:
        return
    tokens = checked.last(_BATCHED)
    given = _whole(checked.value(_BATCHED))
    if tokens and given and model.block_size and given < model.block_size.value:
        message = f"{given} batched tokens are fewer than a block of {model.name}"
        advice = f"at least {model.block_size.value} ({model.block_size.source})"
        yield checked.finding("batched-tokens", tokens.line, message, advice)
    eager = checked.last("--enforce-eager")
    failure = next((f for f in model.failures if f.what.startswith("--enforce-eager")), None)
    if eager and failure:
        yield checked.finding("eager-autotune", eager.line, f"{model.name}: {failure.what}",
                              failure.helps)  # fmt: skip
    length = checked.last("--max-model-len")
    context = _whole(checked.value("--max-model-len"))
    few = bool(context and model.context and context < model.context.value // 4)
    if length and model.context and few and not checked.elsewhere:
        message = f"a context of {context} tokens: {model.context.source}"
        advice = f"{model.context.value} is what it was served with"
        yield checked.finding("short-context", length.line, message, advice)


def _memory(checked: Checked) -> Iterator[Finding]:
    flag, value = checked.last(UTILIZATION), checked.value(UTILIZATION)
    large = Version(checked.interface.vllm) >= _LARGE_SHARE
    if flag is None and large and checked.machine == "spark" and not checked.last(_CACHE_BYTES):
        message = f"vLLM {checked.interface.vllm} takes 0.92 of a memory that the CPU uses too"
        yield checked.finding(
            "memory-unset", checked.command.line, message, f"{UTILIZATION} 0.85, or {_CACHE_BYTES}"
        )
    if flag is None or not value:
        return
    if why := fraction_refusal(value):
        yield checked.finding("bad-value", flag.line, why)
    elif checked.elsewhere or wrong_kind("number", value, nullable=False):
        return
    elif float(value) > LARGEST_FRACTION:
        message = f"{value} of 128 GB that the CPU uses too"
        advice = f"0.85, or {_CACHE_BYTES}"
        yield checked.finding("memory-fraction", flag.line, message, advice)


def _batched(checked: Checked) -> Iterator[Finding]:
    tokens = checked.last(_BATCHED)
    given = _whole(checked.value(_BATCHED))
    if tokens and given > _MOST_BATCHED and not checked.elsewhere:
        message = f"{given} batched tokens: activations of 15 GiB and more, and one GB10 hung"
        yield checked.finding(
            "many-batched-tokens", tokens.line, message, f"{_MOST_BATCHED} at most"
        )


def _draft(checked: Checked) -> Iterator[Finding]:
    flag = checked.last(MOE_BACKEND)
    backend = checked.value(MOE_BACKEND).lower().replace("-", "_")
    speculation = checked.value("--speculative-config")
    if flag is None or not backend or backend in _UNQUANTIZED or not speculation:
        return
    try:
        config = in_json(speculation)
    except ValueError:
        return
    if not isinstance(config, dict) or not _OWN_DRAFT.search(str(config.get("method", ""))):
        return
    known = checked.interface.flag("--speculative-config")
    has_own = known is not None and any(key.name == "moe_backend" for key in known.keys)
    if has_own and "moe_backend" not in config:
        message = f"{MOE_BACKEND} {backend} is for the draft's experts too, and not if unquantised"
        advice = 'add "moe_backend": "triton" to --speculative-config'
        yield checked.finding("draft-experts", flag.line, message, advice)


def _cluster(checked: Checked) -> Iterator[Finding]:
    executor = checked.last("--distributed-executor-backend")
    image = checked.command.image
    official = _OFFICIAL.search(image)
    ray = checked.value("--distributed-executor-backend") == "ray"
    old = Version(checked.interface.vllm) < _NO_RAY
    if executor and ray and not old and (official or not image):
        message = f"vLLM {checked.interface.vllm} and its official images come without Ray"
        advice = (
            "--nnodes 2 --node-rank N --master-addr IP --master-port PORT, without Ray; "
            "or an image with layer ray: spark-build image --layers ray"
        )
        rule = "no-ray" if official else "ray-needed"
        yield checked.finding(rule, executor.line, message, advice)
    env = {one.name: one for one in checked.command.env}
    if "NCCL_SOCKET_IFNAME" in env and "GLOO_SOCKET_IFNAME" not in env:
        one = env["NCCL_SOCKET_IFNAME"]
        value = "INTERFACE" if UNKNOWN in one.value else one.value
        message = "two nodes also need GLOO_SOCKET_IFNAME"
        yield checked.finding("gloo-interface", one.line, message, f"GLOO_SOCKET_IFNAME={value}")


def _image(checked: Checked) -> Iterator[Finding]:
    match = _OFFICIAL.search(checked.command.image)
    if match is None:
        return
    rest, release = match["rest"] or "", match["version"] or ""
    try:
        old = bool(release) and Version(release) < CUDA_13
    except InvalidVersion:
        old = False
    if "cu12" in rest or (old and "cu13" not in rest):
        advice = f"vllm/vllm-openai:v{release}-cu130" if old else f"vllm/vllm-openai:v{release}"
        message = f"{checked.command.image} is for CUDA 12: its FP4 kernels do not run on a GB10"
        yield checked.finding("cuda-12-image", checked.command.image_line, message, advice)


def _conflicts(checked: Checked) -> Iterator[Finding]:
    env = {one.name: one for one in checked.command.env}
    read = checked.interface.variables
    backend = env.get("VLLM_NVFP4_GEMM_BACKEND")
    linear = checked.taken("--linear-backend")
    if backend and backend.name in read and linear not in ("", "auto"):
        message = f"--linear-backend {linear} takes effect, VLLM_NVFP4_GEMM_BACKEND does not"
        yield checked.finding("no-effect", backend.line, message, "leave the variable out")
    choice = env.get("VLLM_FLASHINFER_MOE_BACKEND")
    on = env.get("VLLM_USE_FLASHINFER_MOE_FP4")
    if choice and choice.name in read and (on is None or on.value in ("0", "")):
        message = (
            "VLLM_FLASHINFER_MOE_BACKEND has an effect only with VLLM_USE_FLASHINFER_MOE_FP4=1"
        )
        yield checked.finding("no-effect", choice.line, message)
    moe = checked.taken("--moe-backend")
    if on and on.name in read and on.value == "1" and moe and "flashinfer" not in moe:
        message = f"--moe-backend {moe} takes effect, VLLM_USE_FLASHINFER_MOE_FP4=1 does not"
        yield checked.finding("no-effect", on.line, message, "leave the variable out")


def _whole(text: str) -> int:
    """A number of tokens as vLLM writes them: 4096, 4k."""
    match = re.fullmatch(r"(\d+)([kK]?)", text)
    return int(match[1]) * (1000 if match[2] == "k" else 1024 if match[2] else 1) if match else 0


_CHECKS: tuple[Callable[[Checked], Iterator[Finding]], ...] = (
    _flags, _twice, _parsers, _variables, _b12x, _model, _memory, _batched, _draft, _cluster,
    _image, _conflicts,
)  # fmt: skip


#: The formats that ``lint`` reads.
READS = (
    "lint reads shell scripts, compose files, Kubernetes manifests, recipes of sparkrun and eugr, "
    "and Dockerfiles"
)
#: Bytes of a file, at most; scripts and manifests are far smaller.
_LARGEST = 1 << 20
_IGNORE = re.compile(r"#\s*spark-build:\s*ignore(?:\[([\w, -]+)\])?")
_ALL = "*"  # no rule's name
RELEASED_IMAGE = re.compile(r"vllm/vllm-openai:v(\d+\.\d+\.\d+(?:\.post\d+|rc\d+)?)")
_LEAST_BUSY = re.compile(r"routing[_-]strategy['\"]?[:=\s]+['\"]?least-busy")
#: The first line of a file that ``recipe`` writes.
_ORIGIN = re.compile(
    r"^# \S+ on vLLM (?P<vllm>\d[\w.+]*), profile (?P<profile>[\w.-]+), [\w-]+$", re.MULTILINE
)
#: Rules that guess what a release says: its answer replaces them, that of its parser the first.
_PARSER_SAYS = {"unknown-flag"}
_OF_THE_MODEL = {"quantization-name", "b12x-unreachable"}
_RELEASE_SAYS = {*_PARSER_SAYS, *_OF_THE_MODEL, "bad-value"}
#: Letters of a file in which that line is looked for.
_HEAD = 4096
#: Findings of a file that are listed, at most.
_MOST_FINDINGS = 1000


@dataclass
class Linter:
    """Reads each release from the package index or an image once."""

    release: str | None = None
    image: str | None = None
    #: answers for a release's own code; None: only its source is read
    ask: Ask | None = None
    _interfaces: dict[tuple[str, str], ServeInterface] = field(default_factory=dict)

    def asked(self, checked: Checked) -> Asked:
        """What the release of a command says of it.

        Raises:
            SparkBuildError: the release cannot be read.
        """
        assert self.ask is not None
        ref, profile = self._vllm(checked.command)
        variables = {
            one.name: one.value
            for one in checked.command.env
            if is_read(one.name) and UNKNOWN not in one.value
        }
        question = Question(
            model=checked.command.model, base=ref, layers=(profile,) if profile else (),
            flags=tuple(_groups(checked.command.words)), variables=variables,
        )  # fmt: skip
        try:
            return ask_release(question, checked.model, self.ask)
        except NotServed:  # its mod changes nothing there
            return ask_release(replace(question, layers=()), checked.model, self.ask)

    def interface(self, command: ServeCommand) -> ServeInterface:
        """The interface of a command's release.

        Raises:
            UsageError: neither the options nor the command's image name the release.
            SparkBuildError: the release cannot be read.
        """
        ref, profile = self._vllm(command)
        if (ref, profile) not in self._interfaces:
            self._interfaces[ref, profile] = self._read(ref, profile)
        return self._interfaces[ref, profile]

    def _vllm(self, command: ServeCommand) -> tuple[str, str]:
        """The base with a command's vLLM, and the profile whose changes it has.

        Raises:
            UsageError: neither the options nor the command's image name the release.
        """
        named = RELEASED_IMAGE.search(command.image)
        release = self.release or (named[1] if named and not self.image else "")
        release = release or ("" if self.image else command.vllm)
        ref = release_base(release) if release else self.image or ""
        if not ref:
            image = f"the image {command.image}" if command.image else "no image"
            raise UsageError(
                f"{command.file}:{command.line}: the vLLM release is unknown; the command "
                f"names {image} (--image IMAGE reads the release from an image)",
                hint=again("--release 0.33.0"),
            )
        return ref, "" if self.image else self.profile(command)

    def profile(self, command: ServeCommand) -> str:
        """The profile whose changes a command's vLLM has: of its mods, or of the file's recipe."""
        mods = {mod.rpartition("/")[2] for mod in command.mods}
        if not mods:
            return command.profile if command.profile in self._profiles else ""
        return next((name for name, mod in self._profiles.items() if mod in mods), "")

    @cached_property
    def _profiles(self) -> dict[str, str]:
        """Our profiles, with the name of each one's mod."""
        catalog = Catalog.discover()
        return {name: catalog.profile(name).mod for name in catalog.profile_files}

    def _read(self, ref: str, profile: str) -> ServeInterface:
        if profile:
            try:
                return patched_interface(profile, ref)
            except NotServed:  # its mod changes nothing there
                pass
        return interface_of(ref)


def read_file(path: Path) -> str:
    """The text of a file; ``-`` is standard input.

    Raises:
        UsageError: it cannot be read, is not a text, or is too large.
    """
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(_LARGEST + 1)
        else:
            with path.open("rb") as file:
                data = file.read(_LARGEST + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from None
    if len(data) > _LARGEST or "\0" in text:
        what = "is larger than 1 MiB" if len(data) > _LARGEST else "is not a text file"
        raise UsageError(f"{path} {what}", hint=READS)
    return text


def lint(files: Sequence[tuple[str, str]], linter: Linter, models: Models) -> LintReport:
    """Lint files, given by name and text.

    Raises:
        UsageError: a file cannot be read, none has a serve command, or no release is named.
        SparkBuildError: the release cannot be read.
    """
    known = _by_id(models)
    findings: list[Finding] = []
    releases: set[str] = set()
    skipped: list[str] = []
    cut: list[str] = []
    asked_commands: list[AskedCommand] = []
    commands = ignored = 0
    for name, text in files:
        findings_in = dict.fromkeys([*_least_busy(name, text), *_open_quotes(name, text)])
        served, machine = serve_commands(name, text), machine_of(text)
        commands += len(served)
        if not served and not findings_in:
            skipped.append(name)
        for command in served:
            interface = linter.interface(command)
            releases.add(interface.vllm)
            # commands can share a line, such as an exported variable's, and repeat its findings
            checked = Checked.of(
                command, interface, known, profile=linter.profile(command), machine=machine
            )
            problems = list(islice(check(checked), _MOST_FINDINGS + 1))
            if linter.ask is not None:
                asked = linter.asked(checked)
                asked_commands.append(_shown(checked, asked))
                refused = list(_refused(checked, asked))
                problems = [*_unanswered(problems, asked, refused), *refused]
            for finding in problems:
                findings_in[finding] = None
                if len(findings_in) > _MOST_FINDINGS:
                    break
        ignored_in = _Ignored(text)
        once = sorted(findings_in, key=lambda finding: finding.line)
        reported = [finding for finding in once if not ignored_in.has(finding)]
        ignored += len(once) - len(reported)
        cut += [name] if len(once) > _MOST_FINDINGS else []
        findings += reported[:_MOST_FINDINGS]
    if len(skipped) == len(files):
        subject = skipped[0] if len(skipped) == 1 else f"none of {len(skipped)} files"
        contains = "contains no" if len(skipped) == 1 else "contains a"
        raise UsageError(f"{subject} {contains} vllm serve command", hint=READS)
    return LintReport(
        vllm=releases.pop() if len(releases) == 1 else "",
        files=tuple(name for name, _ in files),
        commands=commands,
        findings=tuple(findings),
        ignored=ignored,
        skipped=tuple(skipped),
        cut=tuple(cut),
        asked=tuple(asked_commands),
    )


def machine_of(text: str) -> Machine:
    """The machine that a file names, in a comment or elsewhere."""
    if _SPARK.search(text):
        return "spark"
    return "other" if _OTHER.search(text) else "unknown"


def _groups(words: Sequence[Word]) -> Iterator[tuple[str, ...]]:
    """The flags of a command with their values; not those that are known only when it starts."""
    groups: list[list[str]] = []
    for word in words:
        if is_flag(word.text):
            groups.append([word.text])
        elif groups:
            groups[-1].append(word.text)
    return (tuple(group) for group in groups if not any(UNKNOWN in text for text in group))


def _unanswered(
    problems: Sequence[Finding], asked: Asked, refused: Sequence[Finding]
) -> list[Finding]:
    """The problems that a release did not answer for itself; on a line, its words are enough."""
    everything = asked.answer is not None and asked.answer.starts == "yes"
    answered = _PARSER_SAYS if asked.parsed else set()
    if everything:
        answered = _RELEASE_SAYS if asked.own else _RELEASE_SAYS - _OF_THE_MODEL
    lines = {one.line for one in refused}
    return [
        one
        for one in problems
        if one.rule not in answered and not (one.rule in _RELEASE_SAYS and one.line in lines)
    ]


def _refused(checked: Checked, asked: Asked) -> Iterator[Finding]:
    """What the release refuses, each on the line of its flag, and what is known of its kernels."""
    command, release = checked.command, checked.interface.vllm
    for one in asked.refused:
        if one.where.startswith("transformers/"):
            message = f"Transformers refuses the model with vLLM {release}: {one.sentence}"
            advice = "an image with an older Transformers may start: pip show transformers in it"
            yield checked.finding("transformers-version", command.line, message, advice)
            continue
        line = next((w.line for w in command.words if one.flag and w.text == one.flag[0]), 0)
        variable = next((v.line for v in command.env if v.name in one.sentence), 0)
        words = shortened(" ".join(one.flag)) or "this"
        message = f"vLLM {release} refuses {words}: {one.sentence}"
        message += f" ({one.where})" if one.where else ""
        starts = asked.answer is not None and asked.answer.starts == "yes"
        advice = f"it starts without {one.flag[0]}" if one.flag and starts and asked.own else ""
        yield checked.finding("refused", line or variable or command.line, message, advice)
    answer = asked.answer
    if answer is None or not asked.own or answer.starts != "yes":
        return
    for trouble in answer.troubles:
        yield checked.finding(
            "kernel-trouble", command.line, f"{trouble.kernel}: {trouble.text}", trouble.source
        )
    if answer.memory is not None and answer.memory.cache_bytes < 0:
        over = -answer.memory.cache_bytes / GIB
        message = f"{over:.1f} GiB more than {answer.memory.fraction:.2f} of a GB10's memory"
        yield checked.finding("does-not-fit", command.line, message)


def _shown(checked: Checked, asked: Asked) -> AskedCommand:
    """One command in the report."""
    words = [w.text for w in checked.command.words if UNKNOWN in w.text]
    unknown = [f"{len(words)} settings that are known only when it starts"] if words else []
    answer: Literal["starts", "refused", "settings accepted", "not run"] = "not run"
    if asked.refused:
        answer = "refused"
    elif asked.parsed:
        answer = "starts" if asked.own and asked.starts else "settings accepted"
    return AskedCommand(
        file=checked.command.file, line=checked.command.line, vllm=checked.interface.vllm,
        answer=answer, left_out=(*asked.left_out, *unknown, *_not_passed(asked)),
    )  # fmt: skip


def _not_passed(asked: Asked) -> list[str]:
    """The variables without which the release was asked, and why."""
    parts = asked.answer.simulated if asked.answer is not None else ()
    return [part.removeprefix(LEFT_OUT) for part in parts if part.startswith(LEFT_OUT)]


def serve_commands(name: str, text: str) -> list[ServeCommand]:
    """The serve commands of a file, with what its first line says, if ``recipe`` made it."""
    served = read_commands(name, text)
    origin = _ORIGIN.search(text[:_HEAD])
    if origin is None:
        return served
    return [replace(one, vllm=origin["vllm"], profile=origin["profile"]) for one in served]


def _by_id(models: Models) -> dict[str, Model]:
    read = [models.model(name) for name in models.files]
    return {model.id.value: model for model in read}


def _least_busy(name: str, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        if _LEAST_BUSY.search(line) and not line.lstrip().startswith("#"):
            rule = RULES["least-busy"]
            yield Finding(
                file=name, line=number, rule=rule.id, severity=rule.severity,
                message=rule.summary, help="routing_strategy: simple-shuffle",
            )  # fmt: skip


def _open_quotes(name: str, text: str) -> Iterator[Finding]:
    rule = RULES["open-quote"]
    for number in open_quotes(name, text):
        yield Finding(
            file=name, line=number, rule=rule.id, severity=rule.severity,
            message="the quote that begins here is not closed", help="close it",
        )  # fmt: skip


class _Ignored:
    """The findings that a file's comments switch off."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._off: dict[int, set[str]] = {}

    def has(self, finding: Finding) -> bool:
        """Whether a comment on this line, or alone on the line above, switches the rule off."""
        at = finding.line - 1
        if at not in self._off:
            self._off[at] = self._rules(at)
        return not self._off[at].isdisjoint({_ALL, finding.rule})

    def _rules(self, at: int) -> set[str]:
        """The rules named by comments near a line."""
        near = self._lines[at : at + 1]
        if 0 < at <= len(self._lines) and self._lines[at - 1].lstrip().startswith("#"):
            near = [*near, self._lines[at - 1]]
        rules: set[str] = set()
        for line in near:
            match = _IGNORE.search(line)
            if match:
                rules.update([_ALL] if match[1] is None else re.split(r"[,\s]+", match[1].strip()))
        return rules


def linted_recipe(request: RecipeRequest) -> Recipe:
    """Make a recipe; warnings of ``lint`` become notes in it.

    Raises:
        UsageError: there is no such recipe, or ``lint`` finds an error in the user's settings.
    """
    recipe = recipe_of(request)
    node = recipe.nodes[0]
    flags, variables = (*recipe.flags, *node.flags), (*recipe.env, *node.env)
    settings = (*flags, *variables)
    command = ServeCommand(  # the line of a setting is its number here
        file=recipe.model,
        line=0,
        words=(
            Word(recipe.id, 0),
            *(Word(w, n) for n, flag in enumerate(flags, 1) for w in flag.words),
        ),
        env=tuple(
            GivenVariable(name=one.name, value=one.value or "", line=n)
            for n, one in enumerate(variables, 1 + len(flags))
        ),
        image=recipe.image.ref,
    )
    notes = []
    models = {recipe.id: request.model}
    findings = check(Checked.of(command, request.served.interface, models))
    for finding in sorted(findings, key=lambda finding: finding.line):
        if finding.severity == "error" and finding.line:
            _refuse(finding, settings[finding.line - 1])
        notes.append("; ".join(filter(None, (finding.message, finding.help))))
    return msgspec.structs.replace(recipe, notes=(*recipe.notes, *notes))


def _refuse(finding: Finding, setting: Setting) -> None:
    """Refuse an error that the user's settings cause.

    Raises:
        UsageError: a setting of the user causes it.
    """
    if setting.origin.startswith(SET):
        text = "=".join(setting.words).removeprefix("--")
        raise UsageError(f"{SET} {text}: {finding.message}", hint=finding.help)


def sarif(report: LintReport) -> dict[str, Any]:
    """The report as one run."""
    used = sorted({finding.rule for finding in report.findings})
    rules = [
        {
            "id": name,
            "shortDescription": {"text": RULES[name].summary},
            "help": {"text": f"Source: {RULES[name].source}"},
            "defaultConfiguration": {"level": RULES[name].severity},
        }
        for name in used
    ]
    results = [
        {
            "ruleId": one.rule,
            "ruleIndex": used.index(one.rule),
            "level": one.severity,
            "message": {"text": f"{one.message}. {one.help}" if one.help else one.message},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": one.file},
                        "region": {"startLine": max(1, one.line)},
                    }
                }
            ],
        }
        for one in report.findings
    ]
    tool = {"driver": {"name": "spark-build lint", "version": __version__, "rules": rules}}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": tool, "results": results}],
    }
