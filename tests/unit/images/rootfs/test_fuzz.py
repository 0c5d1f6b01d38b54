"""What others give us, changed by chance: it ends with an error of ours or none, never a crash.

Every case has a seed of its own.  The whole suite has more cases than this file alone
(``tests/lane.py``); ``SPARK_BUILD_TEST_FUZZ`` gives their number.
"""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
import signal
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from builder.errors import SparkBuildError
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import (
    OCI_CONFIG,
    OCI_LAYER_GZIP,
    OCI_MANIFEST,
    RawManifest,
)
from builder.images.rootfs.tar import LayerTar, Unpacked
from tests.unit import tarcases
from tests.unit.chance import CASES
from tests.unit.fakes import vllm_files, write_tree
from tests.unit.imagefiles import Item, diff_id, packed, put, put_vllm, tar_of, view_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unit.caller import Call

SEED = 20_261_122
#: Seconds and bytes that no case of a few kilobytes needs; more is a hang, or a bomb that worked.
PATIENCE, MEMORY = 60, 512 << 20
#: Exit codes of our own errors, and of success.
FINE = {0, 2, 3, 4, 5, 8, 9, 10}


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """End a test that hangs, and one that took too much memory."""

    def late(*_: object) -> None:
        raise TimeoutError(f"a case took more than {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, late)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) << 10
    assert grown < MEMORY


def dices(kind: str, count: int = CASES) -> Iterator[tuple[str, random.Random]]:
    """The cases of one kind, each with its name."""
    for number in range(count):
        signal.alarm(PATIENCE)
        name = f"{SEED} {kind} {number}"
        yield name, random.Random(name)


# -------------------------------------------------------------------------------------- mutations

ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**30, 10**400, "", "x", "../..", "\x1b[31m\n", "\ud800", "a" * 5000,
    [], {}, [[]], {"": None}, ["x", 1], float("nan"), "sha256:" + "0" * 64, "sha256:x", "é\0",
)  # fmt: skip
STRAY = (b"\xff", b"\0", b"\n", b'"', b"\\", b",", b"\xef\xbb\xbf")
LINES = (
    b"", b",,", b'"', b"a,sha256=,1", b"../../x,,", b"\xff\xfe", b"vllm/core.py,md5=x,-1",
    b"x" * 5000, b"\x1b[2J", b"vllm/core.py,sha256=AA,9e9", b"[[op]]", b"x = [", b"when = 1",
)  # fmt: skip


def changed(dice: random.Random, value: Any) -> Any:
    """A document with one thing in it changed, at any depth."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(list(value))
        if dice.random() < 0.1:
            return {name: held for name, held in value.items() if name != key}
        return {**value, key: changed(dice, value[key])}
    if isinstance(value, list) and value and dice.random() < 0.9:
        at = dice.randrange(len(value))
        if dice.random() < 0.15:
            return value * 2 if dice.random() < 0.5 else value[:at] + value[at + 1 :]
        return [*value[:at], changed(dice, value[at]), *value[at + 1 :]]
    return dice.choice(ODD)


def broken(dice: random.Random, data: bytes) -> bytes:
    """Bytes cut short, with others in them, or far too deep."""
    at = dice.randrange(len(data) + 1)
    return dice.choice((
        data[:at],
        data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :],
        data[:at] + dice.choice(STRAY) + data[at:],
        data[:at] + b"[" * 30_000 + data[at:],
        data[:at] + b"9" * 5000 + data[at:],
        data + data,
        b"",
    ))  # fmt: skip


def document(dice: random.Random, data: bytes) -> bytes:
    """A JSON document of somebody else's."""
    if dice.random() < 0.25:
        return broken(dice, data)
    value = json.loads(data)
    for _ in range(dice.choice((1, 1, 2, 4))):
        value = changed(dice, value)
    return json.dumps(value, ensure_ascii=dice.random() < 0.7).encode("utf-8", "surrogatepass")


def text(dice: random.Random, data: bytes) -> bytes:
    """A file of lines, as RECORD is one."""
    lines = data.split(b"\n")
    for _ in range(dice.choice((1, 1, 3))):
        at = dice.randrange(len(lines))
        lines[at] = dice.choice((*LINES, lines[at] * 2, lines[at][::-1]))
    return broken(dice, data) if dice.random() < 0.2 else b"\n".join(lines)


# --------------------------------------------------------------------------------------------- tars


