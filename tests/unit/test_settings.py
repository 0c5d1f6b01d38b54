"""Environment variables: each is declared in one module, and read once for a command."""

from __future__ import annotations

import ast
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.conftest import Called

ROOT = Path(__file__).resolve().parents[2]
BUILDER = ROOT / "builder"
NAME = re.compile(r"SPARK_BUILD_[A-Z_]+")
#: What else may read the environment by these names: it runs without this package.
ALONE = ("probes", "applier", "bootstrap.py")
DECLARED = {variable.name for variable in settings.VARIABLES} | settings.HANDED_ON


def undeclared(text: str) -> set[str]:
    """Names of ours in a text that the settings do not have."""
    return set(NAME.findall(text)) - DECLARED


def test_every_name_is_declared() -> None:
    places = [BUILDER, ROOT / "docs", ROOT / "dockerfiles", ROOT / "patches", ROOT / ".github"]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    files += [ROOT / "action.yml", *ROOT.glob("*.md")]
    for file in files:
        if "__pycache__" not in file.parts:
            assert undeclared(file.read_text("utf-8", "replace")) == set(), file


def test_an_undeclared_name_is_detected() -> None:
    assert undeclared("SPARK_BUILD_CACHE, SPARK_BUILD_CAHCE") == {"SPARK_BUILD_CAHCE"}


def reads(source: str) -> Iterator[str]:
    """The declared variables that a module names in a call or an index, to read them itself."""
    for node in ast.walk(ast.parse(source)):
        words = node.args if isinstance(node, ast.Call) else []
        words = [node.slice] if isinstance(node, ast.Subscript) else words
        words = [node.left] if isinstance(node, ast.Compare) else words
        for word in words:
            if isinstance(word, ast.Constant) and word.value in DECLARED - settings.HANDED_ON:
                yield str(word.value)


def test_no_other_module_reads_them() -> None:
    for path in BUILDER.rglob("*.py"):
        place = path.relative_to(BUILDER).parts[0]
        source = path.read_text("utf-8")
        if place not in (*ALONE, "settings.py") and any(name in source for name in DECLARED):
            assert list(reads(source)) == [], path


@pytest.mark.parametrize(
    "source",
    [
        "os.environ.get('SPARK_BUILD_CACHE')", "os.getenv('DOCKER_HOST', '')",
        "os.environ['GH_TOKEN']", "'SPARK_BUILD_TORCH' in os.environ",
    ],
)  # fmt: skip
def test_a_module_that_reads_a_variable_is_detected(source: str) -> None:
    assert len(list(reads(source))) == 1


def test_a_command_keeps_its_initial_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_BUILD_TORCH", "2.11.0")
    with settings.during_a_command():
        monkeypatch.setenv("SPARK_BUILD_TORCH", "2.12.0")
        monkeypatch.setenv("SPARK_BUILD_LOCK", "late")
        assert settings.TORCH.value == "2.11.0"
        assert (settings.LOCK.value, settings.LOCK.is_set) == ("", False)
    assert (settings.TORCH.value, settings.LOCK.value) == ("2.12.0", "late")


def test_two_commands_at_once_do_not_share_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARK_BUILD_NVCC", "first")
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(settings.during_a_command())
        second.enter_context(settings.during_a_command())
        first.close()
        assert settings.NVCC.value == "first"
    monkeypatch.setenv("SPARK_BUILD_NVCC", "second")
    assert settings.NVCC.value == "second"


def test_an_option_takes_the_place_of_a_variable_until_the_command_ends() -> None:
    with settings.during_a_command():
        settings.choose(settings.REAL_EXTENSIONS, "1")
        assert settings.REAL_EXTENSIONS.value == "1"
    assert not settings.REAL_EXTENSIONS.is_set
    with pytest.raises(RuntimeError, match="no command is running"):
        settings.choose(settings.REAL_EXTENSIONS, "1")


def test_every_variable_is_printed_with_its_meaning(
    spark_build: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_BUILD_FORGE_TOKEN", "hidden")
    monkeypatch.setenv("SPARK_BUILD_NVCC", "wheels")
    rows = {row["name"]: row for row in spark_build("config", "show", "--json").json["settings"]}
    for variable in settings.VARIABLES:
        assert rows[variable.name]["meaning"] == variable.meaning
    assert (rows["SPARK_BUILD_NVCC"]["value"], rows["SPARK_BUILD_NVCC"]["source"]) == (
        "wheels",
        "environment",
    )
    assert rows["SPARK_BUILD_FORGE_TOKEN"]["value"] == "***"
    text = spark_build("config", "show").out
    assert all(f"{v.name} " in text and v.meaning in text for v in settings.VARIABLES)
    assert "hidden" not in text
