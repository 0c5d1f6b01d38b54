"""A new kind of base is one row of capabilities: whoever would tell wheels from images asks it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import builder
from builder.common.reference import KINDS, BaseKind, schemes
from builder.images.bases.identify import IDENTIFIERS
from builder.images.engines.buildkit import BuildkitEngine
from builder.images.engines.oci import OciEngine, read_layout
from tests.unit.fakes import copy_op, fake_base, make_layer, make_plan_of, vllm_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.common.plan import BuildPlan
    from builder.images.subject import BaseRequest, Subject
    from tests.unit.caller import Call

#: A module that compares a kind of base with a word, as ``base.kind == "pypi"``.
COMPARED = re.compile(r"\b(?:base|identity)(?:\.kind|\[\"kind\"\]) *(?:==|!=|in|not in) ")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseKind], BuildPlan]:
    """A plan on a base of a kind that nothing else knows."""

    def made(kind: BaseKind) -> BuildPlan:
        monkeypatch.setitem(KINDS, kind.name, kind)
        base = fake_base(vllm_files(), kind=kind.name)
        return make_plan_of(base, make_layer("fix", copy_op("vllm/new.py", b"NEW = 1\n")))

    return made


@pytest.mark.parametrize("engine", [OciEngine(), BuildkitEngine()], ids=lambda e: e.name)
def test_engines_use_the_capabilities_of_a_kind(
    toy: Callable[[BaseKind], BuildPlan], engine: OciEngine | BuildkitEngine
) -> None:
    assert engine.refuses(toy(BaseKind(name="toy", is_image=True))) is None
    assert engine.refuses(toy(BaseKind(name="toy", is_wheels=True))) is None
    refused = "a toy base is not an image; use spark-build apply"
    assert engine.refuses(toy(BaseKind(name="toy", is_installed=True))) == refused
    assert engine.refuses(toy(BaseKind(name="toy"))) == refused


def test_a_kind_is_one_module_and_two_rows(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wheels of a toy's own are built into an overlay, and options are refused by what it is."""
    asked: list[str] = []

    def identify_toy(_request: BaseRequest, rest: str) -> Subject:
        asked.append(rest)
        return fake_base(vllm_files(), kind="toy")

    words = ("image", "-l", "fix", "-b", "toy:box", "--engine", "oci", "--no-verify")
    assert call(*words).code != 0
    monkeypatch.setitem(KINDS, "toy", BaseKind(name="toy", schemes=("toy",), is_wheels=True))
    monkeypatch.setitem(IDENTIFIERS, "toy", identify_toy)
    done = call(*words, "-o", "oci:out")
    assert (done.code, asked) == (0, ["box"]), done.err
    _, files, _ = read_layout(tmp_path / "work" / "out", "")
    assert any(path.endswith("/vllm/core.py") for path in files)
    assert "released wheels have none" in call(*words, "--thin", "-o", "oci:thin").err
    monkeypatch.setitem(KINDS, "toy", BaseKind(name="toy", schemes=("toy",), is_installed=True))
    assert "is not an image; use spark-build apply" in call(*words, "-o", "oci:other").err
    assert "--python" in call("plan", "-l", "fix", "-b", "toy:box", "--python", "3.12").err


def test_every_scheme_is_identified() -> None:
    assert set(IDENTIFIERS) == set(schemes())


def test_a_plan_on_an_environment_has_no_local_path(
    toy: Callable[[BaseKind], BuildPlan],
) -> None:
    assert "site_packages" in toy(BaseKind(name="toy", is_image=True)).body()["base"]
    assert "site_packages" not in toy(BaseKind(name="toy", is_installed=True)).body()["base"]


@pytest.mark.parametrize(
    "source",
    ['if plan.base.kind == "pypi":', 'identity.kind != "dir"', 'base["kind"] in ("image",)'],
)
def test_a_comparison_is_detected(source: str) -> None:
    assert COMPARED.search(source)


def test_no_module_compares_the_name_of_a_kind() -> None:
    for path in Path(builder.__file__).parent.rglob("*.py"):
        assert not COMPARED.search(path.read_text("utf-8")), path
