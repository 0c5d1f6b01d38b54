"""A new kind of base is one row of capabilities: whoever would tell wheels from images asks it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import builder
from builder.engines.buildkit import BuildkitEngine
from builder.engines.oci import OciEngine
from builder.model.base import KINDS, BaseKind
from tests.unit.fakes import copy_op, fake_base, make_layer, make_plan_of, vllm_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.model.plan import BuildPlan

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
