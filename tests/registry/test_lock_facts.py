"""What a lock holds of a base spares the reading of its layers, on a machine that has no cache."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.__main__ import run
from builder.applier.values import sha256_hex
from builder.common.reference import Ref
from builder.images.registry.copy import Locations, copy_image
from builder.images.registry.layout import LayoutDirectory
from builder.layers.lock import NAME
from builder.proof import checks
from tests.countproxy import CountProxy
from tests.unit.fakes import REPLACE, layer_text, write_tree
from tests.unit.imagefiles import SITE, Item, folder, packed, put_index, put_vllm, tar_of
from tests.wheels.fakeindex import FakeIndex, noise

from .conftest import QUICK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from . import servers

#: What an image base may cost with a lock, both ways together.
LITTLE = 100_000
#: Random bytes of the base: reading it cannot be taken for anything else.
FILLER = 3_000_000
FIX = layer_text(REPLACE)


@dataclass
class Said:
    """What a command left behind, and what it moved."""

    code: int
    json: Any
    err: str
    sent: int
    received: int

    @property
    def moved(self) -> int:
        """Bytes of both directions, headers included."""
        return self.sent + self.received


@dataclass
class Project:
    """A directory with a lock; commands in it talk to the registry through a counting proxy."""

    root: Path
    ref: str
    proxy: CountProxy
    index: FakeIndex
    call: Callable[..., Said]

    @property
    def name(self) -> str:
        """The repository's address in front of its tag."""
        return self.ref.removeprefix("docker://").rpartition(":")[0]

    def cold(self, *words: str) -> Said:
        """Run a command with an empty cache."""
        shutil.rmtree(self.root.parent / "cache", ignore_errors=True)
        return self.call(*words)

    def image(self, tag: str, *words: str) -> Said:
        """Patch the base in its registry, with an empty cache."""
        place = ("-t", f"{self.name}-{tag}:1")
        common = ("-l", "fix", "-b", self.ref, "--push", "--no-verify")
        return self.cold("image", *common, *place, *words)

    @property
    def lock(self) -> Any:
        """The lock as JSON."""
        return json.loads((self.root / NAME).read_bytes())

    @property
    def facts(self) -> list[Path]:
        """The files of facts beside the lock."""
        return sorted((self.root / f"{NAME}.d").glob("*"))


