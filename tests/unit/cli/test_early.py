"""Wrong options are said before anything is asked or fetched; those without effect are errors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from builder.pipeline.pins import _both
from tests.unit.cli.test_cli import FIX
from tests.unit.fakes import vllm_files, write_tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Called

    SparkBuild = Callable[..., Called]

IMAGE = ("image", "-l", "fix", "-b", "docker://registry.invalid/vllm:1")
WHEELS = ("image", "-l", "fix", "-b", "pypi:vllm==0.20.1")
VERIFY = ("verify", "docker://registry.invalid/vllm:1", "-l", "fix")


@pytest.fixture(autouse=True)
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one layer."""
    write_tree(tmp_path / "patches", {"fix/layer.toml": FIX.encode()})
    monkeypatch.setenv("SPARK_BUILD_PATCHES", str(tmp_path / "patches"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    return tmp_path / "patches"


@pytest.fixture(autouse=True)
def nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package index and no engine: asking one of them is another error (6 or 8)."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid/simple")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*IMAGE, "-o", "somewhere"), "is not docker, oci:DIR or registry"),
        ((*IMAGE, "-o", "oci:../file"), "is not a folder"),
        ((*IMAGE, "-o", "oci:../full"), "is not an OCI layout"),
        ((*IMAGE, "-t", "UPPER CASE"), "is not an image name"),
        ((*IMAGE, "--push"), "no destination to push to"),
        ((*IMAGE, "-o", "registry"), "no destination to push to"),
        ((*IMAGE, "--push", "-t", "host/x:1", "-o", "oci:out"), "two places"),
        ((*IMAGE, "--engine", "okay"), "unknown engine"),
        ((*IMAGE, "--engine", "buildkt"), "did you mean 'buildkit'?"),
        ((*IMAGE, "--thin", "--push", "-t", "host/x:1"), "--thin applies to an OCI layout"),
        ((*IMAGE, "--single-layer", "--engine", "buildkit"), "--single-layer is for the oci"),
        ((*IMAGE, "--python", "3.12"), "--python applies only to a pypi: base"),
        ((*IMAGE, "--site-packages", "/x"), "--site-packages applies only to a pypi: base"),
        ((*WHEELS, "--thin"), "released wheels have none"),
        ((*VERIFY, "--html", "../full"), "Is a directory"),
        ((*VERIFY, "--html", "../file/x.html"), "Not a directory"),
        ((*VERIFY, "--summary", "../file/x/y.md"), "Not a directory"),
        ((*VERIFY, "--bench"), "--bench is for the level serve"),
        ((*VERIFY, "--model", "x", "--level", "static"), "--model is for the level model or serve"),
        (("matrix", "-l", "fix", "--evidence", "x"), "--evidence needs --dispatch"),
    ],
    ids=lambda value: " ".join(value[5:]) if isinstance(value, tuple) else "",
)
def test_usage_errors_are_reported_first(
    spark_build: SparkBuild, words: tuple[str, ...], said: str
) -> None:
    result = spark_build(*words)
    assert result.code == 2, result.err
    assert said in result.err
    assert "  try: spark-build" in result.err or "  try: " in result.err


def test_an_unwritable_html_file(
    spark_build: SparkBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    result = spark_build(*VERIFY, "--html", tmp_path / "a" / "page.html")
    assert result.code == 2
    assert f"ls -ld {tmp_path}" in result.err


# --------------------------------------------------------------------------------- layers of a user


def test_a_layer_that_replaces_a_built_in_one(spark_build: SparkBuild, layers: Path) -> None:
    write_tree(layers, {"marlin-env/layer.toml": FIX.encode()})
    said = f"warning: layer marlin-env is {layers}/marlin-env, in place of the built-in one"
    for words in (
        ("layers", "list"),
        ("layers", "check"),
        ("layers", "show", "marlin-env"),
        ("mods", "export", "mine", "-l", "marlin", "--in", "mods"),
    ):
        assert said in spark_build(*words).err, words
    assert "in place of" not in spark_build("layers", "show", "fix").err


VARIANT = FIX[FIX.index("[[variant]]") :]


def variant(name: str, ranges: str) -> str:
    """Another variant of the layer, for other versions."""
    text = VARIANT.replace('name = "only"', f'name = "{name}"')
    return text.replace(">=0.20.0,<0.30.0rc0", ranges)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (">=0.20.0,<0.30.0rc0", ">=0.30.0rc0", False),
        (">=0.20.0,<0.30.0rc0", ">=0.29.0", True),
        ("==0.20.1", ">=0.20.0,<0.21.0rc0", True),
        ("==0.20.*", ">=0.20.5", True),
        ("<=0.20.1", ">=0.20.1", True),
        ("<0.20.1", ">0.20.1", False),
        (">=0.20.0", ">=0.10.0", True),
        (">=0.20.0,!=0.20.1,<0.20.2rc0", "==0.20.1", False),
    ],
)
def test_ranges_that_overlap(one: str, other: str, both: bool) -> None:
    assert bool(_both({"vllm": one}, {"vllm": other})) is both
    assert bool(_both({"vllm": other}, {"vllm": one})) is both


def test_ranges_of_other_packages_distinguish_variants() -> None:
    assert not _both({"vllm": ">=1", "x": "<2"}, {"vllm": ">=1", "x": ">=2"})
    assert _both({"vllm": ">=1"}, {"x": ">=2"}) == {"vllm": "1", "x": "2"}


def test_check_refuses_variants_that_overlap(spark_build: SparkBuild, layers: Path) -> None:
    good = FIX + variant("later", ">=0.30.0rc0")
    write_tree(layers, {"two/layer.toml": good.encode()})
    assert spark_build("layers", "check", "two").code == 0
    write_tree(layers, {"two/layer.toml": good.replace(">=0.30.0rc0", ">=0.29.0").encode()})
    result = spark_build("layers", "check", "two")
    assert result.code == 2
    assert "variants 'only' and 'later' overlap: both match a base with vllm 0.2" in result.err


WHEEL = """\
op = "wheel"
distribution = "tiny"
version = "1.0"
"""


def test_check_refuses_a_wheel_without_a_pin(spark_build: SparkBuild, layers: Path) -> None:
    text = FIX.partition('op = "replace"')[0] + WHEEL
    write_tree(layers, {"wheels/layer.toml": text.encode()})
    result = spark_build("layers", "check", "wheels")
    assert result.code == 2
    assert "layer wheels: tiny 1.0 is not pinned" in result.err
    assert "try: spark-build layers pin wheels" in result.err


@pytest.mark.parametrize("name", ["Upper", "a b", "-x", "b12x-full"])
def test_check_refuses_an_invalid_folder_name(
    spark_build: SparkBuild, layers: Path, name: str
) -> None:
    write_tree(layers, {f"{name}/layer.toml": FIX.encode()})
    result = spark_build("layers", "check")
    assert result.code == 2
    assert name in result.err
    assert "rename the folder" in result.err
    assert spark_build("layers", "new", name.replace("-x", "_x"), "--in", layers.parent).code == 2


def test_site_packages_of_an_image_is_refused_for_other_bases(
    spark_build: SparkBuild, tmp_path: Path
) -> None:
    write_tree(tmp_path / "site", vllm_files())
    result = spark_build("plan", "-l", "fix", "-b", tmp_path / "site", "--python", "3.12")
    assert result.code == 2
