"""Locks from other people: what is read, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.plan import Pin
from builder.errors import Exit, SparkBuildError
from builder.images.rootfs.facts import RecordedFiles
from builder.layers.lock import NAME, Lock, folder_of, read_facts, read_lock, wheels_of, write_facts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DIGEST = "0" * 64
KEY = "fix on b for own, Python own"
WHEEL = "vllm-1-py3-none-any.whl"


def lock_with(**wheel: Any) -> dict[str, Any]:
    """A lock of one base, whose wheel has other values."""
    row = {"filename": WHEEL, "sha256": DIGEST, "size": 5, "record": DIGEST} | wheel
    request = {"layers": ["fix"], "with-pr": [], "base": "b", "platform": "own", "python": "own"}
    base = {"kind": "pypi", "digest": f"sha256:{DIGEST}", "platform": "linux/arm64",
            "python": "3.12", "packages": {"vllm": "1"}, "wheels": [row]}  # fmt: skip
    layer = {"name": "fix", "digest": DIGEST, "files": {"layer.toml": DIGEST}}
    entry = {"request": request, "base": base, "layers": [layer], "inputs": []}
    return {"schema": 1, "pulls": {}, "locked": {KEY: entry}}


def put(folder: Path, value: object) -> Path:
    path = folder / NAME
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return path


def refused(path: Path) -> str:
    with pytest.raises(SparkBuildError) as caught:
        read_lock(path)
    assert caught.value.code == Exit.STALE
    assert str(path) in str(caught.value)
    assert caught.value.hint
    return str(caught.value)


def test_a_good_lock_is_read(tmp_path: Path) -> None:
    lock = read_lock(put(tmp_path, lock_with()))
    assert lock is not None
    (wheel,) = wheels_of(lock.entries[KEY])
    assert (wheel.filename, wheel.sha256, wheel.record) == (WHEEL, DIGEST, DIGEST)


@pytest.mark.parametrize(
    "wheel",
    [
        {"sha256": "/proc/self/cwd/evil"}, {"sha256": "../" * 20}, {"sha256": "A" * 64},
        {"sha256": ""}, {"sha256": None}, {"sha256": DIGEST + "\n"}, {"record": "../x"},
        {"record": ""}, {"filename": "../" + WHEEL}, {"filename": "/etc/" + WHEEL},
        {"filename": "x.whl"}, {"filename": "vllm-x-py3-none-any.whl"}, {"filename": "a\0b.whl"},
        {"filename": "vllm-1-py3-none-../any.whl"}, {"filename": "vllm-1.tar.gz"},
        {"filename": f"vllm-1-{'.'.join(['a'] * 20)}-{'.'.join(['b'] * 20)}-any.whl"},
        {"filename": "vllm-1-" + "x" * 300 + "-none-any.whl"}, {"filename": WHEEL.upper()},
        {"size": -1}, {"size": 1e300}, {"size": 10**40}, {"commit": "HEAD"}, {"commit": ""},
    ],
    ids=range(23),
)  # fmt: skip
def test_an_odd_wheel_is_refused(tmp_path: Path, wheel: dict[str, Any]) -> None:
    refused(put(tmp_path, lock_with(**wheel)))


def entry(change: Callable[[Any], object]) -> dict[str, Any]:
    value = lock_with()
    change(value["locked"][KEY])
    return value


@pytest.mark.parametrize(
    "value",
    [
        entry(lambda e: e["base"].update(digest="../x")),
        entry(lambda e: e["base"].update(digest=DIGEST)),
        entry(lambda e: e["base"].update(facts={"file": "../x", "sha256": DIGEST, "layers": DIGEST,
                                                "depth": 1})),
        entry(lambda e: e["layers"][0].update(digest="x")),
        entry(lambda e: e["layers"][0].update(files={"a": "x"})),
        entry(lambda e: e["request"].update(base="other")),
        b"", b"null", b"[]", b"{}", b"\xff\xfe", b'{"schema": 1}', b'{"schema": "1"}',
        b'{"schema": 99}', b'{"schema": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"schema": 1, "locked": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b"[" * 1_000_000, b'{"schema": 1, "pulls": {}, "locked": {"x": 1}}' + b"{}",
    ],
    ids=range(18),
)  # fmt: skip
def test_an_odd_lock_is_refused(tmp_path: Path, value: object) -> None:
    refused(put(tmp_path, value))


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    """A pipe would wait for ever, and a device never end."""
    path = tmp_path / NAME
    os.mkfifo(path)
    assert "not a regular file" in refused(path)
    for device in ("/dev/zero", "/dev/tty", "/dev/null"):
        path.unlink()
        path.symlink_to(device)
        refused(path)
    path.unlink()
    path.symlink_to(NAME)
    refused(path)
    path.unlink()
    path.mkdir()
    refused(path)


def test_a_link_to_a_lock_is_read(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / NAME).symlink_to(put(tmp_path / "real", lock_with()))
    assert read_lock(tmp_path / NAME) is not None


def test_a_lock_has_a_size(tmp_path: Path) -> None:
    with (tmp_path / NAME).open("wb") as stream:
        stream.truncate(1 << 40)
    assert "more than 16 MiB" in refused(tmp_path / NAME)


def test_facts_are_a_regular_file(tmp_path: Path) -> None:
    path = put(tmp_path, lock_with())
    pin = write_facts(path, RecordedFiles((f"sha256:{DIGEST}",)))
    place = folder_of(path) / pin.file
    assert read_facts(path, pin).layers
    place.unlink()
    os.mkfifo(place)
    for _ in range(2):
        with pytest.raises(SparkBuildError, match="not a regular file"):
            read_facts(path, pin)
        place.unlink()
        place.symlink_to("/dev/zero")
    assert write_facts(path, RecordedFiles((f"sha256:{DIGEST}",)), [pin]) == pin


@pytest.mark.parametrize("commit", ["HEAD", "", "main", "a" * 39, "A" * 40, "../" * 10])
def test_a_head_that_is_no_commit_is_not_written(tmp_path: Path, commit: str) -> None:
    """A forge said it; the lock could not be read again."""
    good = read_lock(put(tmp_path, lock_with()))
    assert good is not None
    (tmp_path / NAME).unlink()
    pin = Pin(base="a" * 40, commit=commit, date="2026-01-01", forge="f", repository="o/r",
              request="o/r#1", sha256=DIGEST, size=1)  # fmt: skip
    entries = json.loads(good.data())["locked"]
    entries[KEY]["request"]["with-pr"] = ["o/r#1"]
    value = {
        "schema": 1,
        "pulls": {},
        "locked": {"fix + o/r#1 on b for own, Python own": entries[KEY]},
    }
    again = read_lock(put(tmp_path, value))
    assert again is not None
    (tmp_path / NAME).unlink()
    lock = dataclasses.replace(again, pulls={"o/r#1": pin})
    with pytest.raises(SparkBuildError, match="is not written") as caught:
        lock.write()
    assert caught.value.code == Exit.REMOTE
    assert not (tmp_path / NAME).exists()
    assert Lock(tmp_path / NAME).write()
