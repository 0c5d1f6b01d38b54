"""Places that cannot be used: an error of the user's world, each with its own hint."""

from __future__ import annotations

import errno
import os
import sqlite3
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.hints import of_the_system, os_hint
from builder.pipeline import inputs
from tests.unit.cli.test_cli import FIX
from tests.unit.fakes import every_base_is, fake_base, vllm_files, write_tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Called

    SparkBuild = Callable[..., Called]

FILE = "a file is where a folder is needed; "
FOLDER = "a folder is where a file is needed; "
LONG = "give it a shorter name"


@pytest.fixture(autouse=True)
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that the small vLLM needs."""
    write_tree(tmp_path / "patches", {"fix/layer.toml": FIX.encode()})
    monkeypatch.setenv("SPARK_BUILD_PATCHES", str(tmp_path / "patches"))


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Bad places, by what is wrong with them."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    return {
        "below-a-file": tmp_path / "file" / "a",
        "far-below-a-file": tmp_path / "file" / "a" / "b",
        "folder": tmp_path / "folder",
        "long": tmp_path / ("n" * 300),
    }


WRITING = {
    "html": ("verify", "dir:{site}", "-l", "fix", "--level", "static", "--html", "{place}"),
    "new": ("layers", "new", "mine", "--in", "{place}"),
    "mods": ("mods", "export", "mine", "-l", "fix", "--in", "{place}"),
}


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("what", ["below-a-file", "far-below-a-file", "long"])
def test_unwritable_outputs(
    spark_build: SparkBuild, site: Path, places: dict[str, Path], command: str, what: str
) -> None:
    words = [word.format(site=site, place=places[what]) for word in WRITING[command]]
    result = spark_build(*words)
    assert result.code == 2
    assert f"try: {LONG if what == 'long' else FILE}" in result.err
    assert "free some space" not in result.err


def test_an_html_file_where_a_folder_is(
    spark_build: SparkBuild, site: Path, places: dict[str, Path]
) -> None:
    words = [word.format(site=site, place=places["folder"]) for word in WRITING["html"]]
    result = spark_build(*words)
    assert result.code == 2
    assert f"{places['folder']}: Is a directory" in result.err
    assert FOLDER in result.err


IMAGE = ("image", "-l", "fix", "-b", "pypi:vllm==0.20.1", "--engine", "oci", "--no-verify", "-o")


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every base is a small vLLM in memory."""
    made = fake_base(vllm_files())
    every_base_is(monkeypatch, made)


@pytest.mark.parametrize("what", ["below-a-file", "far-below-a-file", "long"])
@pytest.mark.usefixtures("base")
def test_an_impossible_cache_directory(
    spark_build: SparkBuild, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(places[what]))
    result = spark_build(*IMAGE, "oci:out")
    assert result.code == 2, result.err
    assert (LONG if what == "long" else "set SPARK_BUILD_CACHE to another folder") in result.err
    assert "free some space" not in result.err


@pytest.mark.parametrize("what", ["below-a-file", "far-below-a-file", "long"])
@pytest.mark.usefixtures("base")
def test_an_impossible_layout_directory(
    spark_build: SparkBuild, places: dict[str, Path], what: str
) -> None:
    result = spark_build(*IMAGE, f"oci:{places[what]}")
    assert result.code in (2, 7), result.err
    assert (LONG if what == "long" else FILE) in result.err
    assert "free some space" not in result.err


def system(number: int, path: str = "/nonexistent/x") -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "free some space, or go there"),
        (errno.EDQUOT, "a quota is used up"),
        (errno.EACCES, "see who may use it with: ls -ld /; or go there"),
        (errno.EPERM, "see who may use it with: ls -ld /; or go there"),
        (errno.EROFS, "it is mounted read-only; go there"),
        (errno.ENOTDIR, FILE + "go there"),
        (errno.EISDIR, FOLDER + "go there"),
        (errno.ENAMETOOLONG, LONG),
        (errno.ELOOP, "namei -l /"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENOENT, "go there"),
    ],
)
def test_every_errno_has_its_own_hint(number: int, said: str) -> None:
    hint = os_hint(system(number), "go there")
    assert said in hint
    assert ("free some space" in hint) is (number in (errno.ENOSPC, errno.EDQUOT))


def test_a_full_disk_below_a_database() -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = "SQLITE_FULL"
    assert os_hint(error, "go there") == "free some space, or go there"


def test_unexpected_os_errors() -> None:
    said = of_the_system(system(errno.EACCES))
    assert said is not None
    assert said[0] == "cannot use /nonexistent/x: Permission denied"
    assert of_the_system(system(errno.ENOENT)) is None, "a file of ours that is not there"
    assert of_the_system(ssl.SSLError(1, "handshake")) is None, "its numbers are others"
    assert of_the_system(ValueError("x")) is None


def test_os_errors_are_not_internal_errors(
    spark_build: SparkBuild, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise system(errno.EACCES, str(site / "vllm"))

    monkeypatch.setattr(inputs, "make_plan", refused)
    result = spark_build("plan", "-l", "fix", "-b", f"dir:{site}", "--json")
    assert result.code == 2
    assert result.json["error"]["message"] == f"cannot use {site}/vllm: Permission denied"
    assert f"ls -ld {site}/vllm" in result.json["error"]["hint"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR])
def test_a_file_of_the_cache_names_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A cache that another user owns, or on a disk that is read-only."""
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "cache"))
    file = str(tmp_path / "cache" / "wheels" / "x")
    message, hint = of_the_system(OSError(number, os.strerror(number), file)) or ("", "")
    assert file in message
    assert "set SPARK_BUILD_CACHE to another folder" in hint
    _, hint = of_the_system(OSError(number, os.strerror(number), str(tmp_path / "x"))) or ("", "")
    assert "SPARK_BUILD_CACHE" not in hint
