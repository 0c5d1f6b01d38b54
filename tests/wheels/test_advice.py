"""No advice of ``lint`` and ``diagnose`` is refused by the parser of a release that it is for.

What is read of a release is what its own parser says (``test_serveflags.py``).  A word behind a
flag counts as its value if a release has such a value; else it is prose.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.common.document import plain
from builder.diagnose.entries import load_entries
from builder.errors import NotServed
from builder.proof.recorded import Outcome, read_records
from builder.serving.lint import Linter, lint
from builder.serving.models import Models
from builder.serving.release import patched_interface
from builder.serving.serveflags import interface_of_wheels, replaced

from .test_serveflags import ALL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.proof.recorded import Record
    from builder.serving.serveflags import ServeInterface

_FLAG = re.compile(r"(?<![\w-])(--[a-z][\w-]*)(?:[ =]([\w.]+))?")
#: Models whose layers are known, and one whose are not.
_MODELS = ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "nvidia/Qwen3.6-35B-A3B-NVFP4",
           "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V4-Flash", "me/other")  # fmt: skip


@cache
def read(release: str) -> ServeInterface:
    return interface_of_wheels(f"pypi:vllm=={release}")


@cache
def known_models() -> Models:
    return Models.discover()


@cache
def patched(release: str) -> ServeInterface:
    """With the profile that an advice has built into an image."""
    return patched_interface("b12x-full", f"pypi:vllm=={release}")


@cache
def values_anywhere(name: str) -> frozenset[str]:
    """The values that a flag has in some release."""
    flags = [flag for flag in (read(release).flag(name) for release in ALL) if flag]
    return frozenset(value for flag in flags for value in (*flag.choices, *flag.known))


@cache
def is_of_vllm(name: str) -> bool:
    """Whether a release has such a flag: others are of Docker, or of ours."""
    return any(name in flag.names for release in ALL for flag in read(release).flags)


def refused(text: str, release: str) -> Iterator[str]:
    """What of an advice a release does not take; one that names a later release is for that."""
    later = re.search(r"\buse (?:vLLM )?(\d+\.\d+\.\d+) or later", text)
    release = later[1] if later else release
    try:
        interface = patched(release) if "image -l b12x-full" in text else read(release)
    except NotServed as error:
        yield f"{release}: {error} in {text!r}"
        return
    for name, value in _FLAG.findall(text):
        if not is_of_vllm(name):
            continue
        given = value if value in values_anywhere(name) else None
        why = interface.refusal(name, given) if given else ""
        if interface.flag(name) is None:
            why = f"no flag {name}"
        if why:
            yield f"{release}: {why} in {text!r}"


def kinds_of(text: str, models: Models) -> frozenset[str]:
    """The kinds of layers of a command's model; of one that is not known, NVFP4's."""
    named = (models.model(name) for name in models.files)
    model = next((one for one in named if one.id.value in text), None)
    return frozenset(model.kinds()) if model else frozenset({"nvfp4-linear", "nvfp4-moe"})


@cache
def recorded() -> dict[str, Record]:
    """What each release selected and refused on a simulated GB10."""
    return {record.vllm: record for record in read_records(Path("docs/evidence"))}


def not_selected(text: str, release: str, kinds: frozenset[str]) -> Iterator[str]:
    """The backends in an advice that the release refused for one of these kinds of layers."""
    if "with an image with the profile" in text:
        return
    for name, value in re.findall(r"(--(?:linear|moe)-backend) (\w+)", text):
        kind_of = name[2:].partition("-")[0]
        for kind in (one for one in kinds if one.endswith(kind_of)):
            by_choice = recorded()[release].choices.get(kind, {})
            outcome = by_choice.get(f"{name} {value}")
            if isinstance(outcome, Outcome) and "refused" in plain(outcome):
                yield f"{release}: {name} {value} is refused for {kind} in {text!r}"


@pytest.mark.parametrize("release", ALL)
def test_fixes_of_diagnose_start(release: str) -> None:
    wrong: list[str] = []
    for entry in load_entries():
        if entry.engine != "vllm" or (entry.when and not entry.when.contains(release, True)):
            continue
        fix = entry.fix_for(release)
        wrong += (f"{entry.id}: {why}" for why in refused(fix, release) if fix)
    assert wrong == []


@pytest.mark.parametrize("release", ALL)
def test_help_of_lint_starts(release: str) -> None:
    """Of every variable that is gone, and of every name of a backend, for models of each kind."""
    env = [f"{one.name}={value}" for one in replaced().values() for value in (*one.values, "x")]
    backends = [f"--{kind}-backend b12x" for kind in ("linear", "moe")]
    texts = [f"{words} vllm serve {model}" for words in env for model in _MODELS[-1:]]
    texts += [f"vllm serve {model} {words}" for words in backends for model in _MODELS]
    linter, models = Linter(release=release), known_models()
    wrong: list[str] = []
    for text in texts:
        kinds = kinds_of(text, models)
        for one in lint([("x.sh", text)], linter, models).findings:
            wrong += refused(one.help, release)
            wrong += not_selected(one.help, release, kinds)
    assert wrong == []


def test_a_wrong_advice_is_found() -> None:
    first, last = ALL[0], ALL[-1]
    assert list(refused("use --linear-backend marlin", first))
    assert not list(refused("use --linear-backend marlin", last))
    assert list(refused("use --moe-backend flashinfer_b12x", first))
    assert list(not_selected("--moe-backend flashinfer_trtllm", last, frozenset({"nvfp4-moe"})))
    assert all(a != b for a, b in pairwise(ALL))
