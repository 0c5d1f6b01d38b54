"""The rules of ``lint``: summary, severity and source."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from builder.common.document import Document, Part, Text

#: ``error``: the server does not start, or not as configured.  ``warning``: it starts.
Severity = Literal["error", "warning"]


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


def _rule(name: str, severity: Severity, summary: str, source: str) -> Rule:
    return Rule(id=name, severity=severity, summary=summary, source=source)


_ARGS = "the release's own argument parser (vllm/engine/arg_utils.py)"
RULES = {
    rule.id: rule
    for rule in (
        _rule("unknown-flag", "error", "the release has no such flag", _ARGS),
        _rule("bad-value", "error", "the release refuses the value of a flag",
              f"{_ARGS} and configuration (vllm/config)"),
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
