"""Asks a release about a serve command: each setting that it refuses, in its own words.

The release's own parser, configuration and model classes answer (``preflight``).  It stops at the
first setting that it refuses, so it is asked again without that one.  Of a model whose
configuration is not known, a small one stands in: then only what no model decides counts.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from builder.common.console import console
from builder.common.hints import again
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError
from builder.pipeline.options import PlanOptions
from builder.proof.flags import WHY, names_code
from builder.proof.wholemodel import sentence
from builder.serving.assumed import is_general
from builder.serving.configurations import nearest
from builder.serving.models import Models
from builder.serving.preflight import (
    Preflight,
    PreflightRequest,
    in_short,
    preflight,
    surely_too_large,
)
from builder.serving.recipe import CONCERNS, RecipeImage, node_count
from builder.serving.release import official_image
from builder.serving.released import release_base
from builder.serving.serveflags import (
    PLUGINS,
    REASONING_FLAG,
    TOOL_CHOICE,
    TOOL_FLAG,
    canonical,
    name_of,
    of_plugins,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from builder.proof.wholemodel import Refusal
    from builder.serving.models import Model
    from builder.serving.recipe import Recipe, RecipeRequest


if TYPE_CHECKING:
    Ask = Callable[[PreflightRequest], Preflight]

#: One flag with its values, as words.
Words = tuple[str, ...]
#: Questions about one command, at most.
_MOST = 7
#: Flags that name files and checkpoints, which are not here, or that preflight sets itself.
_NOT_ASKED = {
    "--model", "--tokenizer", "--tokenizer-mode", "--tokenizer-revision", "--revision",
    "--code-revision", "--hf-config-path", "--hf-token", "--download-dir", "--load-format",
    "--config", "--lora-modules", "--headless", "--node-rank", "--master-addr", "--master-port",
    "--allowed-local-media-path", "--chat-template",
}  # fmt: skip
_SPECULATION = "--speculative-config"
_CODE = "--trust-remote-code"
_RAY = ("--distributed-executor-backend", "ray")
#: Flags of a server whose ranks are on several machines.
_JOINED = {"--nnodes", "--node-rank", "--headless", "--master-addr", "--data-parallel-address"}
#: Flags whose product is the number of ranks.
_RANKS = {"--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"}
#: How a release refuses more ranks than one machine has GPUs.
_MORE_GPUS = re.compile(r"World size \((\d+)\) is larger than the number of available GPUs")
#: What stands in for a model that is not known: two dense layers, a context without limit.
STAND_IN = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 128,
    "num_key_value_heads": 8, "num_hidden_layers": 2, "vocab_size": 32000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1 << 24, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


#: What is said of it.
ASSUMED_SMALL = "a small dense model, since no known configuration is near"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A serve command on one vLLM."""

    #: a folder, or an id on Hugging Face
    model: str
    base: str
    layers: tuple[str, ...] = ()
    #: the flags, each with its values
    flags: tuple[Words, ...] = ()
    variables: Mapping[str, str]
    #: machines with one GPU each, as many as it has ranks, whatever the flags say
    joined: bool = False


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A setting that the release refuses; no setting: the model, whatever the settings."""

    flag: Words
    sentence: str
    where: str
    #: False: of a configuration that is only near the model's
    sure: bool = True


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the release said."""

    refused: tuple[Refused, ...] = ()
    #: the last answer; None: it could not be asked
    answer: Preflight | None = None
    #: whether the model's own configuration was used
    own: bool = False
    #: whose configuration was used; empty: the command's own, or a small model's
    configuration: str = ""
    #: what stood in for the model's configuration, and what differs; empty: nothing
    assumed: str = ""
    #: settings that it was asked without, since a refusal may be of what stood in
    without: tuple[Words, ...] = ()
    #: what was not asked, and why
    left_out: tuple[str, ...] = ()

    @property
    def starts(self) -> bool:
        """Whether the release took all settings."""
        return self.answer is not None and self.answer.starts == "yes" and not self.refused

    @property
    def parsed(self) -> bool:
        """Whether its parser took them, whatever came after."""
        if self.answer is None or self.answer.starts == "not run":
            return False
        refusal = self.answer.refusal
        return refusal is None or refusal.stage != "arguments"