@pytest.mark.parametrize("kind", ["headers", "layers", "bytes"])
def test_layers(tmp_path: Path, kind: str) -> None:
    """Read to the end, or refused with a reason."""
    refused = 0
    for name, dice in dices(kind, CASES * 8):
        if kind == "headers":
            blobs = [tarcases.random_blob(dice)]
        else:
            blobs = tarcases.random_layers(dice)
            if kind == "bytes":
                blobs = [broken(dice, blob) for blob in blobs]
        try:
            for blob in blobs:
                stream = Unpacked(io.BytesIO(blob), name)
                tar = LayerTar(stream, name)
                for _ in tar:
                    for _ in tar.chunks():
                        pass
                stream.finish()
            view_of(tmp_path / "layout", *blobs).below("/")
        except SparkBuildError:
            refused += 1
    assert 0 < refused < CASES * 8


# ---------------------------------------------------------------------------------------- documents


def fine(call: Call, name: str, *words: object) -> int:
    """Run a command, which ends with a word of its own; gives how."""
    done = call(*words)
    told = f"{name}: {words}: exit {done.code}\n{done.out[-600:]}\n{done.err[-600:]}"
    assert done.code in FINE, told
    assert "internal error" not in done.out + done.err, told
    return done.code


def blob_of(items: tuple[Item, ...]) -> tuple[bytes, str]:
    """A layer's blob, and the digest of its tar."""
    blob = packed(tar_of(*items))
    return blob, diff_id(blob)


@dataclass(frozen=True)
class Made:
    """A patched image: its documents and the files of its layers."""

    manifest: dict[str, Any]
    config: dict[str, Any]
    layers: tuple[tuple[Item, ...], ...]

    @cached_property
    def _blobs(self) -> dict[int, tuple[bytes, str]]:
        """Its own layers, by their identity: most cases change one of them or none."""
        return {id(items): blob_of(items) for items in self.layers}

    def put(self, root: Path, manifest: bytes | None = None, config: bytes | None = None,
            layers: tuple[tuple[Item, ...], ...] | None = None) -> None:  # fmt: skip
        """The image with another document in place of one of its own; all digests are right."""
        shutil.rmtree(root, ignore_errors=True)
        layout = LayoutDirectory(root)
        blobs = [self._blobs.get(id(items)) or blob_of(items) for items in layers or self.layers]
        held = {
            **self.config,
            "rootfs": {"type": "layers", "diff_ids": [name for _, name in blobs]},
        }
        about = {
            **self.manifest,
            "layers": [put(layout, blob, OCI_LAYER_GZIP).as_json() for blob, _ in blobs],
            "config": put(layout, config or json.dumps(held).encode(), OCI_CONFIG).as_json(),
        }
        data = manifest or json.dumps(about).encode()
        layout.put_manifest(RawManifest(data=data, media_type=OCI_MANIFEST), "")

    def documents(self, root: Path) -> tuple[bytes, bytes]:
        """Manifest and configuration, as they are written."""
        self.put(root)
        manifest = LayoutDirectory(root).manifest("")
        digest = manifest.json()["config"]["digest"]
        return manifest.data, (root / LayoutDirectory.blob_path(digest)).read_bytes()


def items_of(data: bytes) -> tuple[Item, ...]:
    """The entries of a layer blob."""
    tar = LayerTar(Unpacked(io.BytesIO(data), "layer"), "layer")
    kinds = {"file": b"0", "dir": b"5", "symlink": b"2", "hardlink": b"1"}
    return tuple(
        Item(member.path, b"".join(tar.chunks()), kinds[member.kind], member.link, member.mode)
        for member in tar
    )


@pytest.fixture
def made(call: Call, tmp_path: Path) -> Made:
    put_vllm(tmp_path / "base")
    done = call("image", "-l", "fix", "-b", f"oci:{tmp_path}/base", "-o", "oci:out", "--no-verify")
    assert done.code == 0, done.err
    root = tmp_path / "work" / "out"
    layout = LayoutDirectory(root)
    manifest = layout.manifest("").json()

    def blob(entry: dict[str, Any]) -> bytes:
        return (root / layout.blob_path(entry["digest"])).read_bytes()

    return Made(
        manifest=manifest,
        config=json.loads(blob(manifest["config"])),
        layers=tuple(items_of(blob(layer)) for layer in manifest["layers"]),
    )


COMMANDS: tuple[tuple[str, ...], ...] = (
    ("verify", "oci:image", "--level", "static,imports", "--json"),
    ("plan", "-l", "fix", "-b", "oci:image", "--json"),
)


