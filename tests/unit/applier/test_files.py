"""Only regular files of a bounded size are read; others end with one line, at once."""

from __future__ import annotations

import itertools
import os
import stat
import sys
from typing import TYPE_CHECKING

import pytest

from builder.applier.files import open_regular, read_regular

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType


def huge(path: Path) -> None:
    """A file of 1 TiB that takes no room on the disk."""
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


def unix_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o644)


#: What may be in a file's place, and what is said of it.
ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "it is not a regular file but a pipe"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file but a device"),
    "socket": (unix_socket, "it is not a regular file but a socket"),
    "folder": (lambda path: path.mkdir(), "Is a directory"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "No such file or directory"),
    "loop": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "huge": (huge, "it has more than 1 MiB, which is the limit"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    make, said = ODD[kind]
    make(path)
    with pytest.raises(OSError, match=said) as caught:
        read_regular(path, 1 << 20)
    assert caught.value.strerror == said
    assert caught.value.filename == str(path)
    with pytest.raises(OSError, match=said):
        open_regular(path, 1 << 20)


def test_a_regular_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes, which is the limit"):
        read_regular(tmp_path / "link", 4)
    with pytest.raises(OSError, match="symbolic links"):
        read_regular(tmp_path / "link", 5, links=False)
    assert read_regular("/proc/self/status", 1 << 20).startswith(b"Name:")  # it has no size
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_regular("/proc/self/status", 3)


class Interrupted:
    """An interruption at one moment of a call: at an instruction, or as a function returns."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Interrupted:
        frame.f_trace_opcodes = True
        if event in ("opcode", "return"):
            if not self.left:
                sys.settrace(None)
                raise KeyboardInterrupt
            self.left -= 1
        return self


def test_an_interruption_at_any_instruction_stays_one(tmp_path: Path) -> None:
    """No descriptor is closed twice: that error would stand in the interruption's place."""
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    before = sys.gettrace()
    for moment in itertools.count():
        try:
            sys.settrace(Interrupted(moment))
            data = read_regular(path, 5)
        except KeyboardInterrupt:
            continue
        finally:
            sys.settrace(before)
        assert (data, moment > 100) == (b"12345", True)
        return
