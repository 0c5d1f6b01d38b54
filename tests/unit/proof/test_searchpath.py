"""How an image starts Python, and what a failure of this machine is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.errors import RemoteError
from builder.images.rootfs.view import Rootfs
from builder.proof.searchpath import Build, NotFollowed, Options, Start, search_path
from builder.proof.starts import homes, interpreter_of
from tests.unit.imagefiles import Item, packed, python_items, tar_of, view_of

if TYPE_CHECKING:
    from pathlib import Path

BUILD = Build(version="3.12")
START = Start(called="/opt/app/bin/python3", env={"HOME": "/root"})
PTH = "opt/app/lib/python3.12/site-packages/a.pth"


@pytest.fixture
def disk(tmp_path: Path) -> Rootfs:
    return view_of(tmp_path, packed(tar_of(*python_items(), Item(PTH, b"/opt\nimport sys\n"))))


def test_lines_of_code_are_collected_and_not_run(disk: Rootfs) -> None:
    found = search_path(disk, START, BUILD)
    assert (found.folders[-1], found.code) == ("/opt", ("import sys\n",))


@pytest.mark.parametrize("error", [RemoteError("gone"), OSError("disk"), MemoryError()])
@pytest.mark.parametrize("path", [f"/{PTH}", "/opt/app/lib/python3.12/os.py"])
def test_a_failure_of_this_machine_is_none_of_the_image(
    disk: Rootfs, monkeypatch: pytest.MonkeyPatch, error: Exception, path: str
) -> None:
    """``site`` would take it for a file that is not there."""
    stat = Rootfs.stat

    def failing(self: Rootfs, asked: str) -> object:
        if asked == path:
            raise error
        return stat(self, asked)

    monkeypatch.setattr(Rootfs, "stat", failing)
    with pytest.raises(type(error)) as caught:
        search_path(disk, START, BUILD)
    assert caught.value is error


def test_a_start_that_python_refuses(tmp_path: Path) -> None:
    files = [*python_items(), Item("opt/app/bin/pyvenv.cfg", b"x" * (33 << 10))]
    disk = view_of(tmp_path, packed(tar_of(*files)))
    with pytest.raises(NotFollowed, match=r"pyvenv\.cfg is larger than 32 KiB"):
        search_path(disk, START, BUILD)


@pytest.mark.parametrize(("version", "option", "first"), [
    ("3.12", "-P", ""), ("3.12", "-s", "/"), ("3.10", "-I", ""), ("3.10", "-s", "/"),
])  # fmt: skip
def test_whether_there_is_a_first_folder(
    tmp_path: Path, version: str, option: str, first: str
) -> None:
    disk = view_of(tmp_path, packed(tar_of(*python_items(version=version))))
    start = Start(called="/opt/app/bin/python3", options=(option,), env={"HOME": "/root"})
    assert search_path(disk, start, Build(version=version)).first == first


def test_a_release_that_knows_no_safe_path(tmp_path: Path) -> None:
    disk = view_of(tmp_path, packed(tar_of(*python_items(version="3.10"))))
    env = {"HOME": "/root", "PYTHONSAFEPATH": "1"}
    start = Start(called="/opt/app/bin/python3", env=env)
    assert search_path(disk, start, Build(version="3.10")).first == "/"
    assert search_path(disk, start, Build(version="3.11")).first == ""


@pytest.mark.parametrize(("words", "flags", "rest"), [
    ("-sE -u x.py -I", "sEu", ["x.py", "-I"]),
    ("-X dev -Wignore -W error x", "XW", ["x"]),
    ("-Xdev -m mod -S", "Xm", []),
    ("-IBc code", "IBc", []),
    ("--check-hash-based-pycs always -P x", "P", ["x"]),
    ("-", "", ["-"]),
])  # fmt: skip
def test_options(words: str, flags: str, rest: list[str]) -> None:
    options = Options.of(tuple(words.split()))
    assert (options.flags, list(options.rest)) == (frozenset(flags), rest)


@pytest.mark.parametrize(("user", "home"), [
    ("", "/root/a"), ("0", "/root/a"), ("app", "/srv"), ("7:0", "/srv"), ("8", "/"), ("x", "/"),
])  # fmt: skip
def test_the_home_of_a_user(user: str, home: str) -> None:
    passwd = b"bad\nroot:x:0:0::/root/a:/bin/sh\nagain:x:0:0::/no:/x\napp:x:7:7::/srv:/x\n"
    assert homes({}, user, passwd)[0] == home
    assert homes({"HOME": "/h"}, user, passwd) == ("/h",)


@pytest.mark.parametrize(("script", "called"), [
    (b"#! /usr/bin/python3 -sE\n", [("/usr/bin/python3", ("-sE",))]),
    (b"#!/usr/bin/env python3\nx", [("python3", ())]),
    (b"#!/usr/bin/env A=b python3\n", []),
    (b"#!/bin/bash\necho\n", []),
    (b"#!/bin/sh\n'''exec' \"$x\" \"$0\" \"$@\"\n", []),
    (b"#!/bin/sh\n'''exec' \"/a b\"/python \"$0\" \"$@\"\n", [("/a b/python", ())]),
    (b"\x7fELF", []),
    (b"", []),
    (None, []),
])  # fmt: skip
def test_the_interpreter_of_a_script(
    disk: Rootfs, script: bytes | None, called: list[tuple[str, tuple[str, ...]]]
) -> None:
    assert list(interpreter_of(disk, "/opt/tool", script)) == called