def ask_release(
    question: Question, model: Model | None, ask: Ask = preflight, models: Models | None = None
) -> Asked:
    """Ask a release about a command, with the configuration of its model if that can be had.

    Else with the nearest one that is known, whose refusals are not sure; else with a small model,
    of which only what no model decides counts.

    Raises:
        SparkBuildError: the release or the layers cannot be read.
    """
    words, left_out = _askable(question.flags)
    own = _asked_itself(question, model, words, ask)
    if own is not None:
        return _with(own, own_model=True, left_out=left_out)
    near = nearest(question.model, models or Models.discover()) if question.model else None
    if near is not None:
        asked = _asked_with(near.config, question, words, ask, sure=near.own, fits=near.sized)
        if asked is not None and (asked.answer is None or asked.answer.starts != "not run"):
            asked = _with(asked, own_model=near.own, left_out=left_out, of=near.of)
            if asked.answer is not None and not near.sized:  # bytes of another size
                asked = dataclasses.replace(asked, answer=replace(asked.answer, memory=None))
            return dataclasses.replace(asked, assumed=near.assumed)
    asked = _asked_with(STAND_IN, question, words, ask, general=True, fits=False)
    missing = f"what {question.model or 'the model'} decides: kernels, lengths and memory"
    asked = _with(asked or Asked(), own_model=False, left_out=(*left_out, missing))
    return dataclasses.replace(asked, assumed=ASSUMED_SMALL)


def _asked_itself(
    question: Question, model: Model | None, words: Sequence[Words], ask: Ask
) -> Asked | None:
    """Ask with the model's own configuration: of its file, a folder, or of Hugging Face."""
    if model is not None and model.config is not None and model.id.value == question.model:
        return _asked_with(model.config.value, question, words, ask)
    folder = Path(question.model)
    if folder.is_dir() or re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
        return _asked(question.model, question, words, ask)
    return None


def _with(asked: Asked, *, own_model: bool, left_out: Iterable[str], of: str = "") -> Asked:
    answer = asked.answer
    more = [answer.reason] if answer is not None and answer.starts == "not run" else []
    return Asked(
        refused=asked.refused, answer=answer, own=own_model, configuration=of,
        without=asked.without, left_out=(*asked.left_out, *left_out, *more),
    )  # fmt: skip


