"""The rules of ``lint``: for which releases each holds, and what shows where it begins and ends.

A rule without a source for both ends is a note: one write-up of one machine is no law.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta
from packaging.specifiers import SpecifierSet

from builder.common.document import Document, Part, Text

#: ``error``: the server does not start, or not as configured.  ``warning``: it starts.
#: ``note``: it may be wrong, or not known here.
Severity = Literal["error", "warning", "note"]


class Rule(Part, frozen=True, kw_only=True):
    """One rule."""

    id: Text
    severity: Severity
    summary: Text
    source: Annotated[Text, Meta(description="the source of the value")]
    vllm: Annotated[str, Meta(description="a range of vLLM releases; absent: every release")] = ""
    first: Annotated[str, Meta(description="what shows that it holds from there on")] = ""
    last: Annotated[str, Meta(description="what shows that it holds up to there")] = ""

    def severity_for(self, vllm: str) -> Severity | None:
        """How severe it is on a release; None: it says nothing there."""
        if SpecifierSet(self.vllm).contains(vllm, prereleases=True):
            return self.severity
        return None if self.severity == "note" else "note"


class RuleList(Document, frozen=True, kw_only=True):
    """All rules."""

    rules: tuple[Rule, ...]


#: The release that a command runs is read or asked itself, so no range is needed.
_ITSELF = "the release of the command is read"
_ASKED = "the release of the command is asked"
_MACHINE = "no release: a GB10 shares its memory with the system"
_SHELL = "no release: the shell, or argparse"
_ARGS = "the release's own argument parser (vllm/engine/arg_utils.py)"


def _rule(
    name: str, severity: Severity, summary: str, source: str, first: str = "", last: str = "",
    vllm: str = "",
) -> Rule:  # fmt: skip
    return Rule(
        id=name, severity=severity, summary=summary, source=source, vllm=vllm, first=first,
        last=last or ("" if vllm else first),
    )  # fmt: skip


RULES = {
    rule.id: rule
    for rule in (
        _rule("unknown-flag", "error", "the release has no such flag", _ARGS, _ITSELF),
        _rule("bad-value", "error", "the release refuses the value of a flag",
              f"{_ARGS} and configuration (vllm/config)", _ITSELF),
        _rule("refused", "error", "with --ask: the release's own code refuses the settings",
              "the release, which builds the model on a simulated GB10: docs/preflight.md",
              _ASKED),
        _rule("transformers-version", "warning",
              "with --ask: the newest Transformers that the release takes refuses the model",
              "Transformers in the sandbox; an image has that of its day: vllm-project/vllm#53836",
              _ASKED),
        _rule("kernel-trouble", "warning",
              "with --ask: the model gets a kernel that failed on GB10s",
              "threads that docs/preflight.md names",
              "vllm-project/vllm#51884: 0.24.0", "deepseek-ai/DeepGEMM#236: 0.27.1",
              ">=0.24.0rc0,<0.28.0rc0"),
        _rule("does-not-fit", "warning", "with --ask: the weights leave no room for a cache",
              "the release's own parameters, and 128 GB of a GB10: docs/preflight.md", _ASKED),
        _rule("quantization-name", "warning",
              "the release has no such method, but the checkpoint's own one may replace it",
              "vllm/config/model.py of the release: override_quantization_method", _ITSELF),
        _rule("unknown-parser", "error", "the release has no such parser, and no plugin is given",
              "vllm/reasoning/__init__.py and vllm/tool_parsers/__init__.py of the release",
              _ITSELF),
        _rule("other-parser", "note", "the model was served with another parser",
              "the model's file: spark-build models show"),
        _rule("unknown-variable", "warning", "the release does not read the variable",
              "vllm/envs.py of the release; it warns about such variables from 0.17.0 on",
              _ITSELF),
        _rule("variable-value", "error", "the release refuses the value of a variable",
              "vllm/envs.py of the release: ValueError at start", _ITSELF),
        _rule("b12x-name", "warning", "b12x is the package b12x, which vLLM does not bring",
              "metadata of vLLM's wheels: b12x is an extra",
              "vllm/config/kernel.py of 0.28.0: the first with the value b12x",
              "metadata of 0.33.0: b12x is an extra", ">=0.28.0rc0,<0.34.0rc0"),
        _rule("b12x-unreachable", "error", "the release has the flag, but not the kernel",
              "ValueError at start, without the layer vllm-b12x-reachable",
              "docs/evidence of 0.24.0: refused", "docs/evidence of 0.27.1: refused",
              ">=0.24.0rc0,<0.28.0rc0"),
        _rule("b12x-mxfp4", "error", "flashinfer_b12x has no kernel for MXFP4 experts",
              "vllm/model_executor/layers/fused_moe/oracle/mxfp4.py: ValueError at start",
              "preflight of gpt-oss-120b on 0.22.0, the first with the value: refused",
              "preflight of gpt-oss-120b on 0.33.0: refused", ">=0.22.0rc0,<0.34.0rc0"),
        _rule("w4a16-rounded", "warning", "experts with 16-bit activations run with 4-bit ones",
              "vLLM #56535: docs/kernel-defects.md, W4A16 experts",
              "docs/evidence of 0.23.0: the first that selects b12x for W4A16 experts",
              "level numbers of 0.33.0", ">=0.23.0rc0,<0.34.0rc0"),
        _rule("batched-tokens", "note", "fewer batched tokens than the block of a hybrid model",
              "write-up of one GB10, 2026-03: vLLM does not start"),
        _rule("eager-autotune", "note", "--enforce-eager crashed while MoE kernels were tuned",
              "write-up of one GB10 with 0.17.1, 2026-03; others serve with it on later releases",
              "write-up of one GB10, 2026-03", vllm="==0.17.*"),
        _rule("short-context", "note",
              "on a Spark, a context that the model's users found too short",
              "the model's file: spark-build models show"),
        _rule("memory-fraction", "warning", "more than 0.90 of a memory that the system shares",
              "vllm-project/vllm#56824 and NVIDIA/dgx-spark-playbooks#97: the machine freezes",
              _MACHINE),
        _rule("memory-unset", "warning",
              "on a Spark, no share of the memory that the system uses too",
              "vllm-project/vllm#56824; before 0.20.0 the default is 0.90",
              "vllm/config/cache.py of 0.20.0: 0.92", "vllm/config/cache.py of 0.33.0: 0.92",
              ">=0.20.0rc0,<0.34.0rc0"),
        _rule("many-batched-tokens", "note",
              "batched tokens whose activations take much of a GB10's memory",
              "AEON-7/vllm-dflash#1: a GB10 hangs with 65536, and served with 32768"),
        _rule("draft-experts", "error",
              "--moe-backend is for the draft's experts too, which are unquantised",
              "vllm-project/vllm#56832 and #51960: ValueError at start; a note where the draft's "
              "experts are not known",
              "vllm-project/vllm#51960: 0.25.1 on a GB10",
              "vllm-project/vllm#56832: 0.29.1rc1.dev47", ">=0.25.0rc0,<0.30.0rc0"),
        _rule("no-ray", "error", "Ray is requested, and the image does not have it",
              "metadata of vLLM's wheels",
              "0.17.1 requires Ray, 0.18.0 does not", "0.33.0 does not",
              ">=0.18.0rc0,<0.34.0rc0"),
        _rule("ray-needed", "warning", "Ray is requested where nothing says that it is installed",
              "metadata of vLLM's wheels",
              "0.17.1 requires Ray, 0.18.0 does not", "0.33.0 does not",
              ">=0.18.0rc0,<0.34.0rc0"),
        _rule("gloo-interface", "warning", "NCCL_SOCKET_IFNAME without GLOO_SOCKET_IFNAME",
              "vllm-project/vllm#40991; eugr/spark-vllm-docker and sparkrun set both",
              "write-up of two GB10, 2026: needed from 0.17.2 on",
              "eugr/spark-vllm-docker sets both for builds after 0.33.0", ">=0.17.2"),
        _rule("least-busy", "warning",
              "LiteLLM's least-busy leaves one of two equal servers mostly idle",
              "write-up of two GB10, 2026: 99 against 156 tokens/s; sparkrun's LiteLLM plugin",
              "no release of vLLM: LiteLLM"),
        _rule("cuda-12-image", "error",
              "an image for CUDA 12, whose FP4 kernels do not run on a GB10",
              "a warning where the model is not known to be in FP4",
              "releases of vLLM before 0.20.0: without -cu130 the tag is for CUDA 12",
              "the -cu129 tags of later releases"),
        _rule("no-effect", "warning", "a setting that another one switches off",
              "vllm/envs.py and vllm/config/kernel.py of the release", _ITSELF),
        _rule("lost-flags", "error", "a backslash is missing: the shell ends the command there",
              "POSIX, Shell Command Language, 2.2.1 Escape Character", _SHELL),
        _rule("shell-entrypoint", "error",
              "a shell gets the command in words that it does not run",
              "POSIX, sh: -c takes one word, and without it the first word is a file", _SHELL),
        _rule("mounted-over", "warning",
              "a file of the host replaces one of the release's package",
              "it fits the release that it was written for: docs/layers.md",
              "no release: the file is not the release's own"),
        _rule("processors-speculation", "error",
              "custom logits processors, which speculative decoding refuses",
              "vllm/v1/sample/logits_processor of the release: ValueError at start", _ITSELF),
        _rule("entrypoint-twice", "error",
              "the image's entrypoint is vllm serve, and the command says it again",
              "docker/Dockerfile of vLLM, target vllm-openai: ENTRYPOINT vllm serve",
              "vLLM's guide for Docker: in every release only flags follow the image's name"),
        _rule("entrypoint-no-server", "error",
              "the image's entrypoint runs the words as a command, and they are flags",
              "NVIDIA's containers: the command begins with vllm serve",
              "no release of vLLM: NVIDIA's containers from 25.10 on",
              "NVIDIA's container 26.10"),
        _rule("entrypoint-bypassed", "warning",
              "the image's entrypoint does not run, and it has something to set up",
              "gyliu513/langX101#409: cudaErrorUnsupportedPtxVersion; NVIDIA's release notes",
              "no release of vLLM: NVIDIA's containers from 26.01 on",
              "NVIDIA's container 26.10"),
        _rule("driver", "note", "the image wants a newer driver than a Spark has",
              "the image's row in builder/data/images.toml"),
        _rule("open-quote", "error", "a quote that is not closed: the shell rejects the command",
              "POSIX, Shell Command Language, 2.2 Quoting", _SHELL),
        _rule("given-twice", "warning", "a flag that is given twice: only the last one counts",
              "argparse", _SHELL),
    )
}  # fmt: skip
#: What is said of a release, and need not hold for an image of something else.
OF_THE_RELEASE = frozenset(
    ("unknown-flag", "bad-value", "refused", "transformers-version", "kernel-trouble",
     "quantization-name", "unknown-parser", "unknown-variable", "variable-value", "b12x-name",
     "b12x-unreachable", "b12x-mxfp4", "w4a16-rounded", "draft-experts", "no-ray", "ray-needed",
     "no-effect", "processors-speculation")
)  # fmt: skip
