"""Asks a vLLM release to build a whole model on a simulated GB10: no GPU, no weights.

One process (`modelserver`) imports the release, and forks a child for each question.  Answers are
cached by what they depend on: the release's files, the probe, the model's configuration, flags and
variables.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Mapping  # noqa: TC003 - msgspec reads annotations
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta
from msgspec.structs import replace
from packaging.requirements import InvalidRequirement, Requirement

from builder.applier.files import read_regular
from builder.applier.trees import OverlayTree, versions
from builder.applier.values import canonical_json, sha256_hex
from builder.common.cache import locked
from builder.common.console import console
from builder.common.document import Count, Part
from builder.common.leftovers import making
from builder.common.paths import cache_dir, package_file
from builder.common.programs import PREFLIGHT
from builder.common.results import Results
from builder.errors import SparkBuildError, UsageError
from builder.probes.model_counts import too_many
from builder.proof.hub import CONFIGURATION, MOST_BYTES, hub_checkpoint
from builder.proof.installed import MadeFolder, differs, install, recorded
from builder.proof.isolation import SandboxUnavailable
from builder.proof.modelserver import ask_server
from builder.proof.replies import ProbeReply, machine_cause
from builder.proof.sandbox import (
    PreparedSandbox,
    ask_probe,
    folder_of,
    lay_out,
    make,
    python_files,
    requirements_for,
    soundly,
    wanted_torch,
)
from builder.proof.variables import for_a_process, is_read
from builder.proof.weightheaders import NO_WEIGHTS, WeightHeaders, weight_headers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.applier.trees import Tree
    from builder.common.plan import BuildPlan, PlanDocument
    from builder.images.subject import Subject
    from builder.proof.trust import IsolatedRun, TrustedSources
    from builder.proof.variables import Variables

#: Seconds for the questions that are asked together.
_TIMEOUT = 1800.0
#: Cached replies: one has about 20 kB.
_RESULTS = Results("preflight", (PREFLIGHT,), 1000)
#: Flags whose value may name a draft model.
_SPECULATIVE = ("--speculative-config", "-sc")


class Refusal(Part, frozen=True, kw_only=True):
    """Why the release refused, in its own words."""

    type: str
    message: str
    where: Annotated[str, Meta(description="the release's line that raised it")] = ""
    stage: Annotated[
        str, Meta(description="arguments, configuration, model, memory or loading")
    ] = ""
    innermost: Annotated[str, Meta(description="the file of the line that raised it")] = ""
    tail: Annotated[tuple[str, ...], Meta(description="the end of its traceback")] = ()


class LayerRow(Part, frozen=True, kw_only=True):
    """Equal layers of a model."""

    pattern: str
    layer: str
    part: Annotated[str, Meta(description="model, tower (pictures, sound) or draft")] = "model"
    quantisation: str
    kernels: tuple[str, ...]
    attention: str
    experts: tuple[int, int] | None
    count: Count
    bytes: Count
    token_bytes: Annotated[int, Meta(description="bytes that one token reads of them")]


def as_read(row: LayerRow) -> LayerRow:
    """A row of layers; a token that is generated reads nothing of what reads pictures and sound."""
    return replace(row, token_bytes=0) if row.part == "tower" else row


class CacheRow(Part, frozen=True, kw_only=True):
    """Equal caches: one block of so many tokens has so many bytes."""

    kind: str
    block_tokens: Count
    block_bytes: Count
    window: int | None
    count: Count


class CacheGroup(Part, frozen=True, kw_only=True):
    """Layers that share blocks of the KV cache."""

    kind: str
    layers: Count
    block_tokens: Count
    block_bytes: Annotated[int, Meta(description="of one block of one layer")]


class CacheMemory(Part, frozen=True, kw_only=True):
    """How the release sizes its KV cache for the memory that is left; bytes of one rank."""

    refusal: Annotated[str | None, Meta(description="the release's words: too little memory")]
    requested_bytes: Annotated[int, Meta(description="the share of the memory; 0: refused")]
    overhead_bytes: Annotated[int, Meta(description="activations and CUDA graphs, an estimate")]
    available_bytes: Annotated[int, Meta(description="for the cache; below 0: does not fit")]
    block_tokens: Count
    groups: tuple[CacheGroup, ...]
    blocks: Count
    context: Annotated[int, Meta(description="the longest, in tokens; the release may shorten it")]
    concurrency: Annotated[float, Meta(description="requests of the longest context")]
    request_bytes: Annotated[int, Meta(description="of one request of the longest context")]
    longest: Annotated[
        dict[str, int], Meta(description="requests at the same time -> tokens of each, at most")
    ]


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of a device, in bytes, as a release would see it when its server starts."""

    total: int
    #: at the start of the server
    free: int
    #: activations and CUDA graphs: fixed, and for each token of a batch
    overhead: int
    overhead_per_token: int
    #: more of it where the model is divided among several devices
    overhead_between_ranks: int = 0
    #: numbers of requests for which the longest context is asked
    requests: tuple[int, ...] = (1, 4, 16)


