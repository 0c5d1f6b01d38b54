"""What "How to add a ..." in ``docs/architecture.md`` says is enough, shown with toys.

Each toy comes from here, through the one place that the page names, and a real command uses it.
A toy kind of base is in ``bases/test_kinds.py``.  Ops are a closed union: of those, the list itself
is checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.applier.layers import FORMS
from builder.applier.ops import Ops
from builder.applier.values import sha256_hex
from builder.common.reference import Ref
from builder.images.engines.choice import ENGINES, EngineKind
from builder.images.engines.metadata import image_layers
from builder.images.engines.model import BuildRequest, BuiltImage, refuses_base
from builder.layers.layerfile import OPS, _Reader
from builder.proof.checks import LEVELS, Check, LevelKind
from builder.proof.run import RUNNERS
from tests.unit.fakes import layer_text, write_tree
from tests.unit.imagefiles import put_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.common.diskspace import Need
    from builder.common.plan import BuildPlan
    from builder.proof.target import VerifyTarget
    from tests.unit.caller import Call

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")

# ---------------------------------------------------------------------------------------- an engine


@dataclass
class ToyEngine:
    """Writes a list of the files that an image would have more."""

    builder: str
    name: str = "toy"

    def missing(self) -> str | None:
        return None

    def refuses(self, plan: BuildPlan) -> str | None:
        return refuses_base(plan)

    def render(self, plan: BuildPlan) -> str:
        return f"TOY {plan.name}\n"

    def needs(self, request: BuildRequest) -> list[Need]:
        return []

    def build(self, request: BuildRequest) -> BuiltImage:
        assert request.output is not None
        rows = [path for _, files in image_layers(request.plan) for path in files]
        text = "\n".join(sorted(rows))
        request.output.mkdir()
        (request.output / "files").write_text(text)
        digest = f"sha256:{sha256_hex(text.encode())}"
        return BuiltImage(
            ref=Ref(str(request.output)), digest=digest, added_bytes=0, engine=self.name
        )


@pytest.fixture
def image(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The command that builds with it."""
    toy = EngineKind(name="toy", make=ToyEngine, writes_manifests=True)
    monkeypatch.setitem(ENGINES, "toy", toy)
    put_vllm(tmp_path / "base")
    base = f"oci:{tmp_path}/base"
    return ("image", "-l", "fix", "-b", base, "--engine", "toy", "--no-verify")


def test_an_engine_is_one_module_and_one_row(
    call: Call, image: tuple[str, ...], tmp_path: Path
) -> None:
    done = call(*image, "-o", "oci:out")
    assert done.code == 0, done.err
    assert "build with toy" in done.err
    assert "vllm/core.py" in (tmp_path / "work" / "out" / "files").read_text()
    assert done.out.splitlines()[-1].startswith("out@sha256:")
    assert "TOY " in call(*image, "--print-dockerfile").out