@pytest.mark.parametrize("kind", ["manifest", "config", "index"])
def test_documents_of_an_image(call: Call, made: Made, tmp_path: Path, kind: str) -> None:
    root = tmp_path / "work" / "image"
    manifest, config = made.documents(root)
    codes: set[int] = set()
    for name, dice in dices(kind):
        if kind == "manifest":
            made.put(root, manifest=document(dice, manifest))
        elif kind == "config":
            made.put(root, config=document(dice, config) or b" ")
        else:
            made.put(root)
            index = root / "index.json"
            index.write_bytes(document(dice, index.read_bytes()))
        codes.update(fine(call, name, *words) for words in COMMANDS)
    assert len(codes) > 1, "nothing of it was noticed"


def test_files_of_an_image(call: Call, made: Made, tmp_path: Path) -> None:
    """METADATA and RECORD, plans and receipts, what says where an interpreter is."""
    root = tmp_path / "work" / "image"
    ends = (".json", "/RECORD", "/METADATA", "/WHEEL", ".py", ".cfg", ".pth")
    places = [
        (layer, at)
        for layer, items in enumerate(made.layers)
        for at, item in enumerate(items)
        if item.name.endswith(ends) and item.data
    ]
    assert {made.layers[layer][at].name.rpartition("/")[2] for layer, at in places} > {"RECORD"}
    for name, dice in dices("files", CASES * 2):
        layer, at = dice.choice(places)
        items = list(made.layers[layer])
        item = items[at]
        change = document if item.name.endswith(".json") else text
        items[at] = replace(item, data=change(dice, item.data))
        made.put(root, layers=(*made.layers[:layer], tuple(items), *made.layers[layer + 1 :]))
        for words in COMMANDS:
            fine(call, f"{name} {item.name}", *words)


def test_receipts_and_journals_of_a_directory(call: Call, tmp_path: Path) -> None:
    """Receipts and RECORD beside the packages, then verify, apply again and revert."""
    fresh = tmp_path / "fresh"
    write_tree(fresh, vllm_files())
    assert call("apply", fresh, "-l", "fix").code == 0
    files = [path.relative_to(fresh) for path in sorted(fresh.rglob("*")) if path.is_file()]
    noted = [path for path in files if path.suffix == ".json" or path.name == "RECORD"]
    assert {path.suffix for path in noted} == {".json", ""}
    for name, dice in dices("directory"):
        shutil.rmtree(tmp_path / "site", ignore_errors=True)
        shutil.copytree(fresh, tmp_path / "site")
        path = tmp_path / "site" / dice.choice(noted)
        change = document if path.suffix == ".json" else text
        path.write_bytes(change(dice, path.read_bytes()))
        fine(call, f"{name} {path.name}", "verify", f"dir:{tmp_path}/site", "--level", "static")
        fine(call, f"{name} {path.name}", "plan", "-l", "fix", "-b", f"dir:{tmp_path}/site")
        fine(call, f"{name} {path.name}", "apply", tmp_path / "site", "-l", "fix", "--dry-run")
        fine(call, f"{name} {path.name}", "revert", tmp_path / "site", "-l", "fix")


def test_a_lock(call: Call, made: Made, tmp_path: Path) -> None:
    root = tmp_path / "work" / "image"
    made.put(root)
    lock = tmp_path / "work" / "spark-build.lock"
    assert call("lock", "-l", "fix", "-b", "oci:image").code == 0
    data = lock.read_bytes()
    for name, dice in dices("lock"):
        lock.write_bytes(document(dice, data))
        fine(call, name, "plan", "-l", "fix", "-b", "oci:image", "--json")


def test_a_log(call: Call, tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = (
        b"(EngineCore pid=1) INFO 11-22 10:00:00 [nvfp4.py:12] Using 'CUTLASS' NvFp4 MoE backend\n"
    )
    for name, dice in dices("log"):
        log.write_bytes(text(dice, line * dice.randrange(1, 9)) + broken(dice, line))
        fine(call, name, "diagnose", log, "--json")


def test_layer_files(call: Call, made: Made, tmp_path: Path) -> None:
    made.put(tmp_path / "work" / "image")
    path = tmp_path / "patches" / "fix" / "layer.toml"
    data = path.read_bytes()
    for name, dice in dices("layer.toml"):
        path.write_bytes(text(dice, data))
        fine(call, name, "plan", "-l", "fix", "-b", "oci:image", "--json")