class Loading(Part, frozen=True, kw_only=True):
    """What the release's own loader said of a checkpoint's tensors, by name, dtype and shape."""

    part: Annotated[str, Meta(description="model or draft")] = "model"
    tensors: Count = 0
    refusal: Refusal | None = None
    not_asked: Annotated[str, Meta(description="why the loader gave no answer")] = ""
    tensor: Annotated[str, Meta(description="the tensor that was read last before an error")] = ""
    without_weight: Annotated[
        tuple[str, ...],
        Meta(
            description="parameters that it filled from no tensor, and did not refuse; 20 at most"
        ),
    ] = ()
    without_weight_total: Count = 0

    def judged(self) -> Loading:
        """The same; an error that is not the release's is no refusal.

        The probe has looked whether its kind is one that a loader raises on purpose.
        """
        error = self.refusal
        why = (_sandboxs(error) or _by_its_place(error)) if error else ""
        return replace(self, refusal=None, not_asked=why) if why else self


class ModelAnswer(Part, frozen=True, kw_only=True):
    """What the release said of one model with one set of flags."""

    error: Refusal | None
    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    settings: dict[str, str | int | float | bool | None]
    layers: tuple[LayerRow, ...]
    caches: tuple[CacheRow, ...]
    parameter_bytes: Count
    memory: CacheMemory | None = None
    memory_unknown: Annotated[str, Meta(description="why the KV cache was not sized")] = ""
    #: of the model and of its draft, if the names of their tensors are known
    loading: tuple[Loading, ...] = ()
    refused_attention: tuple[str, ...] = ()
    simulated: tuple[str, ...] = ()
    #: an earlier run's
    kept: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether the model has routed experts; the configuration knows it, if it was read."""
        return bool(self.settings.get("experts")) or any(row.experts for row in self.layers)

    @property
    def not_run(self) -> str:
        """Why its error says nothing about the release; empty if it started or was refused."""
        return not_the_releases(self.error)

    @property
    def is_whole(self) -> bool:
        """Whether nothing in it was not run, which may depend on this machine."""
        return not self.not_run and not any(one.judged().not_asked for one in self.loading)

    @property
    def passed_over(self) -> tuple[str, ...]:
        """The release's reasons not to take an attention backend: ``NAME: reason``."""
        listed = [
            f"{name}: {reasons.replace(chr(39), '')}"
            for text in self.refused_attention
            for name, reasons in re.findall(r"(\w+): \[([^\]]*)\]", text)
        ]
        return tuple(dict.fromkeys(listed))


class ModelReply(ProbeReply, frozen=True, kw_only=True):
    """The reply of the probe."""

    answers: tuple[ModelAnswer, ...] = ()
    fatal: dict[str, Any] | None = None
    versions: Mapping[str, str | None] = {}


