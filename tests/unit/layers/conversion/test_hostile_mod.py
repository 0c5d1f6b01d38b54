"""Mods, series and patches of strangers: nothing of the user's own files ends in the layer."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from typing import TYPE_CHECKING

import pytest

from builder.common.diffs import MAX_LINE, normalise
from builder.errors import UsageError
from builder.layers.conversion import Reading, Source, mod_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HUNK = "@@ -1,4 +1,4 @@\n one\n two\n-three\n+drei\n four\n"
PATCH = f"--- a/vllm/x.py\n+++ b/vllm/x.py\n{HUNK}".encode()
SCRIPT = b"cp key.py /usr/local/lib/python3.12/dist-packages/vllm/\n"


@pytest.fixture
def mod(tmp_path: Path) -> Path:
    (tmp_path / "mod").mkdir()
    (tmp_path / "mod" / "run.sh").write_bytes(SCRIPT)
    return tmp_path / "mod"


# ------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("target", ["../secret", "{top}/secret", "../home", "../gone", "/dev/zero"])
def test_a_link_out_of_the_mod_is_refused_and_named(mod: Path, tmp_path: Path, target: str) -> None:
    """A private key ended in the layer, and in the image."""
    (tmp_path / "secret").write_text("BEGIN PRIVATE KEY")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "key.py").write_text("BEGIN PRIVATE KEY")
    (mod / "key.py").symlink_to(target.format(top=tmp_path))
    with pytest.raises(UsageError, match=r"mod/key\.py is a link out of the mod, to "):
        mod_files(mod)


def test_a_link_within_the_mod_is_followed(mod: Path) -> None:
    (mod / "a").mkdir()
    (mod / "a" / "real.py").write_bytes(b"x = 1\n")
    (mod / "key.py").symlink_to("a/real.py")
    (mod / "loop.py").symlink_to("loop.py")
    with pytest.raises(UsageError, match=r"cannot read .*loop\.py: Too many levels"):
        mod_files(mod)
    (mod / "loop.py").unlink()
    assert mod_files(mod) == {
        "run.sh": SCRIPT, "a/real.py": b"x = 1\n", "key.py": b"x = 1\n"
    }  # fmt: skip


def test_pipes_in_a_mod_are_left_out(mod: Path) -> None:
    os.mkfifo(mod / "key.py")
    assert set(mod_files(mod)) == {"run.sh"}


@pytest.mark.parametrize("name", ["../a.patch", "/etc/passwd", "out/a.patch", "link.patch"])
def test_a_series_names_only_patches_of_its_folder(tmp_path: Path, name: str) -> None:
    series = tmp_path / "series"
    series.mkdir()
    (tmp_path / "a.patch").write_bytes(PATCH)
    (series / "out").symlink_to(tmp_path)
    (series / "link.patch").symlink_to("../a.patch")
    (series / "series").write_text(f"{name}\n")
    with pytest.raises(UsageError, match="is no patch of this folder"):
        Source(series=series).drafts("x", Reading())


# -------------------------------------------------------------------------------------------- sizes


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def encrypted(data: bytes) -> bytes:
    """A zip whose entries say that they are encrypted."""
    changed = bytearray(data)
    for mark, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = -1
        while (at := data.find(mark, at + 1)) >= 0:
            changed[at + offset] |= 1
    return bytes(changed)


def damaged(data: bytes) -> bytes:
    """Other bytes in the first file."""
    changed = bytearray(data)
    changed[38:42] = b"\xff\xff\xff\xff"
    return bytes(changed)


def other_method(data: bytes) -> bytes:
    changed = bytearray(data)
    for mark, offset in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        at = data.find(mark) + offset
        changed[at : at + 2] = struct.pack("<H", 97)
    return bytes(changed)


RUN = {"run.sh": b"set -e\n" + b"echo hello\n" * 9}
ZIPS: dict[str, tuple[Callable[[], bytes], str]] = {
    "encrypted": (lambda: encrypted(zipped(RUN)), "run.sh is encrypted"),
    "damaged": (lambda: damaged(zipped(RUN)), "run.sh is damaged: "),
    "method": (lambda: other_method(zipped(RUN)), "run.sh is damaged: "),
    "cut": (lambda: zipped(RUN)[:-30], "neither a folder nor a whole zip"),
    "text": (lambda: b"hello", "neither a folder nor a whole zip"),
    "empty": (lambda: b"", "neither a folder nor a whole zip"),
    "bomb": (lambda: zipped({**RUN, "a": bytes(8 << 20)}), "a has 8388608 bytes, packed to "),
    "total": (
        lambda: zipped({**RUN, **{f"{n}": os.urandom(1000) + bytes(15 << 20) for n in range(5)}}),
        "has more than 64 MiB",
    ),
    "many": (lambda: zipped({f"{n}": b"" for n in range(2001)}), "more than 2000 files"),
    "listed": (lambda: zipped(RUN)[:-22] + b"PK\1\2" * 5000, "more than 2000 files"),
    "outside": (lambda: zipped({**RUN, "../x": b""}), "has a name '.' or '..'"),
    "absolute": (lambda: zipped({**RUN, "/x": b""}), "has an empty name"),
}


@pytest.mark.parametrize("kind", ZIPS)
def test_a_zip_that_is_no_mod_is_refused_with_one_line(tmp_path: Path, kind: str) -> None:
    make, said = ZIPS[kind]
    path = tmp_path / "mod.zip"
    path.write_bytes(make())
    with pytest.raises(UsageError) as caught:
        mod_files(path)
    assert said in str(caught.value)
    assert "mod.zip" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_bounded_in_total(mod: Path) -> None:
    for number in range(5):
        with (mod / str(number)).open("wb") as stream:
            stream.truncate(15 << 20)
    with pytest.raises(UsageError, match="has more than 64 MiB"):
        mod_files(mod)


def test_a_folder_with_too_many_files_is_no_mod(mod: Path) -> None:
    for number in range(2001):
        (mod / str(number)).touch()
    with pytest.raises(UsageError, match="more than 2000 files"):
        mod_files(mod)


def test_a_script_is_bounded(mod: Path) -> None:
    """A line of two million words was read for minutes."""
    (mod / "run.sh").write_bytes(b"cp " + b"a " * 200_000)
    with pytest.raises(UsageError, match=r"run\.sh has more than 256 KiB"):
        mod_files(mod)


# ------------------------------------------------------------------------------------- long lines


def long_line(size: int) -> bytes:
    line = b"x" * size
    return (
        b"diff --git a/v/x.py b/v/x.py\n--- a/v/x.py\n+++ b/v/x.py\n@@ -1,4 +1,4 @@\n"
        b" one\n two\n-three\n+" + line + b"\n four\n"
    )


def test_a_line_that_no_text_has_is_refused(tmp_path: Path) -> None:
    """One line of 63 MB took 608 MB of memory."""
    with pytest.raises(UsageError, match="line 8 of the diff has more than 16 MiB"):
        normalise(long_line(MAX_LINE + 1))
    assert len(normalise(long_line(MAX_LINE - 1))) > MAX_LINE
    path = tmp_path / "a.patch"
    path.write_bytes(long_line(17 << 20))
    with pytest.raises(UsageError, match="line 8 of the diff has more than 16 MiB"):
        Source(patches=(path,)).drafts("x", Reading())


def test_a_line_without_an_end_is_refused() -> None:
    with pytest.raises(UsageError, match="line 1 of the diff"):
        normalise(b"x" * (MAX_LINE + 1))
    with pytest.raises(UsageError, match="line 3 of the diff"):
        normalise(b"a\nb\n" + b"x" * (2 * MAX_LINE))