def test_options_are_checked_by_what_an_engine_can_do(
    call: Call, image: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = call(*image, "--builder", "spark")
    assert (refused.code, "toy engine" in refused.err) == (2, True)
    assert call(*image, "--thin", "-o", "oci:thin").code == 0
    less = EngineKind(name="toy", make=ToyEngine, through_docker=True, has_builders=True)
    monkeypatch.setitem(ENGINES, "toy", less)
    assert "--thin applies" in call(*image, "--thin", "-o", "docker").err
    assert "is not an output of the toy engine" in call(*image, "-o", "oci:x").err
    assert "--single-layer is for" in call(*image, "--single-layer").err
    assert "the toy engine builds for one" in call(*image, "--all-platforms").err


def test_an_engine_that_is_not_in_the_table_is_unknown(
    call: Call, image: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ENGINES, "toy")
    refused = call(*image)
    assert (refused.code, "unknown engine 'toy'" in refused.err) == (2, True)


# ------------------------------------------------------------------------------------------ a level


def check_toy(target: VerifyTarget) -> Iterator[Check]:
    """Whether the new text is there."""
    there = "b12x" in target.tree.read("vllm/core.py").decode()  # type: ignore[union-attr]
    yield Check(
        level="toy",  # type: ignore[arg-type]
        name="a new word",
        status="pass" if there else "fail",
        expected="b12x",
        seen="b12x" if there else "no such word",
        where="vllm/core.py",
    )


@pytest.fixture
def toy_level(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = LevelKind(
        name="toy",  # type: ignore[arg-type]
        about="A toy.",
        unknown="whether the word is there",
        known="the word is there",
    )
    monkeypatch.setitem(LEVELS, "toy", toy)
    monkeypatch.setitem(RUNNERS, "toy", check_toy)


@pytest.mark.usefixtures("toy_level")
def test_a_level_is_one_module_and_two_rows(call: Call, site: Path, tmp_path: Path) -> None:
    """It fails before the layer is applied, and is in the verdict and the page after."""
    verify = ("verify", f"dir:{site}", "-l", "fix", "--level", "toy")
    failed = call(*verify)
    assert failed.code == 5
    assert "a check failed:\n  toy a new word: no such word" in failed.err
    assert call("apply", site, "-l", "fix").code == 0
    page = tmp_path / "page.html"
    passed = call(*verify, "--html", page)
    assert passed.code == 0, passed.err
    assert "the word is there" in passed.out + passed.err
    assert "A toy." in page.read_text()
    assert call("revert", site, "-l", "fix").code == 0
    assert call(*verify).code == 5


def test_a_level_that_is_not_in_the_table_is_unknown(call: Call, site: Path) -> None:
    refused = call("verify", f"dir:{site}", "-l", "fix", "--level", "toy")
    assert (refused.code, "unknown verification level 'toy'" in refused.err) == (2, True)


def test_every_level_has_a_function_and_a_name_in_documents() -> None:
    from typing import get_args

    from builder.proof.checks import Level

    assert list(LEVELS) == list(RUNNERS) == list(get_args(Level))


# ------------------------------------------------------------------------------------------ a layer


def test_a_layer_is_one_folder(call: Call, site: Path, tmp_path: Path) -> None:
    text = layer_text('op = "copy"\nfrom = "toy.py"\nto = "vllm/toy.py"')
    write_tree(
        tmp_path / "mine", {"my-toy/layer.toml": text.encode(), "my-toy/toy.py": b"TOY = 1\n"}
    )
    words = ("-l", "my-toy", "--patches", tmp_path / "mine")
    done = call("apply", site, *words)
    assert done.code == 0, done.err
    assert (site / "vllm" / "toy.py").read_bytes() == b"TOY = 1\n"
    assert call("verify", f"dir:{site}", "--level", "static", *words).code == 0
    (site / "vllm" / "toy.py").write_bytes(b"TOY = 2\n")
    assert call("verify", f"dir:{site}", "--level", "static", *words).code == 5
    (site / "vllm" / "toy.py").write_bytes(b"TOY = 1\n")
    assert call("revert", site, *words).code == 0
    assert not (site / "vllm" / "toy.py").exists()


# ------------------------------------------------------------------------------------------- an op


@pytest.mark.parametrize("kind", FORMS)
def test_an_op_is_in_every_file_of_its_list(kind: str) -> None:
    rows = (ROOT / "docs" / "layers.md").read_text("utf-8")
    assert kind in OPS
    assert callable(getattr(Ops, f"op_{kind}"))
    assert callable(getattr(_Reader, f"op_{kind}"))
    assert f"\n| `{kind}` |" in rows


def test_an_op_that_is_in_no_file_is_unknown(call: Call, site: Path, tmp_path: Path) -> None:
    assert set(OPS) == set(FORMS)
    text = layer_text('op = "toy"')
    write_tree(tmp_path / "mine", {"my-toy/layer.toml": text.encode()})
    refused = call("apply", site, "-l", "my-toy", "--patches", tmp_path / "mine")
    assert (refused.code, "unknown op 'toy'" in refused.err) == (2, True)


# ---------------------------------------------------------------------------------------- the lists


def listed(thing: str) -> list[str]:
    """The files of a numbered list in the page."""
    section = PAGE.partition(f"## How to add {thing}\n")[2].partition("\n## ")[0]
    return re.findall(r"(?m)^\d\. `(builder/[\w/.]+)`", section)


@pytest.mark.parametrize(
    ("thing", "most"),
    [("a verification level", 3), ("a kind of base", 3), ("an engine", 3), ("an op", 4)],
)
def test_a_list_is_short(thing: str, most: int) -> None:
    """A layer is one folder, and has no list."""
    assert 0 < len(listed(thing)) <= most
    assert listed("a layer") == []


# ---------------------------------------------------------------------------------- no string tests

#: A module that compares the name of an engine with a word, as ``options.engine == "oci"``.
COMPARED = re.compile(r"\bengine *(?:==|!=|in|not in) *\(?\"(?:auto|buildkit|oci)\"")


@pytest.mark.parametrize("source", ['options.engine == "oci"', 'engine in ("buildkit", "oci")'])
def test_a_comparison_of_engines_is_seen(source: str) -> None:
    assert COMPARED.search(source)


def test_no_module_compares_the_name_of_an_engine() -> None:
    packages = ("compile", "images", "layers", "pipeline", "publishing", "proof")
    assert all((ROOT / "builder" / package).is_dir() for package in packages)
    for package in packages:
        for path in (ROOT / "builder" / package).rglob("*.py"):
            assert not COMPARED.search(path.read_text("utf-8")), path
