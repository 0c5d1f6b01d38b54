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
from builder.applier.files import open_regular
from builder.common.document import Document, Part, Text
from builder.common.hints import again, reason, shortened
from builder.common.pypi import PackageIndex, vllm_releases
from builder.errors import NotServed, UsageError
from builder.layers.catalog import Catalog
from builder.layers.shell import UNKNOWN
from builder.proof.variables import LEFT_OUT, is_read
from builder.serving.asked import Question, ask_release
from builder.serving.commands import (
    LAUNCHERS,
    GivenVariable,
    ServeCommand,
    Word,
    is_flag,
    open_quotes,
    read_commands,
)
from builder.serving.configurations import name_of
from builder.serving.knownimages import NEWEST, KnownImage, known_image, release_in_tag
from builder.serving.lintrules import OF_THE_RELEASE, RULES, Severity
from builder.serving.memory import GIB, LARGEST_FRACTION, UTILIZATION, fraction_refusal
from builder.serving.recipe import MOE_BACKEND, SET, recipe_of, w4a16_as_w4a4
from builder.serving.release import CUDA_13, interface_of, patched_interface
from builder.serving.released import release_base
from builder.serving.serveflags import (
    PLUGINS,
    REASONING_FLAG,
    VARIABLES,
    canonical,
    in_json,
    replaced,
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


#: Digits of a number that nobody means; Python reads no more than 4300.
_MOST_DIGITS = 1000
_DIGITS = re.compile(r"\d+")
#: The machine that a file is for, as far as it says so.
Machine = Literal["spark", "other", "unknown"]


class Finding(Part, frozen=True, kw_only=True):
    """A finding at one place."""

    file: Text
    line: Annotated[int, Meta(ge=0)]
    rule: Text
    severity: Severity
    message: Text
    help: Annotated[str, Meta(description="what to write instead; absent: unknown")] = ""


#: What a release answers about a command.
Answer = Literal["starts", "would start", "refused", "settings accepted", "not run"]


class AskedCommand(Part, frozen=True, kw_only=True):
    """What a release said of one command."""

    file: Text
    line: Annotated[int, Meta(ge=0)]
    vllm: Text
    #: would start: with what is assumed
    answer: Answer
    configuration: Annotated[
        str, Meta(description="of another checkpoint, or a known one's; absent: the command's own")
    ] = ""
    assumed: Annotated[
        str, Meta(description="what stood in for the model's configuration, and what differs")
    ] = ""
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
    notes: Annotated[
        tuple[Text, ...], Meta(description="images that are no release, and what they were read as")
    ] = ()


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
#: The entrypoint of NVIDIA's containers.
_OWN_ENTRYPOINT = "nvidia_entrypoint.sh"
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
#: A file or folder of a Python package, installed or as a checkout of vLLM.
_PACKAGE_FILE = re.compile(
    r"/(?:site|dist)-packages/(\w[\w./-]*)|/(?=vllm/(?:\w+/)*\w+\.py$)(vllm/[\w./-]+)"
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
    #: whether its vLLM is that of the interface, and not one that is near it
    exact: bool = True

    @classmethod
    def of(
        cls,
        command: ServeCommand,
        interface: ServeInterface,
        models: Mapping[str, Model],
        profile: str = "",
        machine: Machine = "unknown",
        *,
        exact: bool = True,
    ) -> Checked:
        """Read a command as the release does."""
        flags = tuple(command.flags(interface))
        model = models.get(command.model) or _in_folder(command.model, models)
        return cls(
            command=command, interface=interface, flags=flags, model=model, profile=profile,
            machine=machine, exact=exact,
        )  # fmt: skip

    @property
    def image(self) -> KnownImage | None:
        """What is known of its image."""
        return known_image(self.command.image)

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

    def finding(
        self, rule: str, line: int, message: str, help_: str = "", severity: Severity | None = None
    ) -> Finding:
        """A finding of a rule, as severe as the rule unless it is said."""
        return Finding(
            file=self.command.file, line=line, rule=rule,
            severity=severity or RULES[rule].severity, message=message, help=help_,
        )  # fmt: skip

    def weighed(self, finding: Finding) -> Finding | None:
        """A finding as it holds for this release and image; None: it does not."""
        severity = RULES[finding.rule].severity_for(self.interface.vllm)
        if severity is None:
            return None
        if severity == "note":
            finding = msgspec.structs.replace(finding, severity="note")
        if self.exact or finding.rule not in OF_THE_RELEASE:
            return finding
        known = self.image
        what = f"the image is {known.fork or known.name}" if known else "its image is not known"
        what += ", changed by mods" if self.command.mods else ""
        message = f"{finding.message.partition('; did you mean')[0]}; {what}, which may differ"
        return msgspec.structs.replace(finding, severity="note", message=message, help="")


def _in_folder(model: str, models: Mapping[str, Model]) -> Model | None:
    """The known model of a local folder with its name; None where several have that name."""
    if not model.startswith(("/", ".", "~")):
        return None
    named = [one for id_, one in models.items() if name_of(id_) == name_of(model)]
    return named[0] if len(named) == 1 else None


def check(checked: Checked) -> Iterator[Finding]:
    """All problems of one command."""
    found = (checked.weighed(finding) for one in _CHECKS for finding in one(checked))
    return (finding for finding in found if finding is not None)


def _flags(checked: Checked) -> Iterator[Finding]:
    for flag in checked.flags:
        if UNKNOWN in flag.name or _is_added(checked, flag):
            continue
        known = checked.interface.flag(canonical(flag.name).partition(".")[0])
        unknown = known is not None and flag.value is not None and UNKNOWN in flag.value
        why = "" if unknown else checked.interface.refusal(flag.name, flag.value)
        if why and known is not None and _QUANTIZATION in known.names and flag.value is not None:
            message = f"{why}; it has an effect only if the checkpoint's own method replaces it"
            yield checked.finding("quantization-name", flag.line, message, "leave it out")
        elif why and not _is_added_key(checked, why):
            rule = "bad-value" if known is not None else "unknown-flag"
            bare = (flag.value or "").startswith("{") and '"' not in (flag.value or "")
            advice = f"the shell took its quotes: {flag.name} '{{...}}'" if bare else ""
            yield checked.finding(rule, flag.line, why, advice)


def _is_added(checked: Checked, flag: GivenFlag) -> bool:
    """Whether the image is known to add this flag, or this value of it."""
    return checked.image is not None and checked.image.has_flag(canonical(flag.name), flag.value)


def _is_added_words(checked: Checked, words: Sequence[str]) -> bool:
    """The same for a flag with its value as words."""
    name, equals, value = words[0].partition("=")
    given = value if equals else " ".join(words[1:]) or None
    return checked.image is not None and checked.image.has_flag(canonical(name), given)


def _is_added_key(checked: Checked, why: str) -> bool:
    """Whether a refused key of an object is one that the image is known to add."""
    key = re.search(r"has no key ([\w.]+)", why)
    return bool(key and checked.image and key[1] in checked.image.keys)


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
        if flag is None or checked.last(plugin):
            continue
        if not message:
            yield from _other_parser(checked, name, flag) if name == REASONING_FLAG else ()
            continue
        choices = [c for m in [checked.model] if m for c in (*m.reasoning_parsers, *m.tool_parsers)]
        plugged = next((c.plugin for c in choices if c.name == value and c.plugin), "")
        advice = f"it has {', '.join(checked.interface.parsers(name))}"
        if plugged:
            advice = f"it comes with the checkpoint: {plugin} {plugged}"
        yield checked.finding("unknown-parser", flag.line, message, advice)


def _other_parser(checked: Checked, name: str, flag: GivenFlag) -> Iterator[Finding]:
    """A parser that exists, and with which nobody is known to have served the model."""
    model, value = checked.model, checked.value(name)
    if model is None or not value:
        return
    choices = {one.name for one in model.reasoning_parsers}
    usual = sorted(choices & {*checked.interface.parsers(name)})
    if usual and value not in choices:
        message = f"{model.name} is not known to be served with {name} {value}"
        yield checked.finding("other-parser", flag.line, message, f"{name} {usual[0]}")


def _variables(checked: Checked) -> Iterator[Finding]:
    interface = checked.interface
    for one in checked.command.env:
        added = checked.image is not None and checked.image.has_variable(one.name)
        if not one.name.startswith(VARIABLES) or added:
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
        if value == "b12x" and not (checked.image and "b12x" in checked.image.packages):
            message = f"{name} b12x needs the package b12x, which vLLM's wheels and images lack"
            yield checked.finding("b12x-name", flag.line, message, _instead_of_b12x(checked, name))
        model = checked.model if name == MOE_BACKEND else None
        if model and value == "flashinfer_b12x" and _only_mxfp4(model):
            message = (
                f"{name} flashinfer_b12x is for NVFP4 experts; those of {model.name} are MXFP4"
            )
            yield checked.finding("b12x-mxfp4", flag.line, message, f"leave {name} out")
        if model and (message := w4a16_as_w4a4(model, checked.interface.vllm, value)):
            yield checked.finding("w4a16-rounded", flag.line, message, f"leave {name} out")
        if name == "--linear-backend" and value == "flashinfer_b12x" and checked.unreachable:
            release = checked.interface.vllm
            message = f"vLLM {release} accepts {name} flashinfer_b12x, but has no such kernel"
            if _OFFICIAL.search(checked.command.image) or not checked.command.image:
                yield checked.finding("b12x-unreachable", flag.line, message, _PATCHED)


def _only_mxfp4(model: Model) -> bool:
    """Whether all experts whose kind is known are in MXFP4."""
    return {kind for kind in model.kinds() if kind.endswith("-moe")} == {"mxfp4-moe"}


def _instead_of_b12x(checked: Checked, name: str) -> str:
    """What to write in its place: FlashInfer's kernels of this name are for NVFP4 alone."""
    model, linear = checked.model, name != MOE_BACKEND
    kinds = model.kinds() if model else frozenset()
    wanted = {"nvfp4-linear"} if linear else {"nvfp4-moe"}
    refused = checked.interface.refusal(name, "flashinfer_b12x")
    if wanted <= kinds and "mxfp4-moe" not in kinds and not refused and not checked.unreachable:
        return f"{name} flashinfer_b12x"
    return "leave it out, or take an image with the package, such as eugr/spark-vllm-b12x"


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
        known_draft = checked.model is not None and checked.model.speculation is not None
        severity: Severity = "error" if known_draft else "note"
        yield checked.finding("draft-experts", flag.line, message, advice, severity)


def _processors(checked: Checked) -> Iterator[Finding]:
    """Custom logits processors with a speculation, which a release or a runner of it refuses."""
    flag, said = checked.last("--logits-processors"), checked.interface.processors
    if flag is None or not said or checked.last("--speculative-config") is None:
        return
    release = checked.interface.vllm
    if said == "refused":
        message = f"vLLM {release} refuses custom logits processors with speculative decoding"
        yield checked.finding("processors-speculation", flag.line, message, "one of both")
        return
    message = (
        f"model runner V1 of vLLM {release} refuses custom logits processors with speculative "
        "decoding; V2 takes both, if it can serve the model"
    )
    yield checked.finding("processors-speculation", flag.line, message, severity="note")


def _cluster(checked: Checked) -> Iterator[Finding]:
    executor = checked.last("--distributed-executor-backend")
    image = checked.command.image
    official = checked.image is not None and "ray" in checked.image.lacks
    ray = checked.value("--distributed-executor-backend") == "ray"
    old = Version(checked.interface.vllm) < _NO_RAY
    if executor and ray and not old and (official or not image):
        message = f"vLLM {checked.interface.vllm} and its images come without Ray"
        advice = (
            "--nnodes 2 --node-rank N --master-addr IP --master-port PORT, without Ray; "
            "or an image with layer ray: spark-build image --layers ray"
        )
        rule = "no-ray" if official else "ray-needed"
        yield checked.finding(rule, executor.line, message, advice)
    env = {one.name: one for one in checked.command.env}
    launched = checked.command.launcher in LAUNCHERS  # they set both
    if "NCCL_SOCKET_IFNAME" in env and "GLOO_SOCKET_IFNAME" not in env and not launched:
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
    if checked.machine != "other" and ("cu12" in rest or (old and "cu13" not in rest)):
        advice = f"vllm/vllm-openai:v{release}-cu130" if old else f"vllm/vllm-openai:v{release}"
        message = f"{checked.command.image} is for CUDA 12: its FP4 kernels do not run on a GB10"
        severity: Severity = "error" if _is_fp4(checked) else "warning"
        line = checked.command.image_line
        yield checked.finding("cuda-12-image", line, message, advice, severity)


def _is_fp4(checked: Checked) -> bool:
    """Whether the model is known, or named, to be in FP4."""
    kinds = checked.model.kinds() if checked.model else ()
    return any("fp4" in kind for kind in (*kinds, checked.command.model.lower()))


def _container(checked: Checked) -> Iterator[Finding]:
    command, image = checked.command, checked.image
    if command.lost:
        names = [w.text for w in command.lost if is_flag(w.text)]
        at = command.lost[0].line
        message = f"the command ends before this line: {shortened(' '.join(names))} are lost"
        advice = "end the line before with a backslash, and nothing behind it"
        yield checked.finding("lost-flags", at, message, advice)
    if command.misread is not None:
        wrong = command.misread
        yield checked.finding("shell-entrypoint", command.line, wrong.why, wrong.advice)
    for mount in command.mounts:
        if over := _PACKAGE_FILE.search(mount.target):
            message = f"{mount.source} replaces {over[1] or over[2]} of the image's own package"
            advice = (
                "make it a layer, which is checked against the release (spark-build layers new), "
                "and see which releases it fits: spark-build matrix --patches DIR"
            )
            yield checked.finding("mounted-over", mount.line, message, advice)
    if command.again:
        message = f"{command.image} runs vllm serve itself: it gets these words twice"
        yield checked.finding(
            "entrypoint-twice", command.line, message, "leave out vllm serve, or set the entrypoint"
        )
    if command.bare:
        message = f"{command.image} runs its words as a command, and these begin with no program"
        yield checked.finding("entrypoint-no-server", command.line, message, "vllm serve first")
    if image is None:
        return
    own = command.entrypoint is None or _OWN_ENTRYPOINT in command.entrypoint
    if image.keeps and not own and not command.launcher:
        message = f"{command.image}: {image.keeps}; this command replaces it"
        advice = f"args, and no command; or begin with /opt/nvidia/{_OWN_ENTRYPOINT}"
        yield checked.finding("entrypoint-bypassed", command.line, message, advice)
    if image.driver and checked.machine != "other":
        message = f"{command.image} wants driver {image.driver}; a Spark's are 580"
        yield checked.finding("driver", command.image_line or command.line, message)


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
    _flags, _twice, _parsers, _variables, _b12x, _model, _memory, _batched, _draft, _processors,
    _cluster,
    _image, _container, _conflicts,
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
_OF_THE_MODEL = {"quantization-name", "b12x-unreachable", "b12x-mxfp4"}
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
    #: whose configurations stand in; None: ours
    models: Models | None = None
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
        groups = list(_groups(checked.command.words))
        added = [one for one in groups if _is_added_words(checked, one)]
        question = Question(
            model=checked.command.model, base=ref, layers=(profile,) if profile else (),
            flags=tuple(one for one in groups if one not in added), variables=variables,
        )  # fmt: skip
        try:
            asked = ask_release(question, checked.model, self.ask, self.models)
        except NotServed:  # its mod changes nothing there
            plain = replace(question, layers=())
            asked = ask_release(plain, checked.model, self.ask, self.models)
        more = tuple(f"{shortened(' '.join(one))}: only the image has it" for one in added)
        return replace(asked, left_out=(*asked.left_out, *more))

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
        release = "" if self.image else self._release(command)
        ref = release_base(release) if release else self.image or ""
        if not ref:
            image = f"the image {command.image}" if command.image else "no image"
            raise UsageError(
                f"{command.file}:{command.line}: the vLLM release is unknown; the command "
                f"names {image} (--image IMAGE reads the release from an image)",
                hint=again("--release 0.33.0"),
            )
        return ref, "" if self.image else self.profile(command)

    def _release(self, command: ServeCommand) -> str:
        """The release that a command is held against; empty if it names neither it nor an image.

        Of an image that is not known, it is the one in its tag, else the newest.
        """
        known = known_image(command.image)
        named = self.release or (known.release(command.image) if known else "") or command.vllm
        if named or not (command.image or command.launcher):
            return named
        if known is not None and known.near != NEWEST:
            return known.near
        return self._newest(release_in_tag(command.image))

    def _newest(self, most: str = "") -> str:
        """The newest release, or the newest one that is not newer than ``most``."""
        releases = vllm_releases(self.index)
        below = [one for one in releases if not most or Version(one) <= Version(most)]
        return (below or releases[:1])[-1]

    @cached_property
    def index(self) -> PackageIndex:
        """The package index."""
        return PackageIndex()

    def is_exact(self, command: ServeCommand) -> bool:
        """Whether a command's vLLM is the release itself, and not a fork or a branch near it."""
        if self.image or self.profile(command):
            return True
        if any(True for mod in command.mods if mod):  # of others: it may change anything
            return False
        if not command.image or command.vllm:
            return not command.launcher
        known = known_image(command.image)
        return known is not None and bool(known.release(command.image)) and not known.fork

    def note(self, command: ServeCommand, vllm: str) -> str:
        """What a command was held against, if that is not what it runs; else empty."""
        if self.is_exact(command):
            return ""
        known = known_image(command.image)
        what = known.fork or known.name if known else "not known"
        changed = f"{what}, changed by mods" if command.mods else what
        return (
            f"{command.file}:{command.line}: {command.image or 'the image'} is {changed}: held "
            f"against vLLM {vllm}, and what that does not know is a note"
        )

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
            with open_regular(path) as file:
                data = file.read(_LARGEST + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from None
    if len(data) > _LARGEST or "\0" in text:
        what = "is larger than 1 MiB" if len(data) > _LARGEST else "is not a text file"
        raise UsageError(f"{path} {what}", hint=READS)
    if long := next((one for one in _DIGITS.finditer(text) if len(one[0]) > _MOST_DIGITS), None):
        line = text.count("\n", 0, long.start()) + 1
        raise UsageError(f"{path}:{line}: a number of more than {_MOST_DIGITS} digits", hint=READS)
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
    notes: dict[str, None] = {}
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
                command, interface, known, profile=linter.profile(command), machine=machine,
                exact=linter.is_exact(command),
            )  # fmt: skip
            notes[linter.note(command, interface.vllm)] = None
            asked = linter.asked(checked) if linter.ask is not None else None
            asked_commands += [_shown(checked, asked)] if asked else []
            for finding in _problems(checked, asked):
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
        notes=tuple(filter(None, notes)),
    )


def _problems(checked: Checked, asked: Asked | None) -> list[Finding]:
    """The problems of a command; what its release answered for itself is in its words."""
    problems = list(islice(check(checked), _MOST_FINDINGS + 1))
    if asked is None:
        return problems
    weighed = (checked.weighed(one) for one in _refused(checked, asked))
    refused = [one for one in weighed if one is not None]
    return [*_unanswered(problems, asked, refused), *refused]


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
    """The problems that a release did not answer for itself; on a line, its words are enough.

    What it may have refused only of the configuration that stood in, it did not answer.
    """
    started = asked.answer is not None and asked.answer.starts == "yes"
    everything = started and not asked.without
    answered = _PARSER_SAYS if asked.parsed else set()
    if everything:
        answered = _RELEASE_SAYS if asked.own else _RELEASE_SAYS - _OF_THE_MODEL
    lines = {one.line for one in refused if one.severity != "note" or not asked.without}
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
        message += "" if one.sure else f"; asked with the configuration of {asked.configuration}"
        severity: Severity | None = None if one.sure else "note"
        starts = asked.answer is not None and asked.answer.starts == "yes"
        advice = f"it starts without {one.flag[0]}" if one.flag and starts and asked.own else ""
        at = line or variable or command.line
        yield checked.finding("refused", at, message, advice, severity)
    answer = asked.answer
    if answer is None or not (asked.own or asked.configuration) or answer.starts != "yes":
        return
    severity = None if asked.own else "note"
    for trouble in answer.troubles:
        text = f"{trouble.kernel}: {trouble.text}"
        yield checked.finding("kernel-trouble", command.line, text, trouble.source, severity)
    if answer.memory is not None and answer.memory.cache_bytes < 0:
        over = -answer.memory.cache_bytes / GIB
        message = f"{over:.1f} GiB more than {answer.memory.fraction:.2f} of a GB10's memory"
        yield checked.finding("does-not-fit", command.line, message, severity=severity)


def _shown(checked: Checked, asked: Asked) -> AskedCommand:
    """One command in the report."""
    words = [w.text for w in checked.command.words if UNKNOWN in w.text]
    unknown = [f"{len(words)} settings that are known only when it starts"] if words else []
    answer: Answer = "not run"
    built = asked.own or bool(asked.configuration)
    if checked.exact and any(one.sure for one in asked.refused):
        answer = "refused"
    elif asked.parsed:
        started: Answer = "starts" if asked.own else "would start"
        answer = started if built and asked.starts else "settings accepted"
    return AskedCommand(
        file=checked.command.file, line=checked.command.line, vllm=checked.interface.vllm,
        answer=answer, configuration=asked.configuration, assumed=asked.assumed,
        left_out=(*asked.left_out, *unknown, *_not_passed(asked)),
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
