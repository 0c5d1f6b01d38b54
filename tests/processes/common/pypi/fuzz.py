"""Chance at the edges of the package index and the lock.

Arguments are a seed and a number of cases.  Each case is a page, a wheel or a lock with mistakes of
chance.  Expected errors are fine; anything else is printed, and the exit code is 1.  The caller
limits the memory.
"""

from __future__ import annotations

import io
import json
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.applier.values import ApplyError
from builder.common.net import Answer
from builder.common.pypi import PAGE_BYTES, PackageIndex, parse_page
from builder.common.reference import Ref
from builder.common.wheels import RemoteWheel, WheelTree
from builder.errors import SparkBuildError
from builder.images.bases.pypi import identify_pypi
from builder.images.subject import BaseRequest
from builder.layers.lock import NAME, read_lock, wheels_of
from tests.unit.layers.lock.test_hostile_lock import lock_with
from tests.wheels.fakeindex import build_wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

JSON = "application/vnd.pypi.simple.v1+json"
NAME_OF = "vllm-1.0-py3-none-any.whl"
URL = "http://127.0.0.1:9/simple/vllm/"
SHA = "0123456789abcdef" * 4
TEXTS = (
    "", "\0", "../../x", "/etc/passwd", "a" * 300, "http://[::1", "file:///dev/zero", "https://",
    "\ud800", "é", "<a href='x'>", "&" * 9, "99.0", "1.0", SHA, SHA.upper(), "-1", "1e999",
    "x-1-py3-none-any.whl", "vllm-1!0-py3-none-any.whl", "a.b" * 60, "==", "'\"", "\r\n::error::x",
    "vllm-" + "9" * 180 + "-py3-none-any.whl", "vllm[a]", "(" * 50, "HEAD", "sha256:" + SHA,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**30, 1e308, [], {}, [[]] * 9, {"a": {}}, *TEXTS,
)  # fmt: skip
CONTENT_TYPES = (JSON, "text/html", "text/html; charset=utf-16", "", "x/y", JSON, "text/html")
LINES = (
    "Name: vllm", "Name: other", "Version: 1.0", "Version: x", "Requires-Dist: vllm[x]",
    "Requires-Dist: flashinfer-python (>=", "Requires-Dist: b12x; extra == 'x'", "Requires-Dist:",
    "Requires-Dist: b12x @ file:///dev/zero", "Requires-Dist: b12x; python_version < '('", " x",
    "Requires-Dist: " + "b12x," * 99, "\0", "Requires-Dist: b12x===x", "Requires-Dist: b12x==1.*",
)  # fmt: skip


