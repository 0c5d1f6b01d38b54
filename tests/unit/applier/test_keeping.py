"""Where a mod keeps the wheels that it fetches, and how it finds them again."""

from __future__ import annotations

import errno
import io
import os
import threading
import zipfile
from pathlib import Path
from typing import BinaryIO

import pytest

from builder.applier.layers import DonorPin
from builder.applier.sources import Keeper, PipSources, cache_folders, donor_name
from builder.applier.values import EXIT_MISSING, EXIT_REMOTE, ApplyError, sha256_hex
from tests.unit.fakes import make_wheel

NAME, DATA = "a-1-py3-none-any.whl", b"the wheel"
SHA256 = sha256_hex(DATA)
WHEEL = make_wheel("a", "1", {"a/__init__.py": "N = 1\n"})


class Network:
    """What is fetched, and how often."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data, self.fetches = data, 0

    def __call__(self, stream: BinaryIO) -> None:
        self.fetches += 1
        stream.write(self.data)


def read(keeper: Keeper, network: Network) -> bytes:
    with keeper.open(NAME, SHA256, network) as stream:
        return stream.read()


def unusable(path: Path) -> Path:
    """A folder that takes no file: the tests may run as root, whom no mode stops."""
    path.write_text("not a folder\n")
    return path / "cache"


def test_a_second_container_fetches_nothing(tmp_path: Path) -> None:
    network = Network()
    assert read(Keeper([tmp_path / "cache"]), network) == DATA
    assert read(Keeper([tmp_path / "cache"]), network) == DATA
    assert network.fetches == 1
    kept = tmp_path / "cache" / NAME
    assert kept.stat().st_mode & 0o777 == 0o644
    assert not list(kept.parent.glob("*.part"))


def test_a_damaged_file_is_fetched_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / NAME).write_bytes(DATA[:-1])
    network = Network()
    assert read(Keeper([tmp_path]), network) == DATA
    assert network.fetches == 1
    assert (tmp_path / NAME).read_bytes() == DATA
    assert f"{tmp_path / NAME} is damaged" in capsys.readouterr().err


def test_a_folder_that_takes_no_file_is_passed_over(tmp_path: Path) -> None:
    network = Network()
    folders = [unusable(tmp_path / "file"), tmp_path / "next"]
    assert read(Keeper(folders), network) == DATA
    assert (tmp_path / "next" / NAME).read_bytes() == DATA


def test_a_full_disk_is_passed_over(tmp_path: Path) -> None:
    class Full(Network):
        def __call__(self, stream: BinaryIO) -> None:
            super().__call__(stream)
            if self.fetches == 1:
                raise OSError(errno.ENOSPC, "No space left on device")

    assert read(Keeper([tmp_path / "full", tmp_path / "next"]), Full()) == DATA
    assert (tmp_path / "next" / NAME).is_file()
    assert not [p for p in (tmp_path / "full").iterdir() if p.suffix != ".lock"]


def test_a_file_of_a_later_folder_is_used_before_anything_is_fetched(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(DATA)
    network = Network()
    assert read(Keeper([tmp_path / "empty", tmp_path]), network) == DATA
    assert network.fetches == 0


def test_a_vendored_file_comes_first_and_is_checked(tmp_path: Path) -> None:
    vendored = tmp_path / "wheels"
    vendored.mkdir()
    (vendored / NAME).write_bytes(DATA)
    network = Network()
    assert read(Keeper([unusable(tmp_path / "file")], vendored), network) == DATA
    assert network.fetches == 0
    (vendored / NAME).write_bytes(b"another")
    assert read(Keeper([tmp_path / "cache"], vendored), network) == DATA
    assert network.fetches == 1
    assert (vendored / NAME).read_bytes() == b"another"


def test_no_folder_takes_a_file(tmp_path: Path) -> None:
    with pytest.raises(ApplyError, match=r"cannot be kept anywhere: .*file/cache") as caught:
        read(Keeper([unusable(tmp_path / "file")]), Network())
    assert caught.value.code == EXIT_MISSING
    assert "SPARK_BUILD_CACHE" in (caught.value.hint or "")


def test_another_file_of_that_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApplyError, match="another sha256") as caught:
        read(Keeper([tmp_path]), Network(b"evil"))
    assert caught.value.code == EXIT_REMOTE
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]


def test_a_network_failure_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    def down(stream: BinaryIO) -> None:
        stream.write(DATA[:2])
        raise ConnectionResetError("reset")

    with pytest.raises(ConnectionResetError):
        Keeper([tmp_path / "a", tmp_path / "b"]).open(NAME, SHA256, down)
    assert not (tmp_path / "b").exists()
    assert [p.suffix for p in (tmp_path / "a").iterdir()] == [".lock"]


def test_what_a_killed_container_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.abc.part").write_bytes(b"half")
    read(Keeper([tmp_path]), Network())
    assert not list(tmp_path.glob("*.part"))


def test_two_containers_that_start_at_once_fetch_once(tmp_path: Path) -> None:
    started, go = threading.Event(), threading.Event()

    class Slow(Network):
        def __call__(self, stream: BinaryIO) -> None:
            started.set()
            assert go.wait(600)
            super().__call__(stream)

    network, got = Slow(), []
    first = threading.Thread(target=lambda: got.append(read(Keeper([tmp_path]), network)))
    second = threading.Thread(target=lambda: got.append(read(Keeper([tmp_path]), network)))
    first.start()
    assert started.wait(600)
    second.start()
    go.set()
    first.join(20)
    second.join(20)
    assert got == [DATA, DATA]
    assert network.fetches == 1


def test_what_root_keeps_belongs_to_the_owner_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's launcher clears the cache out; mods run as root in its containers."""
    given: dict[Path, tuple[int, int]] = {}

    def chown(path: Path, uid: int, gid: int, *, follow_symlinks: bool) -> None:
        assert not follow_symlinks
        given[path] = uid, gid

    def fchown(number: int, uid: int, gid: int) -> None:
        given[Path(f"/proc/self/fd/{number}").readlink()] = uid, gid

    monkeypatch.setattr(os, "chown", chown)
    monkeypatch.setattr(os, "fchown", fchown)
    owner = tmp_path.stat()
    assert read(Keeper([tmp_path / "new" / "cache"]), Network()) == DATA
    made = {path.relative_to(tmp_path).as_posix().partition(".whl")[0] for path in given}
    assert made == {"new", "new/cache", "new/cache/a-1-py3-none-any"}
    assert set(given.values()) == {(owner.st_uid, owner.st_gid)}


