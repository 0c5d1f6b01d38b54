"""Asks a vLLM release to build a user's whole model on a simulated GB10: no GPU, no weights.

The release's own code parses the flags, checks the configuration, and builds the model's class
from ``config.json`` on torch's meta device.  So it says itself whether the model starts, which
kernel each layer gets, and how many bytes its weights and caches need.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Mapping  # noqa: TC003 - msgspec reads annotations
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import replace
from packaging.requirements import InvalidRequirement, Requirement

from builder.applier.digests import canonical_json, sha256_hex
from builder.applier.trees import OverlayTree, versions
from builder.common.console import console
from builder.common.document import Count, Document, Part, Text, always
from builder.common.leftovers import making
from builder.common.locks import locked
from builder.common.paths import cache_dir, package_file, read_regular
from builder.common.pypi import PackageIndex
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError
from builder.layers.catalog import Selection
from builder.layers.plan.planner import refuse_plan
from builder.pipeline.bases import identify_base
from builder.pipeline.inputs import Inputs
from builder.probes import PREFLIGHT_PROBE
from builder.proof.installer import SandboxUnavailable, call, install_command
from builder.proof.replies import ProbeReply
from builder.proof.results import Results
from builder.proof.sandbox import (
    PreparedSandbox,
    ask_probe,
    folder_of,
    lay_out,
    make,
    python_files,
    requirements_for,
)
from builder.proof.torchfolder import wanted_torch
from builder.proof.trust import TrustedSources
from builder.serving.memory import ACTIVATIONS, BANDWIDTH, GIB, GRAPHS, TOTAL
from builder.serving.models import Models
from builder.serving.release import release_base

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.applier.trees import Tree
    from builder.common.documents.plan import PlanDocument
    from builder.common.model.plan import BuildPlan
    from builder.images.rootfs.base import Base
    from builder.pipeline.options import PlanOptions

#: Seconds for all questions of one request.
_TIMEOUT = 1800.0
#: What a checkpoint's page on Hugging Face is asked for: configuration, never weights or code.
CONFIGURATION = (
    "config.json", "hf_quant_config.json", "quantize_config.json", "generation_config.json",
    "preprocessor_config.json", "processor_config.json", "params.json",
    "model.safetensors.index.json",
)  # fmt: skip
#: The largest of them; the index of a checkpoint of a trillion parameters has about 20 MB.
_MOST_BYTES = 64 << 20
#: Cached replies: one has about 20 kB.
_RESULTS = Results("preflight", tuple(("probes", name) for name in PREFLIGHT_PROBE), 200)
#: Variables of an image that vLLM, FlashInfer or the CuTe DSL read.
_READ = ("VLLM_", "FLASHINFER_", "CUTE_DSL_")
#: Requests at the same time for which the longest context is given.
_USERS = (1, 4, 16)


class Refusal(Part, frozen=True, kw_only=True):
    """Why the release refused, in its own words."""

    type: str
    message: str
    where: Annotated[str, Meta(description="the release's line that raised it")] = ""
    stage: Annotated[str, Meta(description="arguments, configuration or model")] = ""
    tail: Annotated[tuple[str, ...], Meta(description="the end of its traceback")] = ()


class LayerRow(Part, frozen=True, kw_only=True):
    """Equal layers of a model."""

    pattern: str
    layer: str
    quantisation: str
    kernels: tuple[str, ...]
    attention: str
    experts: tuple[int, int] | None
    count: Count
    bytes: Count
    token_bytes: Annotated[int, Meta(description="bytes that one token reads of them")]


class CacheRow(Part, frozen=True, kw_only=True):
    """Equal caches: one block of so many tokens has so many bytes."""

    kind: str
    block_tokens: Count
    block_bytes: Count
    window: int | None
    count: Count

    def bytes_for(self, tokens: int) -> int:
        """The bytes of all these caches for a sequence of so many tokens."""
        if "Mamba" in self.kind:  # one state a sequence, however long
            return self.block_bytes * self.count
        held = min(tokens, self.window + self.block_tokens) if self.window else tokens
        return math.ceil(held / self.block_tokens) * self.block_bytes * self.count


class ModelAnswer(Part, frozen=True, kw_only=True):
    """What the release said of one model with one set of flags."""

    error: Refusal | None
    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    settings: dict[str, str | int | float | bool | None]
    layers: tuple[LayerRow, ...]
    caches: tuple[CacheRow, ...]
    parameter_bytes: Count

    @property
    def has_experts(self) -> bool:
        """Whether the model has routed experts."""
        return any(row.experts for row in self.layers)


class ModelReply(ProbeReply, frozen=True, kw_only=True):
    """The reply of the probe."""

    answers: tuple[ModelAnswer, ...] = ()
    fatal: dict[str, Any] | None = None
    versions: Mapping[str, str | None] = {}
    kept: bool = False


class Room(Part, frozen=True, kw_only=True):
    """Memory of the model on one GB10."""

    total_bytes: Count
    fraction: float
    weight_bytes: Count
    overhead_bytes: Annotated[int, Meta(description="activations and CUDA graphs, an estimate")]
    cache_bytes: Annotated[int, Meta(description="what is left for caches; below 0: does not fit")]
    longest: Annotated[
        dict[str, int], Meta(description="requests at the same time -> tokens of each, at most")
    ]
    ceiling: Annotated[
        float | None, Meta(description="tokens/s of one request at most: 273 GB/s over its bytes")
    ]


class Trouble(Part, frozen=True, kw_only=True):
    """A kernel that the release selects, and that failed on GB10s in the field."""

    kernel: Text
    text: Text
    source: Text


#: What no release checks: kernels that it selects on SM12x and that fail there.
_TROUBLES = {
    r"DeepGemm|DEEPGEMM": Trouble(
        kernel="DeepGEMM",
        text='servers on SM12x ended with "Unknown recipe", "Unknown SF transformation" or '
        '"Unsupported architecture" (vLLM 0.24.0 to 0.27.1); --env VLLM_USE_DEEP_GEMM=0 shows what '
        "the release takes instead",
        source="vllm-project/vllm#51884, deepseek-ai/DeepGEMM#236",
    ),
}


class Cure(Part, frozen=True, kw_only=True):
    """A change with which the release takes the model."""

    change: Text
    flags: tuple[str, ...]


class Preflight(Document, frozen=True, kw_only=True):
    """Whether a model starts on a release, and with which kernels."""

    model: Text
    base: Text
    packages: dict[str, str]
    #: layers that change files of this base
    patched: tuple[str, ...]
    flags: tuple[str, ...]
    environment: dict[str, str]
    starts: Literal["yes", "no", "not run"]
    reason: Annotated[str, Meta(description="why it was not run")] = ""
    refusal: Refusal | None
    warnings: tuple[str, ...]
    lines: tuple[str, ...]
    settings: dict[str, str | int | float | bool | None]
    layers: tuple[LayerRow, ...]
    caches: tuple[CacheRow, ...]
    memory: Room | None
    troubles: tuple[Trouble, ...] = always(())
    cures: tuple[Cure, ...] = always(())
    simulated: tuple[str, ...]
    cached: bool = False


@dataclass(frozen=True, kw_only=True)
class PreflightRequest:
    """What to ask."""

    model: str
    plan: PlanOptions
    flags: tuple[str, ...] = ()
    #: ``NAME=VALUE``
    variables: Sequence[str] = ()
    models: Sequence[Path] = ()
    trust_image: bool = False


@dataclass(frozen=True, kw_only=True)
class Target:
    """The files of a vLLM, its variables, and the flags that its profile serves with."""

    base: str
    tree: Tree
    packages: Mapping[str, str]
    env: Mapping[str, str] = field(default_factory=dict)
    plan: PlanDocument | None = None
    patched: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    flags_for_experts: tuple[str, ...] = ()

    @classmethod
    def of(cls, base: Base) -> Target:
        """A base as it is."""
        identity = base.identity
        return cls(
            base=identity.ref, tree=base.tree, packages=dict(identity.packages),
            env={k: v for k, v in identity.env.items() if k.startswith(_READ)},
        )  # fmt: skip

    def with_plan(self, plan: BuildPlan) -> Target:
        """The same with the files and variables of a plan."""
        tree = OverlayTree(self.tree)
        tree.update(plan.changes)
        return dataclasses.replace(
            self, tree=tree, packages=dict(plan.base.packages), env={**self.env, **plan.env},
            plan=plan.document, flags=tuple(plan.serve_flags),
            flags_for_experts=tuple(plan.moe_serve_flags),
            patched=tuple(one.name for one in plan.decisions if one.needed),
        )  # fmt: skip


def base_of(release: str | None, base: str | None) -> str:
    """The base that the options name.

    Raises:
        UsageError: they name both or neither.
    """
    if (release is None) == (base is None):
        words = "not both" if release else "one of them is needed"
        raise UsageError(
            f"preflight asks one vLLM, that of --release or --base: {words}",
            hint="--release 0.33.0",
        )
    return release_base(release) if release is not None else str(base)


def preflight(request: PreflightRequest) -> Preflight:
    """Ask the release of a base, with the layers that were named.

    Raises:
        SparkBuildError: the model's configuration or the base cannot be read.
    """
    given = variables_of(request.variables)
    with _target(request.plan) as opened:
        target = dataclasses.replace(opened, env={**opened.env, **given})
        trust = TrustedSources(patches=request.plan.patches, everything=request.trust_image)
        release = Release(target, trust.with_plan(target.plan) if target.plan else trust)
        folder = release.model_folder(request.model, request.models)
        document = _asked(release, folder, request)
        if document.starts == "no":
            cures = release.cures(folder, document.flags)
            document = replace(document, cures=tuple(cures))
        return document


def variables_of(texts: Sequence[str]) -> dict[str, str]:
    """Variables from ``NAME=VALUE``.

    Raises:
        UsageError: a text has another form.
    """
    wrong = [text for text in texts if not re.match(r"[A-Za-z_]\w*=", text)]
    if wrong:
        raise UsageError(f"--env {wrong[0]!r} is not NAME=VALUE", hint="--env VLLM_USE_DEEP_GEMM=0")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


@contextmanager
def _target(options: PlanOptions) -> Iterator[Target]:
    """The base as it is, or with the selected layers applied.

    Raises:
        SparkBuildError: it cannot be read, or the layers do not apply to it.
    """
    ref = str(options.base)
    if not options.names:
        nothing = Selection((), ())
        base = identify_base(ref, nothing, PackageIndex(), platform=options.platform)
        with closing(base):
            yield Target.of(base)
        return
    inputs = Inputs(options)
    with closing(inputs.identify(ref)) as base:
        plan = inputs.plan(base)
        refuse_plan(plan, inputs.rebuild_command("image", ref))
        yield Target.of(base).with_plan(plan)


def _asked(release: Release, folder: Path, request: PreflightRequest) -> Preflight:
    """The document for the flags, and the profile's flags for experts where the model has some."""
    target = release.target
    flags = with_flags(request.flags, target.flags)
    more = with_flags(flags, target.flags_for_experts)
    document = Preflight(
        model=request.model, base=target.base, packages=dict(target.packages),
        patched=target.patched, flags=flags, environment=dict(target.env), starts="not run",
        refusal=None, warnings=(), lines=(), settings={}, layers=(), caches=(), memory=None,
        simulated=(),
    )  # fmt: skip
    try:
        reply = release.ask(folder, [flags, more] if more != flags else [flags])
    except SandboxUnavailable as error:
        hint = f"; try: {error.hint}" if error.hint else ""
        return replace(document, reason=f"{error}{hint}")
    experts = reply.answers[0].has_experts
    answer = reply.answers[-1 if experts else 0]
    missing = not_the_releases(answer.error)
    starts: Literal["yes", "no", "not run"] = "no" if answer.error else "yes"
    return replace(
        document, flags=more if experts else flags, starts="not run" if missing else starts,
        troubles=troubles_of(answer.layers), reason=missing, refusal=answer.error,
        warnings=answer.warnings, lines=answer.lines,
        settings=answer.settings, layers=answer.layers, caches=answer.caches,
        memory=None if answer.error else room(answer), simulated=reply.simulated,
        cached=reply.kept,
    )  # fmt: skip