#: Errors that are this sandbox's and say nothing about the release.
_OURS = {
    r"^(MemoryError|OutOfMemoryError):": "building it takes more memory than one question may",
    r"^TooMuchError: ([^\n]*)": "{0}",
    r"type '([\w.]+)' is not subscriptable": "the release needs a newer Python than this one ({0})",
    r"No module named '(?!vllm)([\w.]+)'": "the sandbox lacks the module {0}",
    r"its library is not here": "an operator of vLLM's compiled libraries was called",
    r"the Triton kernel (\w+) was launched": "the Triton kernel {0} was launched while building",
    r"(\S+/spark-build/\S+: undefined symbol: \w+)": "a library's stand-in failed: {0}",
    r"No CUDA GPUs are available": "a function of CUDA itself was called",
    r"'_OpNamespace' '(\w+)' object has no attribute '(\w+)'": "torch.ops.{0}.{1} was asked for; "
    "its library is not here",
    r"requires the (\w+) library but it was not found": "the sandbox lacks the module {0}",
    r"cannot import name '(\w+)' from 'transformers[\w.]*'": "the sandbox's Transformers has no "
    "{0}, and an image of this release may have another one",
    r"no CUDA here: a generated stand-in": "a CUDA library was called",
    r"Transformers does not recognize this architecture": "the sandbox's Transformers does not "
    "know the model, and an image of this release may have a newer one",
    r"(\w+) is required for \w+ but is not installed": "the sandbox lacks {0}",
    r"Cannot copy out of meta tensor|cannot be called on meta tensors": "building it reads values "
    "of weights",
    r"[Tt]okenizer": "the model needs tokenizer files, and only config.json is read",
    r"Can't load (image processor|feature extractor|video processor|processor)": "the model needs "
    "files of its {0}, such as preprocessor_config.json",
    r"does not appear to have a file named (\S+?)\.? ": "the checkpoint's {0} is not read: only "
    "configuration files are",
    r"couldn't connect to|outgoing traffic has been disabled": "it asks Hugging Face for a file "
    "that is not here",
    r"trust_remote_code|requires you to execute": "the checkpoint has code of its own, which is "
    "not run",
}


def not_the_releases(error: Refusal | None) -> str:
    """Why an error is not an answer of the release; empty if it is one."""
    if error is None:
        return ""
    return _sandboxs(error) or _by_its_place(error) or _by_mistake(error)


def _sandboxs(error: Refusal) -> str:
    """Why an error is the sandbox's, by its text; empty if it is not."""
    text = f"{error.type}: {error.message}"
    for pattern, words in _OURS.items():
        if match := re.search(pattern, text):
            return words.format(*match.groups())
    if cause := machine_cause(error):
        return cause
    return error.message if error.type == "StandInError" else ""


#: Files whose errors are not the release's: torch on its meta device, Transformers, the stand-ins.
_PLACES = {
    r"/torch/": "torch raised it, which has no values and no device here",
    r"/transformers/": "Transformers raised it, and an image of this release may have another one",
    r"/builder/probes/": "a stand-in raised it",
}
#: Errors that code raises by mistake, which a stand-in can cause; a refusal is another kind.
_MISTAKES = ("AttributeError", "TypeError")


def _by_its_place(error: Refusal) -> str:
    """Why an error may be no refusal, by where it was raised; empty if it is one."""
    for place, why in _PLACES.items():
        if re.search(place, error.innermost):
            return f"{why} ({_in_short(error)})"
    return ""


def _by_mistake(error: Refusal) -> str:
    """Why an error may be no refusal, by its kind; empty if it is one.

    vLLM's server raises a ``TypeError`` on purpose where flags do not go together.
    """
    is_meant = error.stage == "arguments" and error.message.startswith("Error: ")
    if error.type in _MISTAKES and not is_meant:
        return f"it may be a stand-in's fault ({_in_short(error)})"
    return ""


