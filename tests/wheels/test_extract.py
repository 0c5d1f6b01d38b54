"""One large file out of a wheel on an index: in pieces, checked, and not kept."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import pytest

from builder.common import net, wheels
from builder.common.console import Bar
from builder.common.pypi import PackageIndex
from builder.common.wheels import RemoteWheel
from builder.errors import RemoteError, UsageError

from .fakeindex import FakeIndex, build_wheel, noise

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODULE, RECORD = "vllm/_C.abi3.so", "vllm-9.9.0.dist-info/RECORD"
DATA = noise(1, 900_000)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeIndex]:
    """An index with one wheel, a cache of its own, and pieces of 100 kB."""
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(wheels, "_PIECE", 100_000)
    monkeypatch.setattr(wheels, "_whole_wheels", {})
    with FakeIndex() as made:
        made.add("vllm", "9.9.0", {"vllm/__init__.py": noise(2, 200_000), MODULE: DATA})
        yield made


def opened(index: FakeIndex) -> RemoteWheel:
    """The wheel, its directory read."""
    client = PackageIndex(index.url)
    wheel = RemoteWheel(client.wheels("vllm")[0], client)
    assert MODULE in wheel.members
    return wheel


def test_a_file_is_read_completely_and_not_cached(index: FakeIndex, tmp_path: Path) -> None:
    wheel = opened(index)
    wheel.extract(MODULE, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA
    assert sum(line.startswith("GET /files/") for line in index.requests) == 1 + 1 + 10
    assert not list((tmp_path / "cache").rglob("*.so*"))


def test_a_file_that_is_not_compressed(index: FakeIndex, tmp_path: Path) -> None:
    opened(index).extract(RECORD, tmp_path / "file")
    assert (tmp_path / "file").read_text().startswith("vllm/__init__.py,sha256=")


def test_a_whole_wheel_gives_the_compressed_bytes_of_a_file_that_was_read(
    index: FakeIndex,
) -> None:
    wheel = opened(index)
    name = wheel.file.filename
    assert wheels.deflated(f"{name}:{MODULE}") is None
    assert wheel.read_whole(MODULE) == DATA
    packed = wheels.deflated(f"{name}:{MODULE}")
    assert packed is not None
    assert zlib.decompress(packed, wbits=-15) == DATA
    assert wheels.deflated(f"{name}:{RECORD}") is None
    assert wheels.deflated(f"{name}:vllm/none.py") is None
    assert wheels.deflated("vllm/local/file.py") is None


def test_other_bytes_are_refused(index: FakeIndex, tmp_path: Path) -> None:
    wheel = opened(index)
    (name,) = index.files
    files = {"vllm/__init__.py": noise(2, 200_000), MODULE: noise(3, 900_000)}
    index.faults.swap[name] = build_wheel("vllm", "9.9.0", files)
    with pytest.raises(RemoteError, match=r"_C\.abi3\.so does not match its RECORD"):
        wheel.extract(MODULE, tmp_path / "file")


def test_damage_is_reported(index: FakeIndex, tmp_path: Path) -> None:
    wheel = opened(index)
    (name,) = index.files
    whole = index.files[name]
    at = whole.index(MODULE.encode()) + len(MODULE)
    index.faults.swap[name] = whole[:at] + b"\xff" * 1000 + whole[at + 1000 :]
    with pytest.raises(RemoteError, match=r"_C\.abi3\.so is damaged"):
        wheel.extract(MODULE, tmp_path / "file")


def test_an_interrupted_download(index: FakeIndex, tmp_path: Path) -> None:
    wheel = opened(index)
    (name,) = index.files
    index.faults.cut[name] = 50_000
    with pytest.raises(RemoteError, match=r"broke off|where 100000 were asked for"):
        wheel.extract(MODULE, tmp_path / "file")


def test_an_unwritable_target(index: FakeIndex, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        opened(index).extract(MODULE, tmp_path / "no-such-folder" / "file")


def test_progress_is_counted_during_a_download(
    index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large file many times, not once for each range; all of it in the end."""
    counted: list[int] = []
    advance = Bar.advance

    def seen(bar: Bar, count: int = 1) -> None:
        advance(bar, count)
        counted.append(bar.done)

    monkeypatch.setattr(Bar, "advance", seen)
    monkeypatch.setattr(net, "BLOCK", 10_000)
    wheel = opened(index)
    counted.clear()
    wheel.extract(MODULE, tmp_path / "file")
    size = wheel.packed_size(MODULE)
    assert len(counted) > 80
    assert size <= counted[-1] <= size + 30
    counted.clear()
    bar = Bar("torch", size, "bytes")
    wheel.unpack(wheel.members, tmp_path / "all", bar)
    assert (tmp_path / "all" / MODULE).read_bytes() == DATA
    assert size + 200_000 <= bar.done