def _asked_with(
    config: Mapping[str, object], question: Question, words: Sequence[Words], ask: Ask,
    *, general: bool = False, sure: bool = True, fits: bool = True,
) -> Asked | None:  # fmt: skip
    """Ask about a configuration that is no file."""
    with tempfile.TemporaryDirectory(prefix="spark-build-model-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return _asked(folder, question, words, ask, general=general, sure=sure, fits=fits)


def _askable(flags: Sequence[Words]) -> tuple[list[Words], tuple[str, ...]]:
    """The flags that a release is asked about, and what is said of the others."""
    left_out: list[str] = []
    words: list[Words] = []
    plugged = of_plugins({name_of(flag) for flag in flags})
    for flag in flags:
        name = name_of(flag)
        if name == _SPECULATION and '"model"' in shlex.join(flag).replace("'", '"'):
            left_out.append(f"{name}: the draft model's configuration is not here")
        elif name in plugged or name in PLUGINS.values():
            left_out.append(f"{name}: the code of a plugin is not run")
        elif name not in _NOT_ASKED and _value(flag, name) != _RAY:
            if names_code(flag):
                left_out.append(f"{name}: {WHY}")
            else:
                words.append(flag)
    return words, tuple(left_out)


def _value(flag: Words, name: str) -> Words:
    _, equals, value = flag[0].partition("=")
    return (name, value) if equals else (name, *flag[1:])


def _asked(
    model: str, question: Question, words: Sequence[Words], ask: Ask, *, general: bool = False,
    sure: bool = True, fits: bool = True,
) -> Asked | None:  # fmt: skip
    """Ask, and again without each setting that is refused; None: the configuration is not here."""
    refused: list[Refused] = []
    left_out: list[str] = []
    without: list[Words] = []
    flags = list(words)
    ranks: list[Words] = []
    answer: Preflight | None = None
    for _ in range(_MOST):
        request = _request(model, question, [*flags, *ranks], fits=fits)
        latest = _answer_beyond_estimates(ask, request, left_out)
        answer = latest or answer
        if latest is not None and latest.starts == "not run" and (_CODE,) in flags:
            flags.remove((_CODE,))  # the release may have the classes itself
            left_out.append(f"{_CODE}: the code of a checkpoint is not run")
            continue
        if latest is None or latest.starts != "no" or latest.refusal is None:
            break
        refusal = latest.refusal
        if more := _MORE_GPUS.search(refusal.message):
            if ranks or any(name_of(flag) == "--nnodes" for flag in flags):
                break
            ranks = [("--nnodes", more[1]), ("--node-rank", "0")]
            continue
        culprits = _culprits(latest, flags)
        without += [] if is_general(refusal) or (sure and not general) else culprits
        if general and not is_general(refusal):
            left_out += [f"{' '.join(flag)}: depends on the model" for flag in culprits]
        else:
            certain = sure or is_general(refusal)
            refused += [
                Refused(flag=one, sentence=_sentence(refusal), where=refusal.where, sure=certain)
                for one in culprits or [()]
            ]
        if not culprits:
            break
        flags = [flag for flag in flags if flag not in culprits]
        if any(name_of(flag) in _RANKS for flag in culprits):
            ranks = []  # without it they are fewer
    left_out += _other_ranks(question, ranks)
    if answer is None:
        return None
    return Asked(
        refused=tuple(refused), answer=answer, without=tuple(without), left_out=tuple(left_out)
    )


def _answer_beyond_estimates(
    ask: Ask, request: PreflightRequest, left_out: list[str]
) -> Preflight | None:
    """What a release says; of memory only what does not depend on the estimate of activations."""
    answer = _answer(ask, request)
    refusal = answer.refusal if answer else None
    memory = answer.memory if answer else None
    if refusal is None or refusal.stage != "memory" or memory is None or surely_too_large(memory):
        return answer
    text = f"{sentence(refusal)} (activations and graphs are an estimate)"
    left_out += [] if text in left_out else [text]
    return _answer(ask, dataclasses.replace(request, fits=False))


def _sentence(refusal: Refusal) -> str:
    """What is wrong with one flag: a parser names all that it does not know at once."""
    if refusal.stage == "arguments" and "unrecognized arguments" in refusal.message:
        return "unrecognized argument"
    return sentence(refusal)


def _answer(ask: Ask, request: PreflightRequest) -> Preflight | None:
    """What a release says, and of a refusal what cures it; None: the configuration is not here.

    A cure costs a question for each flag, so none is looked for where a parser names the flag, or
    where more ranks are the cure.
    """
    try:
        answer = ask(request)
    except (RemoteError, UsageError):
        return None
    refusal = answer.refusal
    if refusal is None or refusal.stage == "arguments" or _MORE_GPUS.search(refusal.message):
        return answer
    return ask(dataclasses.replace(request, cures=True))


def _other_ranks(question: Question, ranks: Sequence[Words]) -> Iterator[str]:
    """What was not asked of a server with several ranks: a simulated Spark has one GPU."""
    if ranks and not question.joined:
        flags = question.flags
        joined = any(name_of(f) in _JOINED or _value(f, name_of(f)) == _RAY for f in flags)
        what = "the other ranks" if joined else "several GPUs in one machine"
        yield f"{what}; it was rank 0 of {ranks[0][1]} machines with one GPU each"


def _request(
    model: str, question: Question, flags: Sequence[Words], *, fits: bool
) -> PreflightRequest:
    return PreflightRequest(
        model=model,
        plan=PlanOptions(base=question.base, layers=question.layers),
        flags=tuple(word for flag in flags for word in flag),
        add_flags=False,  # the command is asked about as it is
        cures=False,
        fits=fits,
        variables=[f"{name}={value}" for name, value in question.variables.items()],
    )


def _culprits(answer: Preflight, flags: Sequence[Words]) -> list[Words]:
    """The flags that a release refuses: those it names, or the one without which it starts."""
    assert answer.refusal is not None
    message = answer.refusal.message
    if answer.refusal.stage == "arguments":
        names = {canonical(name) for name in re.findall(r"-[-\w.]*\w", message)}
        spelled = [flag for flag in flags if {flag[0], name_of(flag)} & names]
        if spelled:
            return spelled if "unrecognized" in message else spelled[:1]
    for cure in answer.cures:
        out = [flag for flag in flags if not _is_in(flag, cure.flags)]
        if len(out) == 1:
            return out
    longest = sorted(flags, key=lambda flag: -len(flag[0]))
    fields = {flag: name_of(flag).lstrip("-").replace("-", "_") for flag in flags}
    return [f for f in longest if name_of(f) in message or f"{fields[f]} " in f"{message} "
            or f"{fields[f]}=" in message][:1]  # fmt: skip


def _is_in(flag: Words, words: Sequence[str]) -> bool:
    """Whether a flag with its values is among words."""
    return any(tuple(words[at : at + len(flag)]) == flag for at in _places(flag[0], words))


def _places(word: str, words: Sequence[str]) -> Iterator[int]:
    return (at for at, one in enumerate(words) if one == word)


# ----------------------------------------------------------------------------------------- a recipe


OTHER = ("--profile", "marlin")
#: They read the tokenizer, which is not here; ``recipe_of`` takes names that the release has.
_PARSERS = {REASONING_FLAG, *PLUGINS, TOOL_FLAG, TOOL_CHOICE}


class RecipeRefused(SparkBuildError):
    """A release refuses a recipe."""


def asked_recipe(request: RecipeRequest, recipe: Recipe, ask: Ask = preflight) -> Recipe:
    """The recipe, with what its release chose for the model.

    Raises:
        RecipeRefused: the release refuses it (exit 5).
        SparkBuildError: the image or the layers cannot be read.
    """
    asked = ask_release(question_of(request, recipe), _known(request), ask)
    vllm = f"vLLM {recipe.vllm}"
    if any(one.sure for one in asked.refused):
        refuse(recipe, asked)
    if asked.assumed:
        console.warn(f"{vllm} was asked about {asked.assumed}: {recipe.model}'s own is not here")
    for one in asked.refused:
        what = " ".join(one.flag) or "this model"
        console.warn(f"with that, {vllm} refuses {what}: {one.sentence}")
    for text in asked.left_out:
        console.warn(f"{vllm} was not asked: {text}")
    if not asked.starts or not asked.own or asked.answer is None:
        return recipe
    chosen = _kernels(asked.answer)
    words = "; ".join(f"{name} {', '.join(one)}" for name, one in chosen.items() if one)
    note = f"{vllm} builds the model with these settings, on a simulated GB10: {words}"
    recipe = replace(recipe, notes=(*recipe.notes, note))
    return _unpatched(request, recipe, chosen, ask) or recipe


def _kernels(answer: Preflight) -> dict[str, tuple[str, ...]]:
    """The kernels of a model by kind of layer."""
    chosen = in_short("", answer)
    return {
        "linear layers": chosen.linear, "experts": chosen.experts, "attention": chosen.attention,
    }  # fmt: skip


def _unpatched(
    request: RecipeRequest, recipe: Recipe, chosen: Mapping[str, tuple[str, ...]], ask: Ask
) -> Recipe | None:
    """The recipe on the official image, if the profile's changes give this model nothing.

    None of its kernels is changed, and the release as it is selects the same ones.
    """
    changed = request.served.changed
    if not (recipe.image.build and changed) or request.served.named_image:
        return None
    for layer in changed:
        concern = CONCERNS.get(layer)
        kernels = concern.kernels if concern else ("", "")
        named = chosen.get(kernels[0], ("any",)) if kernels else ()
        if kernels and any(re.search(kernels[1], kernel) for kernel in named):
            return None
    official = RecipeImage(ref=official_image(recipe.vllm))
    plain = replace(recipe, image=official)
    asked = ask_release(question_of(request, plain), _known(request), ask)
    if not asked.starts or asked.answer is None or _kernels(asked.answer) != chosen:
        return None
    note = (
        f"{recipe.profile} changes files on vLLM {recipe.vllm} ({', '.join(changed)}), and this "
        "model gets the same kernels without: the official image serves the same"
    )
    return replace(plain, notes=(*plain.notes, note))


def question_of(request: RecipeRequest, recipe: Recipe) -> Question:
    """The recipe's first node as a question: on its image, or on the release that it is made from.

    A patched image is one with the profile's layers; the official one has none.
    """
    node = recipe.nodes[0]
    named = request.served.named_image and not request.served.unread
    patched = request.served.unread or bool(recipe.image.build or recipe.image.mod)
    return Question(
        model=str(request.checkpoint or recipe.id),
        base=recipe.image.ref if named else release_base(recipe.vllm),
        layers=(recipe.profile,) if patched and not named else (),
        flags=tuple(f.words for f in (*recipe.flags, *node.flags) if f.name not in _PARSERS),
        variables=recipe.variables(node),
        joined=node_count(recipe.topology) > 1,
    )


def _known(request: RecipeRequest) -> Model | None:
    return None if request.checkpoint is not None else request.model


def refuse(recipe: Recipe, asked: Asked) -> None:
    """Refuse a recipe in the release's words.

    Raises:
        RecipeRefused: always.
    """
    one = next(one for one in asked.refused if one.sure)
    what = " ".join(one.flag) or "the model"
    where = f" ({one.where})" if one.where else ""
    hint = again(*(("--set", f"{one.flag[0].removeprefix('--')}=") if one.flag else OTHER))
    text = f"vLLM {recipe.vllm} refuses {what} for {recipe.model}: {one.sentence}{where}"
    raise RecipeRefused(text, Exit.VERIFY_FAILED, hint=hint)