def test_order_of_the_caches(tmp_path: Path) -> None:
    env = {"SPARK_BUILD_CACHE": "/mine", "SPARKRUN_RUNTIME_CACHE_DIR": "/cache/runtime"}
    assert cache_folders(env, tmp_path) == [
        Path("/mine"), Path("/cache/runtime/spark-build"), tmp_path / "spark-build",
        Path("/tmp/spark-build-wheels"),
    ]  # fmt: skip
    off = {"SPARKRUN_RUNTIME_CACHE_DIR": "", "TMPDIR": "/large"}
    assert cache_folders(off, tmp_path / "gone") == [Path("/large/spark-build-wheels")]


def test_a_file_of_a_wheel_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second container asks no index, and the applier of a mod that brings the file none."""
    row = WHEEL.donor_pin("a/__init__.py")
    pin = DonorPin(**{key.replace("-", "_"): value for key, value in row.items()})
    monkeypatch.setattr(PipSources, "_remote", lambda *_: zipfile.ZipFile(io.BytesIO(WHEEL.data)))
    assert PipSources("http://127.0.0.1:9", Keeper([tmp_path])).donor(pin) == b"N = 1\n"
    monkeypatch.undo()
    assert (tmp_path / donor_name(pin)).read_bytes() == b"N = 1\n"
    again = PipSources("http://127.0.0.1:9", Keeper([unusable(tmp_path / "file")], tmp_path))
    assert again.donor(pin) == b"N = 1\n"
    (tmp_path / donor_name(pin)).unlink()
    with pytest.raises(ApplyError, match="cannot fetch"):
        PipSources("http://127.0.0.1:9", Keeper([tmp_path])).donor(pin)