@pytest.fixture
def project(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Project]:
    write_tree(tmp_path / "patches", {"fix/layer.toml": FIX.encode()})
    monkeypatch.setenv("SPARK_BUILD_PATCHES", str(tmp_path / "patches"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with CountProxy(registry.address) as proxy, FakeIndex() as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)

        def called(*words: str) -> Said:
            capsys.readouterr()
            proxy.take()
            code = run([*words, "--json"])
            sent, received = proxy.take()
            out, err = capsys.readouterr()
            return Said(code, json.loads(out), err, sent, received)

        name = tmp_path.name.strip("_").replace("_", "-")[-20:].strip("-")
        where = _put_base(tmp_path / "base", f"{proxy.address}/{name}/vllm:v1")
        yield Project(tmp_path / "work", f"docker://{where}", proxy, index, called)


def _put_base(layout: Path, where: str) -> str:
    """Put images for two platforms, of other layers each, into a registry, and give the name back.

    Folders are not root's, and a module has a compiled file: what the new layers depend on.
    """
    stale = f"{SITE}/vllm/__pycache__/core.cpython-312.pyc"
    parts = {}
    for name in ("arm64", "amd64"):
        items = [folder(f"{SITE}/vllm/", mode=0o2775, uid=1000), Item(stale, name.encode())]
        filler = packed(tar_of(Item("opt/filler", noise(len(name + where), FILLER))))
        parts[name] = put_vllm(layout, filler, items=items, architecture=name)
    put_index(layout, parts, "v1")
    with Locations(QUICK) as places:
        there = places.open(Ref(where))
        copy_image(LayoutDirectory(layout), "v1", there.image, there.reference)
    return where


@pytest.fixture
def locked(project: Project) -> Project:
    """Locked for arm64, which is what a Spark takes."""
    said = project.call("lock", "-l", "fix", "-b", project.ref)
    assert said.code == 0, said.err
    assert said.received > FILLER, "it was read"
    return project


# ------------------------------------------------------------------------------------ what it costs


def test_a_locked_base_is_not_read_again(project: Project) -> None:
    without = project.image("without")
    assert without.code == 0, without.err
    assert without.received > FILLER
    assert project.call("lock", "-l", "fix", "-b", project.ref).code == 0
    project.index.requests.clear()

    plan = project.cold("plan", "-l", "fix", "-b", project.ref, "--locked")
    assert (plan.code, plan.json["plan_digest"]) == (0, without.json["plan_digest"])
    assert plan.moved < 10_000, "a manifest, an index and a configuration"
    image = project.image("with", "--locked")
    assert (image.code, image.json["digest"]) == (0, without.json["digest"])
    added = image.json["added_bytes"]
    assert image.moved - added < 30_000, "the base, its mounts, and the new manifests"
    assert added < LITTLE + 60_000, "our layers: one patched file, and what verifies it there"
    assert not project.index.requests, "nor was the package index asked"


def test_a_built_image_is_verified_without_reading_the_base(locked: Project) -> None:
    image = locked.image("verified", "--locked").json
    target = f"docker://{image['image']}@{image['digest']}"
    for more in ("--locked", "--platform=linux/arm64"):
        said = locked.cold("verify", target, "--level", "static", more)
        assert said.code == 0, said.err
        assert said.json["passed"]
        assert said.moved < LITTLE + image["added_bytes"], "our layers are read, the base's are not"
        assert "reading its layers" not in said.err


def test_outside_the_project_the_layers_are_read(
    locked: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = locked.image("outside", "--locked").json
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    target = f"docker://{image['image']}@{image['digest']}"
    said = locked.cold("verify", target, "--level", "static")
    assert (said.code, said.received > FILLER) == (0, True)


def test_each_platform_has_facts_of_its_own(locked: Project) -> None:
    words = ("-l", "fix", "-b", locked.ref)
    first = locked.facts
    said = locked.cold("lock", *words, "--platform", "linux/arm64")
    assert (said.code, said.moved < 10_000) == (0, True)
    assert locked.facts == first, "the same image, whatever it was asked by"
    assert locked.cold("lock", *words, "--platform", "linux/amd64").received > FILLER
    assert len(locked.facts) == 2
    said = locked.image("all", "--all-platforms", "--locked")
    assert said.code == 0, said.err
    assert len(said.json["plans"]) == 2
    assert said.moved < LITTLE + said.json["added_bytes"]


def test_a_mirror_of_the_base_is_known_too(locked: Project) -> None:
    """Facts are about layers, wherever those lie; this is not the request that is locked."""
    mirror = f"{locked.name}-mirror:v1"
    with Locations(QUICK) as places:
        here, there = places.open(Ref(locked.ref)), places.open(Ref(mirror))
        copy_image(here.image, here.reference, there.image, there.reference)
    said = locked.cold("plan", "-l", "fix", "-b", f"docker://{mirror}")
    assert said.code == 0, said.err
    assert said.moved < 10_000


def test_a_layout_is_known_too(locked: Project, tmp_path: Path) -> None:
    """A local base: its blobs could be gone, and still be planned for."""
    for blob in (tmp_path / "base/blobs/sha256").iterdir():
        if blob.stat().st_size > FILLER:
            blob.unlink()
    said = locked.cold("plan", "-l", "fix", "-b", f"oci:{tmp_path / 'base'}:v1")
    assert said.code == 0, said.err
    assert said.json["base"]["packages"] == {"vllm": "0.20.1"}


def test_an_index_that_moved_on_is_read(locked: Project, tmp_path: Path) -> None:
    made = put_vllm(tmp_path / "new", items=[folder("opt/old/")], architecture="arm64")
    put_index(tmp_path / "new", {"arm64": made}, "v1")
    with Locations(QUICK) as places:
        there = places.open(Ref(locked.ref))
        copy_image(LayoutDirectory(tmp_path / "new"), "v1", there.image, there.reference)
    was = locked.lock["locked"].popitem()[1]["base"]["digest"]
    said = locked.cold("plan", "-l", "fix", "-b", locked.ref)
    assert said.code == 0
    assert said.json["base"]["digest"] != was
    assert f"moved from {was[:19]}" in said.err
    held = locked.cold("plan", "-l", "fix", "-b", locked.ref, "--locked")
    assert (held.code, held.json["base"]["digest"]) == (0, was)
    assert held.moved < 20_000, "the locked one is known, whatever the tag names"


# --------------------------------------------------------------------------- what cannot be used


def _edited(path: Path) -> None:
    """The facts say another content of a file than the base has, with its true sha256."""
    value = json.loads(gzip.decompress(path.read_bytes()))
    (name,) = (n for n, text in value["contents"].items() if text.startswith("BACKEND"))
    text = value["contents"].pop(name).replace("run()", "ran()")
    value["contents"][sha256_hex(text.encode())] = text
    path.write_bytes(gzip.compress(json.dumps(value).encode()))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGED: dict[str, Callable[[Path], None]] = {
    "edited": _edited,
    "cut": _cut,
    "gone": Path.unlink,
    "a-folder": _folder,
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED.keys())
def test_facts_that_are_damaged_are_not_used(
    locked: Project, damage: Callable[[Path], None]
) -> None:
    words = ("-l", "fix", "-b", locked.ref)
    good = locked.call("plan", *words).json
    (file,) = locked.facts
    damage(file)
    said = locked.cold("plan", *words)
    assert (said.code, said.json) == (0, good)
    assert f"{file}, which the lock pins, cannot be used" in said.err
    assert said.received > FILLER, "read instead"
    strict = locked.cold("plan", *words, "--locked")
    assert strict.code == 9
    assert "which the lock pins, cannot be used" in strict.json["error"]["message"]
    assert locked.call("lock", "--check").code == 9
    if file.is_dir():
        file.rmdir()
    assert locked.call("lock").code == 0
    assert locked.cold("plan", *words, "--locked").moved < 10_000


def test_facts_of_another_base_are_not_used(locked: Project, tmp_path: Path) -> None:
    """Somebody pinned the file of another image: its sha256 holds, and it is about other layers."""
    (file,) = locked.facts
    value = json.loads(gzip.decompress(file.read_bytes()))
    value["layers"][0] = f"sha256:{'0' * 64}"
    data = gzip.compress(json.dumps(value).encode())
    file.write_bytes(data)
    text = (locked.root / NAME).read_text()
    (entry,) = locked.lock["locked"].values()
    pinned = entry["base"]["facts"]["sha256"]
    (locked.root / NAME).write_text(text.replace(pinned, sha256_hex(data)))
    said = locked.cold("plan", "-l", "fix", "-b", locked.ref)
    assert said.code == 0
    assert "it belongs to another image; reading the layers instead" in said.err
    assert said.received > FILLER


@pytest.mark.parametrize("name", ["../base-0123456789ab.json.gz", "/etc/passwd", "x", 3])
def test_a_pin_cannot_name_a_file_elsewhere(locked: Project, name: object) -> None:
    lock = locked.lock
    (entry,) = lock["locked"].values()
    entry["base"]["facts"]["file"] = name
    (locked.root / NAME).write_text(json.dumps(lock))
    said = locked.cold("plan", "-l", "fix", "-b", locked.ref)
    assert said.code == 9
    assert "cannot be used" in said.json["error"]["message"]


def test_missing_facts_are_read_from_the_layers(locked: Project, tmp_path: Path) -> None:
    """The layer changes another file by now: its content is not in the facts, and is no guess."""
    other = 'op = "replace"\nfile = "vllm/envs.py"\nold = "import os"\nnew = "import sys, os"\n'
    write_tree(tmp_path / "patches", {"fix/layer.toml": layer_text(other).encode()})
    said = locked.cold("plan", "-l", "fix", "-b", locked.ref)
    assert said.code == 0, said.err
    assert said.json["layers"][0]["state"] == "needed"
    assert "the lock has no facts about" in said.err
    assert "vllm/envs.py" in said.err
    assert said.received > 1000
    assert locked.cold("plan", "-l", "fix", "-b", locked.ref, "--locked").code == 9


def test_a_published_image_is_verified_without_reading_the_base(
    locked: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level dispatch reads vLLM's files wherever they are, so it is left out here."""
    monkeypatch.setattr(checks, "DEFAULT_LEVELS", ("static",))
    image = locked.image("source", "--locked").json
    source = f"{image['image']}@{image['digest']}"
    words = ("publish", source, "--to", f"{locked.name}-published", "--require", "static")
    said = locked.cold(*words)
    assert said.code == 0, said.err
    assert said.json["results"][0]["verified"] is True
    assert said.moved < 3 * image["added_bytes"] + LITTLE, "our layers are read more than once"


# ------------------------------------------------------------------------------ what is written


def test_locking_again_changes_nothing_and_reads_nothing(locked: Project) -> None:
    (file,) = locked.facts
    before = file.read_bytes(), (locked.root / NAME).read_bytes()
    said = locked.cold("lock")
    assert said.moved < 10_000
    assert said.json["written"] is False
    assert (file.read_bytes(), (locked.root / NAME).read_bytes()) == before
    assert locked.cold("lock", "--check").code == 0
    assert locked.cold("lock", "--upgrade").received > FILLER, "everything is asked anew"
    assert (file.read_bytes(), (locked.root / NAME).read_bytes()) == before


def test_unused_files_are_removed(locked: Project, tmp_path: Path) -> None:
    (file,) = locked.facts
    other = file.with_name("notes.txt")
    other.write_text("mine")
    lock = locked.lock
    (entry,) = lock["locked"].values()
    del entry["base"]["facts"]
    (locked.root / NAME).write_text(json.dumps(lock))
    write_tree(tmp_path / "patches", {"more/layer.toml": FIX.encode()})
    assert locked.call("lock", "-l", "more", "-b", f"oci:{tmp_path / 'base'}:v1").code == 0
    assert {path.name for path in locked.facts} == {file.name, "notes.txt"}
    (locked.root / NAME).write_text(json.dumps({**lock, "locked": {}}))
    write_tree(tmp_path / "patches", {"env/layer.toml": FIX.encode()})
    assert locked.call("lock", "-l", "env", "-b", locked.ref, "--platform", "linux/amd64").code == 0
    assert file not in locked.facts, "but the one of the other platform, and what is not ours"
    assert {path.name.partition("-")[0] for path in locked.facts} == {"base", "notes.txt"}


def test_two_requests_share_the_facts_of_a_base(locked: Project, tmp_path: Path) -> None:
    more = layer_text('op = "env"\nname = "VLLM_NVFP4_GEMM_BACKEND"\nvalue = "marlin"\n')
    write_tree(tmp_path / "patches", {"env/layer.toml": more.encode()})
    assert locked.cold("lock", "-l", "env", "-b", locked.ref).code == 0
    assert len(locked.facts) == 1
    pins = [entry["base"]["facts"] for entry in locked.lock["locked"].values()]
    assert len(pins) == 2
    assert pins[0] == pins[1]
    for layer in ("env", "fix"):
        said = locked.cold("plan", "-l", layer, "-b", locked.ref, "--locked")
        assert (said.code, said.moved < 10_000) == (0, True)
