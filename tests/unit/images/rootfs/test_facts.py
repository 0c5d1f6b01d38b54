"""What layers answered once stands in for them; what was not asked is read, and never guessed."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.values import sha256_hex
from builder.errors import RemoteError
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import OCI_LAYER_GZIP
from builder.images.rootfs.facts import CONTENT_BYTES, NotRecorded, RecordedFiles
from builder.images.rootfs.image import LayerCache
from builder.images.rootfs.index import Row
from builder.images.rootfs.view import Rootfs
from tests.unit.fakes import dist_files
from tests.unit.imagefiles import Item, folder, hardlink, packed, put, symlink, tar_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from builder.images.registry.model import Descriptor

LIB = dist_files("lib", "1", {"lib/a.py": "A = 1\n", "lib/b.py": "B = 1\n"})
SITE = "app/site-packages"
BASE = (
    tar_of(
        folder("app/", mode=0o2755, uid=7),
        *(Item(f"{SITE}/{path}", data) for path, data in LIB.items()),
        hardlink(f"{SITE}/lib/c.py", f"{SITE}/lib/a.py"),
        Item("app/gone/x", b"x"),
        Item("app/old", b"old"),
        symlink("link", "app"),
        Item("etc/passwd", b"root"),
    ),
    tar_of(
        Item("app/.wh.old"),
        symlink(f"{SITE}/lib/d.py", "a.py"),
        Item(f"{SITE}/lib/\udcff.py", b"odd"),
        Item("app/gone/.wh..wh..opq"),
    ),
)
TOP = tar_of(
    *(folder(path) for path in ("app", SITE, f"{SITE}/lib", f"{SITE}/new")),
    Item(f"{SITE}/lib/b.py", b"B = 2\n"),
    Item(f"{SITE}/lib/.wh.c.py"),
    Item(f"{SITE}/new/n.py", b"N = 1\n"),
    hardlink("app/again.py", f"{SITE}/lib/b.py"),
)
#: What is asked of an image when it is noted, and again.
QUESTIONS: tuple[Callable[[Rootfs], object], ...] = (
    lambda view: view.names("/app"),
    lambda view: view.names("/link/site-packages"),
    lambda view: view.names(f"/{SITE}/lib"),
    lambda view: view.below(f"/{SITE}/lib").keys(),
    lambda view: {path: kinds(found) for path, found in view.below(f"/{SITE}/lib").items()},
    lambda view: view.realpath("/link/site-packages/lib"),
    lambda view: view.stat("/app"),
    lambda view: view.lstat("/link"),
    lambda view: view.lstat("/app/old"),
    lambda view: view.stat("/app/gone/x"),
    lambda view: view.stat("/none/at/all"),
    lambda view: view.read(f"/{SITE}/lib/a.py"),
    lambda view: view.read(f"/{SITE}/lib/d.py"),
    lambda view: view.read(f"/{SITE}/lib-1.dist-info/RECORD"),
)


class Reads(LayoutDirectory):
    """A layout that says which of its blobs were read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: list[str] = []

    def open(self, blob: Descriptor) -> Any:
        self.read.append(blob.digest)
        return super().open(blob)


@pytest.fixture
def layout(tmp_path: Path) -> Reads:
    return Reads(tmp_path / "layout")


def blobs(layout: Reads, *tars: bytes) -> list[Descriptor]:
    return [put(layout, packed(tar), OCI_LAYER_GZIP) for tar in tars]


def noted(layout: Reads, *tars: bytes, through_json: bool = True) -> RecordedFiles:
    """The facts that the questions leave behind."""
    layers = blobs(layout, *tars)
    facts = RecordedFiles([layer.digest for layer in layers])
    view = Rootfs(layers, LayerCache(layout), notes=facts)
    for question in QUESTIONS:
        question(view)
    layout.read.clear()
    return RecordedFiles.parse(json.loads(json.dumps(facts.as_json()))) if through_json else facts


def kinds(value: object) -> object:
    """An answer without the number of the layer, and a file by what it holds."""
    row = getattr(value, "row", None)
    return value if row is None else (row.kind, row.size, row.mode, row.uid, row.sha256)


@pytest.mark.parametrize("top", [(), (TOP,)], ids=["base", "patched"])
def test_facts_give_the_same_answers_without_reading_layers(
    layout: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top: tuple[bytes, ...]
) -> None:
    facts = noted(layout, *BASE)
    layers = blobs(layout, *BASE, *top)
    plain = Rootfs(layers, LayerCache(layout))
    expected = [kinds(question(plain)) for question in QUESTIONS]
    layout.read.clear()
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "empty"))
    view = Rootfs(layers, LayerCache(layout), facts)
    assert [kinds(question(view)) for question in QUESTIONS] == expected
    assert layout.read == [layer.digest for layer in layers[len(BASE) :]]


