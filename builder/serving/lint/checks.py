"""Checks one serve command against a release's interface and the known facts of its model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from builder.layers.conversion.shell import UNKNOWN
from builder.serving.interface import PLUGINS, VARIABLES, canonical
from builder.serving.kinds import MOE_BACKEND, w4a16_as_w4a4
from builder.serving.lint.rules import RULES, Finding
from builder.serving.memory import UTILIZATION
from builder.serving.memorydocuments import LARGEST_FRACTION, fraction_refusal
from builder.serving.profile import CUDA_13
from builder.serving.replaced import replaced
from builder.serving.values import shortened, wrong_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from builder.serving.interface import ServeInterface
    from builder.serving.lint.commands import GivenFlag, ServeCommand
    from builder.serving.models import Model

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
#: Flags whose product is the number of GPUs.
_GPUS = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
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

    @classmethod
    def of(
        cls,
        command: ServeCommand,
        interface: ServeInterface,
        models: Mapping[str, Model],
        profile: str = "",
    ) -> Checked:
        """Read a command as the release does."""
        flags = tuple(command.flags(interface))
        model = models.get(command.model)
        return cls(
            command=command, interface=interface, flags=flags, model=model, profile=profile
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
    def several_gpus(self) -> bool:
        """Whether the command needs several GPUs in one machine, which is then no Spark."""
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
    tokens = checked.last("--max-num-batched-tokens")
    given = _whole(checked.value("--max-num-batched-tokens"))
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
    if length and model.context and few and not checked.several_gpus:
        message = f"a context of {context} tokens: {model.context.source}"
        advice = f"{model.context.value} is what it was served with"
        yield checked.finding("short-context", length.line, message, advice)


def _memory(checked: Checked) -> Iterator[Finding]:
    flag, value = checked.last(UTILIZATION), checked.value(UTILIZATION)
    if flag is None or not value:
        return
    if why := fraction_refusal(value):
        yield checked.finding("bad-value", flag.line, why)
    elif checked.several_gpus or wrong_kind("number", value, nullable=False):
        return
    elif float(value) > LARGEST_FRACTION:
        message = f"{value} of 128 GB that the CPU uses too"
        advice = "0.85, or --kv-cache-memory-bytes"
        yield checked.finding("memory-fraction", flag.line, message, advice)


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
    _flags, _twice, _parsers, _variables, _b12x, _model, _memory, _cluster, _image, _conflicts,
)  # fmt: skip