class Chance:
    """Mistakes of chance."""

    def __init__(self, seed: str) -> None:
        self.dice = random.Random(seed)
        self.often = self.dice.choice((0.004, 0.02, 0.08))

    def damaged(self, data: bytes) -> bytes:
        """Bytes with some replaced, repeated, cut out or put in."""
        out = bytearray(data)
        for _ in range(self.dice.choice((0, 1, 1, 2, 5, 30))):
            at = self.dice.randrange(len(out) + 1)
            what = self.dice.randrange(5)
            if what == 0 and out:
                out[at % len(out)] = self.dice.randrange(256)
            elif what == 1:
                del out[at : at + self.dice.choice((1, 4, 40, 4000))]
            elif what == 2:
                out[at:at] = self.dice.choice(TEXTS).encode("utf-8", "surrogatepass")
            elif what == 3:
                out[at : at + 4] = self.dice.choice((b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f"))
            else:
                part = out[at : at + self.dice.choice((1, 8, 64))]
                out[at:at] = part * self.dice.choice((2, 50, 2000))
        return bytes(out)

    def changed(self, value: Any) -> Any:
        """JSON with some values replaced, keys removed or nested deeply."""
        if self.dice.random() < self.often:
            return self.dice.choice(VALUES)
        if isinstance(value, dict):
            return {
                (
                    self.dice.choice(TEXTS) if self.dice.random() < self.often / 4 else key
                ): self.changed(item)
                for key, item in value.items()
                if self.dice.random() > self.often / 3
            }
        if isinstance(value, list):
            times = self.dice.choice((1, 1, 1, 1, 0, 2, 50))
            return [self.changed(item) for item in value * times]
        return value

    def key(self, key: str) -> str:
        """A key, sometimes another one."""
        return self.dice.choice(TEXTS) if self.dice.random() < self.often / 4 else key

    def text(self, value: Any) -> bytes:
        """A changed JSON value as bytes, sometimes damaged."""
        data = json.dumps(self.changed(value)).encode("utf-8", "surrogatepass")
        if self.dice.random() < 0.05:
            deep = self.dice.choice((500, 100_000))
            data = data[:-1] + b',"x":' + b"[" * deep + b"]" * deep + b"}"
        return self.damaged(data) if self.dice.random() < 0.3 else data


def page_of(data: bytes, url: str = "http://127.0.0.1:9/f") -> dict[str, Any]:
    """A page with one wheel, as honest as its index."""
    row = {"filename": NAME_OF, "url": url, "hashes": {"sha256": SHA}, "size": len(data),
           "yanked": False}  # fmt: skip
    return {"meta": {"api-version": "1.1"}, "name": "vllm", "files": [row]}


def a_page(chance: Chance, _folder: Path) -> None:
    """A page in JSON or HTML."""
    links = "".join(
        f"<a {chance.dice.choice(('', 'data-yanked', 'data-yanked=x'))} href="
        f'"{chance.dice.choice((*TEXTS, NAME_OF))}#sha256={chance.dice.choice((SHA, *TEXTS))}">'
        f"{chance.dice.choice((NAME_OF, *TEXTS))}</a>\n"
        for _ in range(chance.dice.randrange(9))
    )
    text = f"<html><base href='x/'><body>{links}</body>".encode("utf-8", "surrogatepass")
    data = chance.dice.choice((chance.text(page_of(b"")), chance.damaged(text)))
    kind = chance.dice.choice(CONTENT_TYPES)
    for file in chain(*parse_page(data, kind, URL)):
        assert "/" not in file.filename + file.sha256
        _ = file.parsed_version, file.release


class _Session:
    """An index in memory: one page, and ranges of one wheel, each with mistakes of chance."""

    def __init__(self, chance: Chance, page: bytes, wheel: bytes) -> None:
        self.chance, self.page, self.wheel = chance, page, wheel

    def small(self, url: str, headers: object, limit: int) -> Answer:
        del headers, limit
        found = url.endswith("/vllm/")
        return Answer(200 if found else 404, {"Content-Type": JSON}, url, self.page)

    def get(self, _url: str, headers: dict[str, str], *, stream: bool) -> _Response:
        assert stream
        start, stop = map(int, headers["Range"].removeprefix("bytes=").split("-"))
        return _Response(self.wheel[start : stop + 1])

    def head(self, _url: str, *, allow_redirects: bool) -> _Response:
        assert allow_redirects
        return _Response(b"", length=self.chance.dice.choice(("", "x", "-1", "9" * 18)))


class _Response:
    def __init__(self, data: bytes, length: str = "") -> None:
        self.status_code, self.ok = 206, True
        self.headers = {"Content-Length": length}
        self.raw = self
        self._data = io.BytesIO(data)

    def read(self, size: int, *, decode_content: bool) -> bytes:
        assert not decode_content
        return self._data.read(size)

    def __enter__(self) -> _Response:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def wheel_of(chance: Chance) -> bytes:
    """A wheel with mistakes in METADATA, RECORD, the archive's list, or anywhere."""
    dice = chance.dice
    lines = ["Metadata-Version: 2.1", "Name: vllm", "Version: 1.0"]
    lines += dice.sample(LINES, dice.randrange(4))
    dice.shuffle(lines) if dice.random() < 0.2 else None
    names = ("vllm/a.py", "vllm/big.py", *dice.sample(("../x", "/x", "vllm", "a//b", "a\\b", "é",
             "b-1.dist-info/RECORD", "vllm-1.0.data/purelib/../x", "x" * 300, "\n"), dice.randrange(2)))  # fmt: skip  # noqa: E501
    files = {name: dice.choice((b"", b"x = 1\n", bytes(1 << 20))) for name in names}
    metadata = "\n".join(lines).encode()
    if dice.random() < 0.02:
        metadata += b"\nRequires-Dist: b12x" * 300_000
    data = build_wheel(
        dice.choice(("vllm", "vllm", "vllm", "other")), "1.0", files, metadata=metadata
    )
    if dice.random() < 0.4:
        data = _relisted(chance, data)
    if dice.random() < 0.3:
        at = max(0, len(data) - 22)
        end = bytearray(data[at:])
        counts = [dice.choice((0, 1, 0xFFFF)) for _ in range(2)]
        places = [dice.choice((0, 22, 1 << 31, 0xFFFFFFFF)) for _ in range(2)]
        struct.pack_into("<HHLL", end, 8, *counts, *places)
        data = data[:at] + end
    return chance.damaged(data) if dice.random() < 0.4 else data


def _relisted(chance: Chance, data: bytes) -> bytes:
    """The same files, whose entries in the archive have other values."""
    dice, out = chance.dice, io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            info.compress_type = dice.choice((0, 8, 8, 8, 8, 12, 14))
            info.external_attr = dice.choice((0, 0o755 << 16, 0o120777 << 16, 0o40755 << 16))
            if "RECORD" in info.filename and dice.random() < 0.3:
                content = chance.damaged(content)
            new.writestr(info, content)
        for info in new.filelist:  # what the list says, which is written at the end
            if dice.random() < 0.1:
                setattr(info, dice.choice(("file_size", "compress_size", "header_offset")),
                        dice.choice((0, 1, 1 << 31, (1 << 32) - 2)))  # fmt: skip
            if dice.random() < 0.05:
                info.flag_bits |= dice.choice((1, 8, 0x40, 0x800))
    return out.getvalue()


def a_wheel(chance: Chance, folder: Path) -> None:
    """A base out of a wheel that is read by range."""
    data = wheel_of(chance)
    page = json.dumps(page_of(data)).encode()
    if chance.dice.random() < 0.1:
        page = json.dumps(page_of(b"")).encode()
    session: Any = _Session(chance, page, data)
    index = PackageIndex(URL.removesuffix("/vllm/"), sessions=lambda: session, refresh=True)
    (wheel,) = identified(index).wheels
    for path in wheel.members:
        with _expected():
            wheel.read(path)
    with _expected():
        wheel.unpack(wheel.members, folder / "unpacked", _bar())
    assert not any(place.is_symlink() for place in (folder / "unpacked").rglob("*"))


def identified(index: PackageIndex) -> WheelTree:
    """The base of vLLM 1.0."""
    request = BaseRequest(ref=Ref("pypi:vllm==1.0"), pins={}, index=index)
    tree = identify_pypi(request, "vllm==1.0").tree
    assert isinstance(tree, WheelTree)
    return tree


def read_wheel(chance: Chance, data: bytes) -> None:
    """A base out of a wheel."""
    session: Any = _Session(chance, json.dumps(page_of(data)).encode(), data)
    identified(PackageIndex(URL.removesuffix("/vllm/"), sessions=lambda: session, refresh=True))


def _bar() -> Any:
    from builder.common.console import Bar

    return Bar("", None, "bytes")


class _expected:  # noqa: N801 - reads as a statement
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, (SparkBuildError, ApplyError))


def a_lock(chance: Chance, folder: Path) -> None:
    """A lock with wheels, and the wheels that it holds an index to."""
    (folder / NAME).write_bytes(chance.text(lock_with()))
    lock = read_lock(folder / NAME)
    assert lock is not None
    for entry in lock.entries.values():
        index = PackageIndex(URL)
        index.hold(wheels_of(entry))
        for file in wheels_of(entry):
            assert "/" not in file.filename + file.sha256 + file.record
            RemoteWheel(file, index)
    lock.data()


def heavy_pages() -> Iterator[tuple[bytes, str]]:
    """Pages as large as are read, which become much larger when they are parsed badly."""
    yield b"<a href='a'>a</a>" * (PAGE_BYTES // 17), "text/html"
    yield b"<a href='x#sha256=1'>" + b"vllm-1-py3-none-any.whl</a>" * 600_000, "text/html"
    yield b"<a>" * (PAGE_BYTES // 3), "text/html"
    yield b"<a href='" + b"&amp;" * (PAGE_BYTES // 5), "text/html"
    tags = b".".join([b"a"] * (PAGE_BYTES // 8))
    yield b"<a href=x>vllm-1-" + tags + b"-none-any.whl</a>", "text/html"
    start, end = b'{"meta":{},"files":[{"filename":"vllm-1-', b'-none-any.whl"'
    yield start + tags + end + b',"url":"x","hashes":{}}]}', JSON
    row = b'{"filename":"","url":"","hashes":{}}'
    yield b'{"meta":{},"files":[' + b",".join([row] * (PAGE_BYTES // 38)) + b"]}", JSON
    yield b'{"meta":{},"files":[],"x":[' + b"[]," * (PAGE_BYTES // 4) + b"[]]}", JSON
    keys = b",".join(b'"%d":""' % number for number in range(PAGE_BYTES // 14))
    yield b'{"meta":{},"files":[{"filename":"","url":"","hashes":{' + keys + b"}}]}", JSON


def heavy_wheels() -> Iterator[bytes]:
    """Wheels whose parts are as large as are read."""
    many = {f"vllm/{number}": b"" for number in range(60_000)}
    yield build_wheel("vllm", "1.0", many)
    lines = ["Name: vllm", "Version: 1.0", *["Requires-Dist: b12x"] * 190_000]
    yield build_wheel("vllm", "1.0", {}, metadata="\n".join(lines).encode())
    for text in (b"a,,\n" * 8_000_000, b"\n" * (32 << 20), b"x" * (32 << 20), bytes(1 << 30)):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("vllm-1.0.dist-info/RECORD", text)
        yield out.getvalue()
        del text


def heavy() -> None:
    """Everything as large as it may be, once."""
    for data, kind in heavy_pages():
        with suppress(ValueError):
            parse_page(data, kind, URL)
    for number, wheel in enumerate(heavy_wheels()):
        with tempfile.TemporaryDirectory() as folder:
            settings_of(folder)
            with _expected():
                read_wheel(Chance(f"heavy {number}"), wheel)


KINDS: tuple[Callable[[Chance, Path], None], ...] = (a_page, a_wheel, a_lock)


def main(seed: str, cases: int, limit: int) -> int:
    """Run the cases; ``limit`` is the most memory in MiB that they may have taken, in all."""
    findings, refusals, started = 0, 0, time.monotonic()
    heavy()
    for number in range(cases):
        for kind in KINDS:
            name = f"{kind.__name__} {seed} {number}"
            with tempfile.TemporaryDirectory() as folder:
                settings_of(folder)
                try:
                    kind(Chance(name), Path(folder))
                except (SparkBuildError, ApplyError, ValueError) as error:
                    refusals += 1
                    is_page = kind is a_page and isinstance(error, ValueError)
                    if isinstance(error, ValueError) and not is_page:
                        findings += 1
                        print(f"{name}: {traceback.format_exc()}", flush=True)
                except BaseException:
                    findings += 1
                    print(f"{name}: {traceback.format_exc()}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{cases * len(KINDS)} cases, {refusals} refused, {findings} findings, "
          f"{peak} MiB, {time.monotonic() - started:.0f} s")  # fmt: skip
    return 1 if findings or peak > limit else 0


def settings_of(folder: str) -> None:
    """A cache of its own."""
    import os

    os.environ["SPARK_BUILD_CACHE"] = folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