def test_facts_survive_a_round_trip(layout: Reads) -> None:
    facts = noted(layout, *BASE, through_json=False)
    again = RecordedFiles.parse(json.loads(json.dumps(facts.as_json())))
    assert again.as_json() == facts.as_json()
    assert again.lacks(facts) == facts.lacks(again) == 0
    sha256 = sha256_hex(LIB["lib/b.py"])
    assert sha256 not in json.dumps(facts.as_json()), "RECORD says it already"
    row = again.row(f"{SITE}/lib/b.py")
    assert row is not None
    assert row.sha256 == sha256


@pytest.mark.parametrize(
    "question",
    [
        lambda view: view.read("/etc/passwd"),
        lambda view: view.names("/etc"),
        lambda view: list(view.below("/etc")),
        lambda view: view.read(f"/{SITE}/lib/b.py"),
    ],
    ids=["entry", "names", "below", "content"],
)
def test_facts_that_are_missing_are_read_from_layers(
    layout: Reads,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    question: Callable[[Rootfs], object],
) -> None:
    facts = noted(layout, *BASE)
    layers = blobs(layout, *BASE)
    expected = question(Rootfs(layers, LayerCache(layout)))
    assert expected
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "empty"))
    layout.read.clear()
    view = Rootfs(layers, LayerCache(layout), facts)
    assert question(view) == expected
    assert layout.read
    assert "reading its layers" in capsys.readouterr().err
    assert question(view) == expected, "from the layers, now and then"


def test_facts_that_the_layers_contradict(
    layout: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a file are wanted that has another sha256 in its layer than the facts say."""
    facts = noted(layout, *BASE)
    path = f"{SITE}/lib/b.py"
    facts.note(path, Row(path, "file", size=6, sha256="0" * 64))
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "empty"))
    view = Rootfs(blobs(layout, *BASE), LayerCache(layout), facts)
    with pytest.raises(RemoteError, match="does not match the lock's facts about this base"):
        view.read(f"/{path}")
    view = Rootfs(blobs(layout, *BASE), LayerCache(layout), facts)
    with pytest.raises(RemoteError, match="does not match the lock's facts about this base"):
        view.copy(f"/{path}", io.BytesIO())


def test_bytes_come_from_facts_or_from_a_layer(
    layout: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = noted(layout, *BASE)
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "empty"))
    view = Rootfs(blobs(layout, *BASE), LayerCache(layout), facts)
    out = io.BytesIO()
    assert view.copy(f"/{SITE}/lib/a.py", out)
    assert not layout.read
    assert view.copy(f"/{SITE}/lib/b.py", out)
    assert layout.read
    assert out.getvalue() == b"A = 1\nB = 1\n"


def test_missing_facts_are_not_an_answer() -> None:
    facts = RecordedFiles(["sha256:x"])
    facts.note("a", Row("a", "dir"))
    facts.note("f", Row("f", "file"))
    facts.note("no", None)
    facts.names["n"] = ["one"]
    facts.note_below("w", {"x": Row("w/x", "dir")})
    for path in ("no/more", "f/below", "n/two", "n/two/three", "w/y", "w/x/y"):
        assert facts.row(path) is None, path
    for path in ("", "a/b", "other", "n/one", "n/one/x"):
        with pytest.raises(NotRecorded):
            facts.row(path)
    for directory in ("a", "n/one", ""):
        with pytest.raises(NotRecorded):
            facts.children(directory)
        with pytest.raises(NotRecorded):
            list(facts.below(directory))
    assert not list(facts.children("w/x"))
    assert not list(facts.children("f"))
    assert not list(facts.below("no"))


def test_facts_of_others_are_merged() -> None:
    one, other = RecordedFiles(["sha256:x"]), RecordedFiles(["sha256:x"])
    assert one.lacks(other) == 0
    other.note("a", None)
    other.names["n"] = ["x"]
    other.note_below("w", {})
    other.note_content(b"bytes")
    assert one.lacks(other) == 4
    one.note("a", Row("a", "dir"))
    assert one.lacks(other) == 4, "another answer is none"
    one.add(other)
    assert one.lacks(other) == 0


def test_large_files_are_not_stored() -> None:
    facts = RecordedFiles(["sha256:x"])
    facts.note_content(bytes(CONTENT_BYTES + 1))
    assert not facts.contents
    facts.note_content(bytes(CONTENT_BYTES))
    assert len(facts.contents) == 1


def _document(**changes: object) -> Any:
    facts = RecordedFiles(["sha256:x"])
    facts.note("a", Row("a", "file", sha256=sha256_hex(b"\xff")))
    facts.note_content(b"\xff")
    return {**facts.as_json(), **changes}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        _document(schema=2),
        _document(rows=[]),
        _document(rows={"a": ["file"]}),
        _document(rows={"a": ["socket", 0, 0, 0, 0, "", ""]}),
        _document(rows={"a": ["file", 0, 0, 0, 0, "", "="]}),
        _document(contents={"0" * 64: "text"}),
        _document(contents={"0" * 64: {"base64": "!"}}),
        _document(names={"a": 3}),
    ],
)
def test_a_malformed_document_is_refused(value: object) -> None:
    assert RecordedFiles.parse(_document()).contents, "as it should be"
    with pytest.raises(ValueError, match=r"."):
        RecordedFiles.parse(value)