#: Errors that are this sandbox's and say nothing about the release.
_OURS = {
    r"^(MemoryError|OutOfMemoryError):": "building it takes more memory than one question may",
    r"No module named '(?!vllm)([\w.]+)'": "the sandbox lacks the module {0}",
    r"its library is not here": "an operator of vLLM's compiled libraries was called",
    r"the Triton kernel (\w+) was launched": "the Triton kernel {0} was launched while building",
    r"(\S+/spark-build/\S+: undefined symbol: \w+)": "a library's stand-in failed: {0}",
    r"no CUDA here: a generated stand-in": "a CUDA library was called",
    r"Transformers does not recognize this architecture": "the sandbox's Transformers does not "
    "know the model, and an image of this release may have a newer one",
    r"(\w+) is required for \w+ but is not installed": "the sandbox lacks {0}",
    r"Cannot copy out of meta tensor": "building it reads values of weights",
    r"[Tt]okenizer": "the model needs tokenizer files, and only config.json is read",
    r"Can't load (image processor|feature extractor|video processor|processor)": "the model needs "
    "files of its {0}, such as preprocessor_config.json",
    r"does not appear to have a file named (\S+?)\.? ": "the checkpoint's {0} is not read: only "
    "configuration files are",
    r"trust_remote_code|requires you to execute": "the checkpoint has code of its own, which is "
    "not run",
}


