"""Two libraries unpack gzip: what both accept is the same, and neither accepts damaged content."""

from __future__ import annotations

import contextlib
import gzip
import io
import random
import sys
import zlib

import pytest

from builder.common.deflate import Inflater, pack, unpack
from builder.errors import RemoteError
from builder.images.rootfs import limits
from builder.images.rootfs.tar import Unpacked
from tests.unit.chance import CASES

SEED = 20_261_128
#: A layer as containers have it: members one after the other.
PLAIN = bytes(range(256)) * 900 + b"a" * 200_000
WHOLE = gzip.compress(PLAIN[:300_000], 6, mtime=0) + gzip.compress(PLAIN[300_000:], 1, mtime=0)


@pytest.fixture(params=["isal", "zlib"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library that is used; both are, where there is a wheel of ISA-L."""
    name: str = request.param
    if name == "isal":
        pytest.importorskip("isal")
    else:
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    return name


def unpacked(blob: bytes) -> bytes:
    stream = Unpacked(io.BytesIO(blob), "layer")
    return stream.read(1000) + stream.read(len(PLAIN) + 1)


def test_members_are_unpacked(library: str) -> None:
    assert type(Inflater(31)._inner).__module__.startswith(library)
    assert unpacked(WHOLE) == PLAIN


@pytest.mark.usefixtures("library")
def test_what_is_packed_for_a_cache_is_read_with_either_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = pack(PLAIN)
    assert len(packed) < len(PLAIN) / 10
    assert unpack(packed) == PLAIN
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert unpack(packed) == zlib.decompress(packed) == PLAIN


@pytest.mark.usefixtures("library")
def test_damage_in_a_cache_is_an_error() -> None:
    with pytest.raises(zlib.error):
        unpack(pack(PLAIN)[:-5])
    with pytest.raises(zlib.error):
        unpack(b"no deflate")


@pytest.mark.usefixtures("library")
def test_raw_deflate_is_unpacked_in_steps() -> None:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    data, inflater, out = packer.compress(PLAIN) + packer.flush() + b"rest", Inflater(-15), b""
    for at in range(0, len(data), 100):
        out += inflater.decompress(data[at : at + 100], 1000)
        while not inflater.needs_input and not inflater.eof:
            out += inflater.decompress(b"", 1000)
    assert out == PLAIN
    assert inflater.eof
    with pytest.raises(zlib.error):
        Inflater(-15).decompress(b"\xff" * 99, 1000)


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (WHOLE[:-9], "ends too early"),
        (WHOLE[:-8] + bytes(4) + WHOLE[-4:], "damaged"),
        (WHOLE[:-4] + bytes(4), "damaged"),
        (WHOLE[:40] + b"\xff" * 40 + WHOLE[80:], "damaged"),
        (WHOLE + b"\0" * 512, "damaged"),
    ],
    ids=["cut", "checksum", "length", "data", "zeros after it"],
)
@pytest.mark.usefixtures("library")
def test_damage_is_an_error(blob: bytes, why: str) -> None:
    with pytest.raises(RemoteError, match=why):
        unpacked(blob)


@pytest.mark.usefixtures("library")
def test_a_small_blob_that_unpacks_to_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FREE_BYTES", 1 << 20)
    bomb = gzip.compress(bytes(32 << 20), 9, mtime=0)
    with pytest.raises(RemoteError, match="the layer is refused"):
        Unpacked(io.BytesIO(bomb), "layer").finish()


@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.usefixtures("library")
def test_chance(case: int) -> None:
    """Changed bytes are an error, or were in a field of the header that says nothing."""
    chance = random.Random(f"{SEED} {case}")
    for _ in range(40):
        blob = bytearray(WHOLE)
        for _ in range(chance.randrange(1, 4)):
            at = chance.choice((chance.randrange(12), chance.randrange(len(blob))))
            blob[at] = chance.randrange(256)
        with contextlib.suppress(RemoteError):
            assert unpacked(bytes(blob)) in (PLAIN, bytes(blob))  # no gzip at all: as it is