def _in_short(error: Refusal) -> str:
    return f"{error.type}: {error.message.strip().partition(chr(10))[0]}; {error.where}"


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
    def of(cls, base: Subject) -> Target:
        """A base as it is."""
        identity = base.identity
        return cls(
            base=identity.ref, tree=base.tree, packages=dict(identity.packages),
            env={k: v for k, v in identity.env.items() if is_read(k)},
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


def _is_doubtful(reply: ModelReply) -> bool:
    """Whether something is in it that a damaged folder may cause."""
    refused = any(a.error or any(one.refusal for one in a.loading) for a in reply.answers)
    return reply.fatal is not None or refused


def _spoils(reply: ModelReply) -> bool:
    """Whether this machine is in the way, so that the process must not answer another command."""
    causes = (machine_cause(answer.error) for answer in reply.answers)
    return reply.fatal is not None or any(causes)


def _cached(inputs: Sequence[object]) -> ModelAnswer | None:
    """An earlier answer; what was not run may depend on this machine, and is asked again."""
    answer = _RESULTS.get(inputs, ModelAnswer)
    return answer if answer is not None and answer.is_whole else None


class Release:
    """The vLLM of a target, which answers in a sandbox."""

    def __init__(self, target: Target, trust: TrustedSources) -> None:
        self.target = target
        self._tree, self._trust = target.tree, trust
        self._packages = {**target.packages, **versions(target.tree)}

    @cached_property
    def _prepared(self) -> PreparedSandbox:
        return self._made()

    def _made(self) -> PreparedSandbox:
        requirements = requirements_for(self._packages["vllm"])
        return make(requirements, wanted_torch(self._tree, self._packages), self._packages)

    @cached_property
    def _apart(self) -> IsolatedRun | None:
        return self._trust.apart(self._tree, python_files(self._tree))

    @cached_property
    def variables(self) -> Variables:
        """The target's variables that its process gets.

        Raises:
            SandboxUnavailable: one has a value that is not passed, or nothing can run here.
        """
        return for_a_process(self.target.env, self._trust.sets, apart=self._apart is not None)

    @property
    def environment(self) -> dict[str, str]:
        """What its process gets of them."""
        return {name: value for name, value in self.variables.passed.items() if value is not None}

    @property
    def python(self) -> Path:
        """The interpreter of its sandbox."""
        return self._prepared.sandbox.python

    @cached_property
    def paths(self) -> list[str]:
        """The folders that it imports from; its own files come first."""
        more = model_packages(self._prepared, self._tree)
        first = transformers_of(self._prepared, self._packages["vllm"])
        folders = [*([first] if first else []), *self._prepared.paths, more]
        return [str(folder_of(self._tree)), *map(str, folders)]

    def ask(
        self,
        folder: Path,
        choices: Sequence[Sequence[str]],
        memory: DeviceMemory | None = None,
        weights: WeightHeaders = NO_WEIGHTS,
    ) -> list[ModelAnswer]:
        """Ask for a folder with ``config.json``, once for each choice of flags.

        The release sizes its KV cache only where the ``memory`` of the device is given, and loads
        weights by name only where the headers of the checkpoint's files are.

        Raises:
            SandboxUnavailable: it could not be asked here; the message says why.
        """
        try:
            return self._ask(folder, choices, memory, weights)
        except SandboxUnavailable:
            raise
        except SparkBuildError as error:
            raise SandboxUnavailable(str(error), hint=error.hint) from None

    def _ask(
        self,
        folder: Path,
        choices: Sequence[Sequence[str]],
        memory: DeviceMemory | None,
        weights: WeightHeaders,
    ) -> list[ModelAnswer]:
        model = configuration_alone(folder, weights)
        _refuse_counts(model)
        apart = self._apart
        prepared = self._prepared
        python = self.python
        header: dict[str, object] = {
            "env": dict(self.variables.passed),
            # first on sys.path, and their .pth files are run: nothing of the checkpoint
            "paths": self.paths,
            "pretend_nvcc": "flashinfer-cubin" not in self._packages,
            "triton": triton_version(prepared.torch.folder),
            "tilelang": exact_pins(self._tree).get("tilelang"),
        }
        asks_weights = bool(weights.files)
        questions = [self._question(model, flags, weights=asks_weights) for flags in choices]
        if memory is not None:
            questions = [{**one, "memory": dataclasses.asdict(memory)} for one in questions]
        inputs = [[str(python), header, question] for question in questions]
        answers = [None if apart else _cached(one) for one in inputs]
        left = [number for number, answer in enumerate(answers) if answer is None]
        if left:
            asked = [questions[number] for number in left]
            folders = [prepared.sandbox.root, *map(Path, self.paths)]
            with console.progress(f"building the model with vLLM {self._packages['vllm']}"):
                ask = partial(self._told, header, asked)
                reply = soundly(ask, self._make_again, python, folders, _is_doubtful)
            if reply.fatal is not None or len(reply.answers) != len(asked):
                why = (reply.fatal or {}).get("message", "too few answers")
                raise SandboxUnavailable(f"vLLM could not be imported: {why}")
            for number, answer in zip(left, reply.answers, strict=True):
                answers[number] = answer
                if not apart and answer.is_whole:
                    _RESULTS.put(inputs[number], answer)
        own = transformers_versions(self._packages["vllm"])
        isolated = [apart.text()] if apart else []
        parts = (prepared.torch.what, *own[:1], *isolated, *self.variables.left_out)
        return [
            replace(a, simulated=(*parts, *a.simulated), layers=tuple(map(as_read, a.layers)))
            for a in answers
            if a is not None
        ]

    def _make_again(self) -> None:
        prepared = self._made()
        model_packages(prepared, self._tree)
        transformers_of(prepared, self._packages["vllm"])

    def _told(self, header: Mapping[str, object], asked: Sequence[Mapping[str, Any]]) -> ModelReply:
        """What the release's code says."""
        lay_out(self._tree)
        if apart := self._apart:
            models = sorted({path for one in asked for path in one["models"]})
            return ask_probe(
                self.python, {**header, "models": models, "questions": asked}, ModelReply,
                _TIMEOUT, PREFLIGHT, apart=apart,
            )  # fmt: skip
        return ask_server(
            self.python, header, asked, ModelReply, label=self._packages["vllm"],
            timeout=_TIMEOUT, spoils=_spoils,
        )  # fmt: skip

    def _question(self, model: Path, flags: Sequence[str], *, weights: bool) -> dict[str, Any]:
        """One question of the probe; a draft model that the flags name is a folder here, too."""
        words, models = list(flags), [str(model)]
        for at, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name.replace("_", "-") not in _SPECULATIVE:
                continue
            place = at if equals else at + 1
            text = value if equals else "".join(words[place : place + 1])
            draft = self._draft(text, weights=weights)
            if draft is not None:
                models.append(draft["model"])
                words[place] = f"{name}={json.dumps(draft)}" if equals else json.dumps(draft)
        return {"model": str(model), "models": models, "flags": words, "env": {}}

    def _draft(self, text: str, *, weights: bool) -> dict[str, Any] | None:
        """A speculative configuration with the folder of its model; None if it names none."""
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            return None
        name = given.get("model") if isinstance(given, dict) else None
        if not isinstance(name, str) or not ("/" in name or Path(name).is_dir()):
            return None
        folder = own_folder(Path(name)) if is_path(name) else self.downloaded(name)
        headers = weight_headers(folder) if weights else NO_WEIGHTS
        draft = configuration_alone(folder, headers)
        _refuse_counts(draft)
        return {**given, "model": str(draft)}

    def downloaded(self, name: str) -> Path:
        """The configuration of a model on Hugging Face, read by its own client and settings.

        Raises:
            RemoteError: the configuration cannot be downloaded.
            UsageError: it is no model's configuration.
        """
        return own_folder(hub_checkpoint(name, python=self.python).folder)


def is_path(model: str) -> bool:
    """Whether a model is named by a path on this machine."""
    path = Path(model)
    try:
        return path.exists() or model.startswith((".", "/", "~"))
    except (OSError, ValueError):  # own_folder says why it is none
        return True


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
        return read_regular(file, MOST_BYTES)
    except OSError as error:
        needed = ": a model's folder has a config.json" if file.name == "config.json" else ""
        raise UsageError(f"{file}: {error.strerror}{needed}") from None
    except ValueError as error:  # a NUL in its name, too
        raise UsageError(f"{file}: {error}") from None


def configuration_alone(folder: Path, weights: WeightHeaders = NO_WEIGHTS) -> Path:
    """A folder with the configuration files of a checkpoint and nothing else, named by content.

    So code that a checkpoint brings cannot run.  Of files with weights only the headers are in it.

    Raises:
        UsageError: one of them cannot be read.
    """
    present = [folder / name for name in CONFIGURATION if os.path.lexists(folder / name)]
    texts = {file.name: _configuration(file) for file in present}
    return configuration_of({**weights.files, **texts})


def _refuse_counts(folder: Path) -> None:
    """Refuse a model with a count that no model has, before anything is made for it.

    Raises:
        SandboxUnavailable: it has one, or its configuration is not JSON.
    """
    try:
        why = too_many(json.loads((folder / "config.json").read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise SandboxUnavailable(f"config.json cannot be read: {error}") from None
    if why:
        raise SandboxUnavailable(f"config.json: {why}")


def configuration_of(texts: Mapping[str, bytes]) -> Path:
    """A folder with configuration files of these names and contents, named by content."""
    expected = {name: sha256_hex(text) for name, text in texts.items()}
    folder = cache_dir() / "preflight" / "models" / sha256_hex(canonical_json(expected))[:24]
    with locked(str(folder)):
        if not folder.exists() or differs(folder, expected):
            with making(folder) as made, making(folder) as old:
                made.mkdir(parents=True)
                for name, text in texts.items():
                    (made / name).write_bytes(text)
                with suppress(FileNotFoundError):
                    folder.rename(old)
                made.rename(folder)
    return folder


def model_packages(prepared: PreparedSandbox, tree: Tree) -> Path:
    """A folder with what building a model imports besides; the release's own pins decide."""
    (of_models,) = _requirements()["model"]
    pinned = exact_pins(tree)
    wanted = []
    for text in of_models["python-packages"]:
        name, _, version = text.partition("==")
        version = pinned.get(name.replace("_", "-"), version)
        wanted += [f"{name}=={version}"] if version else []
    title = f"packages for whole models, about {of_models['megabytes']} MB"
    return _installed(prepared, "model", wanted, title)


def _requirements() -> dict[str, Any]:
    return tomllib.loads(package_file("data", "sandbox-requirements.toml").read_text("utf-8"))


def transformers_versions(vllm: str) -> tuple[str, ...]:
    """The Transformers of the release's day, and its tokenizers; empty: the sandbox has them."""
    return tuple(_requirements()["transformers"]["versions"].get(vllm, ()))


def transformers_of(prepared: PreparedSandbox, vllm: str) -> Path | None:
    """A folder with the Transformers of the release's day; None: the sandbox has it."""
    table = _requirements()["transformers"]
    own = transformers_versions(vllm)
    if not own:
        return None
    title = f"{own[0].replace('==', ' ')}, about {table['megabytes']} MB"
    return _installed(prepared, "transformers-of", [*own, *table["python-packages"]], title)


def _installed(prepared: PreparedSandbox, name: str, wanted: Sequence[str], title: str) -> Path:
    """A folder with these packages, installed once."""
    key = sha256_hex(canonical_json([str(prepared.sandbox.root), wanted]))[:12]

    def make_it(into: Path) -> None:
        with console.progress(title):
            install(prepared.sandbox.python, wanted, into)

    return MadeFolder(
        folder=cache_dir() / "sandbox" / f"{name}-{key}", make=make_it,
        expected=partial(recorded, packages=wanted), answers=("preflight",),
    ).ensure()  # fmt: skip


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
