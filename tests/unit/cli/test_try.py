"""The ``try:`` line of an error can be run: it has the user's own arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.registry.refhints import intended_reference
from builder.util.hints import running
from tests.unit.cli.test_cli import FIX
from tests.unit.fakes import vllm_files, write_tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Called

    SparkBuild = Callable[..., Called]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a layer, and a space in its name."""
    write_tree(tmp_path / "my layers", {"fix/layer.toml": FIX.encode()})
    return tmp_path / "my layers"


def tried(result: Called) -> str:
    """What the error says to try."""
    (line,) = [line for line in result.err.splitlines() if line.startswith("  try: ")]
    return line.removeprefix("  try: ")


def test_an_option_completes_the_user_s_own_command(spark_build: SparkBuild, own: Path) -> None:
    result = spark_build("plan", "-l", "fix", "--patches", own)
    assert tried(result) == f"spark-build plan -l fix --patches '{own}' --base pypi:vllm==0.20.1"
    result = spark_build("image", "-l", "b12x-full", "-b", "pypi:vllm==0.20.1", "--push")
    assert tried(result).endswith("-b pypi:vllm==0.20.1 --push --tag HOST/NAME:TAG")


def test_value_of_an_option_keeps_its_commas(spark_build: SparkBuild) -> None:
    result = spark_build("bench", "http://localhost:1", "--concurrency", "0")
    assert tried(result) == "spark-build bench http://localhost:1 --concurrency 1,2,4,8,16"


def test_another_command_has_the_user_s_layers(spark_build: SparkBuild, own: Path) -> None:
    result = spark_build("layers", "show", "nope", "--patches", own)
    assert tried(result) == f"spark-build layers list --patches '{own}'"
    result = spark_build("plan", "-l", "nope", f"--patches={own}", "-b", "pypi:vllm==0.20.1")
    assert tried(result) == f"spark-build layers list --patches '{own}'"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("verify", "dir:nowhere"), "spark-build verify --help"),
        (("cache", "prune", "--older-than", "x"), "spark-build cache prune --help"),
        (("imgae",), "spark-build --help"),
    ],
)
def test_every_error_has_a_hint(spark_build: SparkBuild, words: tuple[str, ...], said: str) -> None:
    assert tried(spark_build(*words)) == said


def test_folders_and_releases_are_not_images(
    spark_build: SparkBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    write_tree(work / "out put", {"index.json": b"{}", "oci-layout": b"{}"})
    write_tree(work / "env" / "lib" / "python3.12" / "site-packages", vllm_files())
    (work / "vllm").mkdir()
    monkeypatch.chdir(work)
    result = spark_build("verify", "out put", "--level", "static")
    assert result.code == 2
    assert "did you mean 'oci:out put'?" in result.err
    assert tried(result) == "spark-build verify 'oci:out put' --level static"
    result = spark_build("plan", "-l", "b12x-full", "--base=0.20.1")
    assert tried(result) == "spark-build plan -l b12x-full --base=pypi:vllm==0.20.1"
    result = spark_build("publish", "out put", "--to", "localhost:1/x")
    assert tried(result) == "spark-build publish 'oci:out put' --to localhost:1/x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.20.1", "pypi:vllm==0.20.1"),
        ("v0.20.1", "pypi:vllm==0.20.1"),
        ("0.20.1rc1", "pypi:vllm==0.20.1rc1"),
        ("vllm==0.20.1", "pypi:vllm==0.20.1"),
        ("vllm[b12x]==0.33.0", "pypi:vllm[b12x]==0.33.0"),
        ("vllm/vllm-openai:v0.20.1", ""),
        ("registry.local:5000/vllm", ""),
        ("ubuntu", ""),
    ],
)
def test_suggested_reference(text: str, said: str) -> None:
    assert intended_reference(text) == said


def test_a_folder_can_have_the_name_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vllm").mkdir()
    running([])
    assert intended_reference("vllm") == ""
