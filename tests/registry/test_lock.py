"""The lock of an image in a real registry: a tag that moves, and the image that it named before."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.__main__ import run
from builder.common.reference import Ref
from builder.images.registry.copy import Locations, copy_image
from builder.images.registry.layout import LayoutDirectory
from tests.unit.fakes import write_tree
from tests.unit.imagefiles import folder, put_index, put_vllm

from .conftest import QUICK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from . import servers

LAYER = """\
summary = "a fix"
order = 50
package = "vllm"
provenance = { origin = "own", forwarded = "no", applied-upstream = "no", last-update = 2026-01-02 }

[[variant]]
name = "only"
when = { vllm = ">=0" }

[[variant.op]]
op = "env"
name = "VLLM_NVFP4_GEMM_BACKEND"
value = "marlin"
"""


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, Any, str]]:
    """Run a command on the tag; exit code, JSON and talk."""
    write_tree(tmp_path / "patches", {"fix/layer.toml": LAYER.encode()})
    monkeypatch.setenv("SPARK_BUILD_PATCHES", str(tmp_path / "patches"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def called(*words: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        code = run([*words, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return called


@pytest.fixture
def push(registry: servers.DockerRegistry, tmp_path: Path) -> Callable[[str], None]:
    """Put an image of vLLM, each time another one, behind the one tag."""

    def pushed(word: str) -> None:
        root = tmp_path / f"layout-{word}"
        image = put_vllm(root, items=[folder(f"opt/{word}/")], architecture="arm64")
        put_index(root, {"arm64": image}, "v1")
        with Locations(QUICK) as places:
            place = places.open(Ref(f"{registry.address}/{tmp_path.name.lower()}/vllm:v1"))
            copy_image(LayoutDirectory(root), "v1", place.image, place.reference)

    return pushed


def test_a_tag_that_moved(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    plan: Callable[..., tuple[int, Any, str]],
    push: Callable[[str], None],
) -> None:
    ref = f"docker://{registry.address}/{tmp_path.name.lower()}/vllm:v1"
    words = ("-l", "fix", "-b", ref)
    push("old")
    assert plan("lock", *words)[0] == 0
    code, old, _ = plan("plan", *words, "--locked")
    assert code == 0
    push("new")
    code, new, err = plan("plan", *words)
    assert code == 0
    assert new["base"]["digest"] != old["base"]["digest"]
    assert f"{ref} moved from {old['base']['digest'][:19]}" in err
    code, held, _ = plan("plan", *words, "--locked")
    assert (code, held["base"]["digest"]) == (0, old["base"]["digest"])
    assert plan("lock", "--check")[0] == 0
    assert plan("lock", "--upgrade")[0] == 0
    code, renewed, _ = plan("plan", *words, "--locked")
    assert (code, renewed["base"]["digest"]) == (0, new["base"]["digest"])