def not_the_releases(error: Refusal | None) -> str:
    """Why an error is not an answer of the release; empty if it is one."""
    if error is None:
        return ""
    if error.type == "Crashed":
        return error.message
    text = f"{error.type}: {error.message}"
    for pattern, words in _OURS.items():
        if match := re.search(pattern, text):
            return words.format(*match.groups())
    return ""


def troubles_of(rows: Sequence[LayerRow]) -> tuple[Trouble, ...]:
    """The kernels among those that were selected which failed in the field."""
    kernels = " ".join(kernel for row in rows for kernel in row.kernels)
    return tuple(one for pattern, one in _TROUBLES.items() if re.search(pattern, kernels))


def with_flags(flags: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    """Flags, and those of a profile that they do not set themselves."""
    given = {word.partition("=")[0].replace("_", "-") for word in flags if word.startswith("--")}
    added: list[str] = []
    keep = True
    for word in more:
        if word.startswith("--"):
            keep = word.partition("=")[0].replace("_", "-") not in given
        added += [word] if keep else []
    return (*flags, *added)


def room(answer: ModelAnswer) -> Room:
    """The memory of a model that was built, and its limit of speed."""
    fraction = float(answer.settings.get("gpu_memory_utilization") or 0.9)
    overhead = ACTIVATIONS.bytes + GRAPHS.bytes
    left = int(TOTAL.bytes * fraction) - answer.parameter_bytes - overhead
    read = sum(row.token_bytes for row in answer.layers)
    most = int(answer.settings.get("max_model_len") or 0)
    return Room(
        total_bytes=TOTAL.bytes, fraction=fraction, weight_bytes=answer.parameter_bytes,
        overhead_bytes=overhead, cache_bytes=left,
        longest={str(n): longest_context(answer.caches, left // n, most) for n in _USERS},
        ceiling=round(BANDWIDTH / read, 1) if read else None,
    )  # fmt: skip


def longest_context(caches: Sequence[CacheRow], available: int, most: int) -> int:
    """The largest number of tokens, up to ``most``, whose caches fit; 0 if none do."""

    def needs(tokens: int) -> int:
        return sum(row.bytes_for(tokens) for row in caches)

    if not caches or needs(1) > available:
        return 0
    low, high = 1, max(most, 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needs(middle) <= available else (low, middle - 1)
    return low


class Release:
    """The vLLM of a target, which answers in a sandbox."""

    def __init__(self, target: Target, trust: TrustedSources) -> None:
        self.target = target
        self._tree, self._trust = target.tree, trust
        self._packages = {**target.packages, **versions(target.tree)}

    def _prepared(self) -> PreparedSandbox:
        requirements = requirements_for(self._packages["vllm"])
        return make(requirements, wanted_torch(self._tree, self._packages), self._packages)

    def ask(self, folder: Path, choices: Sequence[Sequence[str]]) -> ModelReply:
        """Ask for a folder with ``config.json``, once for each choice of flags.

        Raises:
            SandboxUnavailable: it could not be asked here; the message says why.
        """
        try:
            return self._ask(folder, choices)
        except SandboxUnavailable:
            raise
        except SparkBuildError as error:
            raise SandboxUnavailable(str(error), hint=error.hint) from None

    def _ask(self, folder: Path, choices: Sequence[Sequence[str]]) -> ModelReply:
        model = configuration_alone(folder)
        apart = self._trust.apart(self._tree, python_files(self._tree))
        prepared = self._prepared()
        more = model_packages(prepared, self._tree)
        request = {
            "env": dict(self.target.env),
            # first on sys.path, and their .pth files are run: nothing of the checkpoint
            "paths": [str(folder_of(self._tree)), *map(str, prepared.paths), str(more)],
            "models": [str(model)],
            "pretend_nvcc": "flashinfer-cubin" not in self._packages,
            "triton": triton_version(prepared.torch.folder),
            "questions": [{"model": str(model), "flags": list(c), "env": {}} for c in choices],
        }
        inputs = [str(prepared.sandbox.python), request]
        reply = None if apart else _RESULTS.get(inputs, ModelReply)
        if reply is None:
            lay_out(self._tree)
            with console.progress(f"building the model with vLLM {self._packages['vllm']}"):
                reply = ask_probe(
                    prepared.sandbox.python, request, ModelReply, _TIMEOUT, PREFLIGHT_PROBE[-1],
                    apart=apart,
                )  # fmt: skip
            crashed = any(one.error and one.error.type == "Crashed" for one in reply.answers)
            if reply.fatal is None and not apart and not crashed:  # killed for memory, perhaps
                _RESULTS.put(inputs, reply)
        if reply.fatal is not None:
            raise SandboxUnavailable(f"vLLM could not be imported: {reply.fatal.get('message')}")
        return reply.simulating(prepared.torch.what)

    def cures(self, folder: Path, flags: Sequence[str]) -> list[Cure]:
        """Single flags without which the release takes the model."""
        groups = flag_groups(flags)
        choices = [tuple(w for g in groups if g is not out for w in g) for out in groups]
        if not choices:
            return []
        reply = self.ask(folder, choices)
        return [
            Cure(change=f"without {' '.join(out)}", flags=choice)
            for out, choice, answer in zip(groups, choices, reply.answers, strict=True)
            if answer.error is None
        ]

    def model_folder(self, model: str, folders: Sequence[Path]) -> Path:
        """The folder with a model's ``config.json``; downloaded, if it is an id on Hugging Face.

        Raises:
            UsageError: there is none.
            RemoteError: it cannot be downloaded.
        """
        path = Path(model)
        if path.is_dir() or path.is_file() or model.startswith((".", "/", "~")):
            return own_folder(path)
        name = model
        if "/" not in model:
            name = Models.discover(folders).model(model, or_folder=True).id.value
        return self._downloaded(name)

    def _downloaded(self, name: str) -> Path:
        """The configuration of a model on Hugging Face, read by its own client and settings."""
        program = (
            "import sys; from huggingface_hub import snapshot_download; "
            "print(snapshot_download(sys.argv[1], allow_patterns=sys.argv[2:]))"
        )
        python = self._prepared().sandbox.python
        # isolated: no module of the current folder is run
        words = [str(python), "-I", "-c", program, name, *CONFIGURATION]
        with console.progress(f"reading the configuration of {name}"):
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RemoteError(
                f"cannot read the configuration of {name}: {last}",
                hint="name a folder with its config.json",
            )
        return own_folder(Path(done.stdout.strip().splitlines()[-1]))


def own_folder(path: Path) -> Path:
    """A checkpoint's folder.

    Raises:
        UsageError: it has no readable ``config.json``.
    """
    path = Path(os.path.expanduser(path))  # noqa: PTH111 - Path's raises for an unknown user
    folder = path.parent if path.name == "config.json" else path
    file = folder / "config.json"
    text = _configuration(file)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON: {error}") from None
    if not isinstance(data, dict) or not (data.get("architectures") or data.get("model_type")):
        raise UsageError(f"{file} names no architecture, so it is not a model's configuration")
    return folder.resolve()


def _configuration(file: Path) -> bytes:
    """A configuration file of a checkpoint.

    Raises:
        UsageError: it cannot be read, is no regular file or too large.
    """
    try:
        return read_regular(file, _MOST_BYTES)
    except OSError as error:
        needed = ": a model's folder has a config.json" if file.name == "config.json" else ""
        raise UsageError(f"{file}: {error.strerror}{needed}") from None
    except ValueError as error:  # a NUL in its name, too
        raise UsageError(f"{file}: {error}") from None


def configuration_alone(folder: Path) -> Path:
    """A folder with the configuration files of a checkpoint and nothing else, named by content.

    So code that a checkpoint brings cannot run.

    Raises:
        UsageError: one of them cannot be read.
    """
    present = [folder / name for name in CONFIGURATION if os.path.lexists(folder / name)]
    texts = {file.name: _configuration(file) for file in present}
    key = sha256_hex(canonical_json({name: sha256_hex(text) for name, text in texts.items()}))
    made = cache_dir() / "preflight" / "models" / key[:24]
    with locked(str(made)):
        if not made.exists():
            with making(made) as partial:
                partial.mkdir(parents=True)
                for name, text in texts.items():
                    (partial / name).write_bytes(text)
                partial.rename(made)
    return made


def flag_groups(flags: Sequence[str]) -> list[tuple[str, ...]]:
    """Flags with their values."""
    groups: list[list[str]] = []
    for word in flags:
        if word.startswith("-") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return [tuple(group) for group in groups]


def model_packages(prepared: PreparedSandbox, tree: Tree) -> Path:
    """A folder with what building a model imports besides; the release's own pins decide."""
    raw = tomllib.loads(package_file("data", "sandbox-requirements.toml").read_text("utf-8"))
    (of_models,) = raw["model"]
    pinned = exact_pins(tree)
    wanted = []
    for text in of_models["python-packages"]:
        name, _, version = text.partition("==")
        version = pinned.get(name.replace("_", "-"), version)
        wanted += [f"{name}=={version}"] if version else []
    key = sha256_hex(canonical_json([str(prepared.sandbox.root), wanted]))[:12]
    folder = cache_dir() / "sandbox" / f"model-{key}"
    with locked(str(folder)):
        if not folder.exists():
            title = f"packages for whole models, about {of_models['megabytes']} MB"
            with making(folder) as partial, console.progress(title):
                call(install_command(prepared.sandbox.python, wanted, partial))
                partial.rename(folder)
    return folder


def exact_pins(tree: Tree) -> dict[str, str]:
    """Distributions that the release requires in exactly one version, by normalised name."""
    info = next(d for d in tree.distributions().values() if d.name == "vllm")
    text = (tree.read(f"{info.info_dir}/METADATA") or b"").decode(errors="replace")
    pins = {}
    for line in text.splitlines():
        if not line.startswith("Requires-Dist:"):
            continue
        try:
            need = Requirement(line.partition(":")[2].strip())
        except InvalidRequirement:
            continue
        versions_ = [s.version for s in need.specifier if s.operator == "=="]
        if len(versions_) == 1 and not need.marker:
            pins[need.name.replace("_", "-")] = versions_[0]
    return pins


def triton_version(torch: Path) -> str:
    """The Triton that this torch is for, by its metadata."""
    for file in torch.glob("torch-*.dist-info/METADATA"):
        text = file.read_text("utf-8")
        if pin := re.search(r"^Requires-Dist: triton==([\w.]+)", text, re.MULTILINE):
            return pin[1]
    return ""


def refuse_if_it_does_not_start(document: Preflight) -> None:
    """Raise if the model does not start, or could not be built here.

    Raises:
        SparkBuildError: with the release's own words (exit 5).
    """
    if document.starts == "yes":
        return
    vllm = document.packages.get("vllm", "")
    if document.starts == "not run":
        text = f"{document.model} was not built with vLLM {vllm}: {document.reason}"
        raise SparkBuildError(text, Exit.VERIFY_FAILED)
    assert document.refusal is not None
    text = f"{document.model} does not start on vLLM {vllm}: {sentence(document.refusal)}"
    words = ["spark-build", "preflight", document.model, "--base", document.base]
    more = document.cures[0].flags if document.cures else (*document.flags, "--layers", "b12x-full")
    raise SparkBuildError(text, Exit.VERIFY_FAILED, hint=shlex.join([*words, *more]))


def sentence(refusal: Refusal) -> str:
    """The release's sentence: of a validation error the reasons, not its heading."""
    lines = [line for line in refusal.message.splitlines() if line.strip()]
    if not re.match(r"\d+ validation errors? for ", lines[0] if lines else ""):
        return lines[0].strip() if lines else refusal.type
    reasons: list[str] = []
    field_name = ""
    for line in lines[1:]:
        text = line.strip().partition(" [type=")[0].removeprefix("Value error, ")
        if text.startswith("For further information"):
            continue
        if line.startswith(" ") or "Value error, " in line:
            reasons.append(f"{field_name}: {text}" if field_name else text)
            field_name = ""
        elif line.startswith("-") and reasons:  # a list goes on
            reasons[-1] += f" {text}"
        else:
            field_name = text
    return "; ".join(reasons) or lines[0].strip()


def gibibytes(size: int) -> str:
    """Bytes as a reader wants them."""
    return f"{size / GIB:.2f} GiB"
