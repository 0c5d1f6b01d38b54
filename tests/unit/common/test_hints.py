"""Commands in messages are printed as the user starts spark-build."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.cli.commands import COMMAND_NAMES
from builder.common import hints
from builder.common.hints import PROGRAM, as_started, start_of_this_process, started_as
from tests.unit.fakes import write_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.conftest import Called

OF_TAG = '"vcs_info": {"vcs": "git", "requested_revision": "v1"}'
CHECKOUT = ".venv/bin/spark-build"


@pytest.fixture
def checkout() -> Iterator[None]:
    """Started from a checkout."""
    started_as(CHECKOUT, COMMAND_NAMES)
    yield
    started_as(PROGRAM, COMMAND_NAMES)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("spark-build plan -l x", f"{CHECKOUT} plan -l x"),
        ("docker logs NAME 2>&1 | spark-build diagnose -", f"| {CHECKOUT} diagnose -"),
        ("next: 'spark-build lock', then", f"next: '{CHECKOUT} lock', then"),
        ("spark-build --help", f"{CHECKOUT} --help"),
        ("Usage: spark-build [OPTIONS] COMMAND", f"{CHECKOUT} [OPTIONS]"),
        ("spark-build dispatch ask && spark-build dispatch table", f"&& {CHECKOUT} dispatch table"),
        # the program, not a command of it
        ("another spark-build is writing", "another spark-build is writing"),
        ("this spark-build reads 1 to 3", "this spark-build reads 1 to 3"),
        ("spark-build planned it", "spark-build planned it"),
        ("docker run spark-build/b12x-full:0.33.0 serve", "spark-build/b12x-full:0.33.0 serve"),
        ("--tag=spark-build image", "--tag=spark-build image"),
        (f"{CHECKOUT} plan", f"{CHECKOUT} plan"),
    ],
)
@pytest.mark.usefixtures("checkout")
def test_commands_in_a_text(text: str, shown: str) -> None:
    assert shown in as_started(text)
    assert as_started(as_started(text)) == as_started(text)


@pytest.mark.usefixtures("checkout")
def test_errors_and_help_have_the_command_as_it_was_started(
    spark_build: Callable[..., Called],
) -> None:
    assert f"  try: {CHECKOUT} layers list\n" in spark_build("plan", "-l", "nope").err
    document = spark_build("plan", "-l", "nope", "--json").json
    assert document["error"]["hint"] == f"{CHECKOUT} layers list"
    shown = spark_build("plan", "--help").out
    assert f"Usage: {CHECKOUT} plan" in shown
    assert f"\n    {CHECKOUT} plan --layers b12x-full" in shown
    assert " spark-build " not in shown + spark_build("--help").out


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """How a process says that it was started, in the folder ``work`` with two programs."""
    write_tree(tmp_path, {"work/.venv/bin/spark-build": b"", "other/bin/spark-build": b""})
    for file in tmp_path.glob("**/spark-build"):
        file.chmod(0o755)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "work" / ".venv"))

    def started(program: str, python: str = "python3", path: str = "/nowhere") -> str:
        monkeypatch.setattr(sys, "argv", [program.format(tmp_path)])
        monkeypatch.setattr(sys, "orig_argv", [python.format(tmp_path)])
        monkeypatch.setenv("PATH", path.format(tmp_path))
        return start_of_this_process().replace(str(tmp_path), "TMP")

    return started


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((".venv/bin/spark-build",), ".venv/bin/spark-build"),
        (("{0}/work/.venv/bin/spark-build",), ".venv/bin/spark-build"),  # as bootstrap.py does
        (("{0}/other/bin/spark-build",), "TMP/other/bin/spark-build"),
        (("../other/bin/spark-build",), "../other/bin/spark-build"),
        (("./spark-build",), "./spark-build"),
        (("{0}/other/bin/spark-build", "python3", "{0}/other/bin"), "spark-build"),
        (("{0}/work/.venv/bin/spark-build", "python3", "{0}/other/bin"), ".venv/bin/spark-build"),
        (("{0}/builder/__main__.py",), "python3 -m builder"),
        (("{0}/builder/__main__.py", "{0}/work/.venv/bin/python"), ".venv/bin/python -m builder"),
        (("-c",), "spark-build"),
    ],
)
def test_how_a_process_was_started(
    start: Callable[..., str], words: tuple[str, ...], said: str
) -> None:
    assert start(*words) == said


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        (
            '{"url": "https://example.invalid/x.git", "vcs_info": {"vcs": "git"}}',
            "uvx --from git+https://example.invalid/x.git spark-build",
        ),
        (
            f'{{"url": "https://example.invalid/x", {OF_TAG}}}',
            "uvx --from git+https://example.invalid/x@v1 spark-build",
        ),
        ('{"url": "file:///a%20b", "dir_info": {}}', "uvx --from '/a b' spark-build"),
        (None, "uvx spark-build"),
        ("[", "uvx spark-build"),
    ],
)
def test_uvx(
    start: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    origin: str | None,
    said: str,
) -> None:
    """It puts the program on PATH for that process alone."""
    cached = tmp_path / "archive-v0" / "x"
    files = {"METADATA": b"Name: spark-build\nVersion: 9\n"}
    files |= {"direct_url.json": origin.encode()} if origin else {}
    write_tree(cached / "spark_build-9.dist-info", files)
    monkeypatch.setattr(sys, "path", [str(cached), *sys.path])
    monkeypatch.setattr(sys, "prefix", str(cached))
    monkeypatch.setenv("UV", "/usr/bin/uv")
    write_tree(cached, {"bin/spark-build": b""}).joinpath("bin/spark-build").chmod(0o755)
    program = str(cached / "bin" / "spark-build")
    assert start(program, path=str(cached / "bin")) == said
    monkeypatch.delenv("UV")
    assert start(program, path=str(cached / "bin")) == PROGRAM


def test_texts_name_no_other_start() -> None:
    """A module that writes another start by hand would be wrong for most users."""
    builder = Path(hints.__file__).parents[1]
    for file in builder.rglob("*.py"):
        if file.name not in ("bootstrap.py", "hints.py"):
            text = file.read_text("utf-8")
            assert ".venv/bin/spark-build" not in text, file
            assert "bootstrap.py image" not in text, file
