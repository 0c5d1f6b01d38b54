"""An image is added to a layout: other images and other files stay, whatever happens."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.reference import Ref
from builder.errors import UsageError
from builder.images.engines.model import BuildRequest, BuiltImage
from builder.images.engines.oci import OciEngine, base_bytes
from builder.images.registry.copy import layout_place
from builder.images.registry.layout import (
    REF_NAME,
    LayoutDirectory,
    LayoutWriter,
    add_image,
    check_layout_target,
    work_folder,
)
from builder.images.registry.model import OCI_MANIFEST, Descriptor, RawManifest, sha256_digest
from tests.unit.fakeregistry import manifest
from tests.unit.fakes import BACKEND, copy_op, fake_base, make_layer, make_plan_of, vllm_files
from tests.unit.imagefiles import put_vllm
from tests.unit.images.engines.test_patched import base_of

if TYPE_CHECKING:
    from builder.common.plan import BuildPlan
    from tests.unit.caller import Call


def plan_of(text: str) -> BuildPlan:
    fix = make_layer("fix", BACKEND, copy_op("vllm/new.py", text.encode()))
    return make_plan_of(fake_base(vllm_files()), fix)


def build(target: Path, text: str, name: str) -> BuiltImage:
    return OciEngine().build(BuildRequest(plan=plan_of(text), tag=name, output=target))


def names(layout: Path) -> dict[str, str]:
    entries = LayoutDirectory(layout).index()["manifests"]
    return {e.get("annotations", {}).get(REF_NAME, ""): e["digest"] for e in entries}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def blobs_of(layout: Path, digest: str) -> set[str]:
    value = LayoutDirectory(layout).manifest(digest).json()
    return {digest, value["config"]["digest"], *(d["digest"] for d in value["layers"])}


def blobs_in(layout: Path) -> set[str]:
    return {f"sha256:{path.name}" for path in (layout / "blobs" / "sha256").iterdir()}


def test_another_name_is_added_and_the_first_image_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    one = build(out, "1", "me/a:1")
    (out / "notes.txt").write_text("precious")
    before = snapshot(out)
    two = build(out, "2", "me/b:1")
    after = snapshot(out)
    assert names(out) == {"me/a:1": one.digest, "me/b:1": two.digest}
    del before["index.json"]
    assert before.items() <= after.items()
    assert blobs_in(out) == blobs_of(out, one.digest) | blobs_of(out, two.digest)
    assert two.target == Ref(f"oci:{out}@{two.digest}")
    assert not list(out.glob(".*"))


def test_the_same_name_is_replaced_with_its_unshared_blobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    build(out, "1", "me/a:1")
    same, kept = build(out, "same", "me/c:1"), build(out, "3", "me/b:1")
    build(out, "same", "me/a:1")  # also me/c:1
    assert names(out)["me/a:1"] == same.digest
    capsys.readouterr()
    new = build(out, "2", "me/a:1")
    assert f"me/a:1 was {same.digest} in {out}, and is replaced" in capsys.readouterr().err
    assert names(out) == {"me/a:1": new.digest, "me/b:1": kept.digest, "me/c:1": same.digest}
    wanted = set().union(*(blobs_of(out, made.digest) for made in (new, kept, same)))
    assert blobs_in(out) == wanted


def test_foreign_files_in_a_layout_are_kept(tmp_path: Path) -> None:
    """Images without a name, artifacts about ours, blobs of no index, keys of the index itself."""
    out = tmp_path / "out"
    old = build(out, "1", "me/a:1")
    layout = LayoutDirectory(out)
    stray = b"a blob that nothing names"
    for data in (stray, b"{}", b"config"):
        (out / layout.blob_path(sha256_digest(data))).write_bytes(data)
    theirs = RawManifest(data=manifest(), media_type=OCI_MANIFEST)
    layout.put_manifest(theirs, "")
    subject = layout.manifest(old.digest).descriptor.as_json()
    about = RawManifest(data=manifest(subject=subject), media_type=OCI_MANIFEST)
    layout.put_manifest(about, "")
    index = layout.index()
    odd = {"mediaType": "text/plain", "digest": "sha512:" + "0" * 128, "size": 1}
    index = {**index, "annotations": {"a": "b"}, "manifests": [*index["manifests"], odd]}
    (out / "index.json").write_text(json.dumps(index))
    new = build(out, "2", "me/a:1")
    listed = layout.index()
    assert listed["annotations"] == {"a": "b"}
    assert odd in listed["manifests"]
    assert {e["digest"] for e in listed["manifests"]} >= {new.digest, theirs.digest, about.digest}
    # what the artifact is about is needed by it
    assert blobs_in(out) >= {sha256_digest(stray), theirs.digest, *blobs_of(out, old.digest)}


def test_an_unreadable_image_is_replaced_and_nothing_deleted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old = build(out, "1", "me/a:1")
    (out / LayoutDirectory.blob_path(old.digest)).write_text("damaged")
    before = blobs_in(out)
    build(out, "2", "me/a:1")
    assert blobs_in(out) > before


@pytest.mark.parametrize("text", ["{", "[]", '{"manifests": {}}'])
def test_a_layout_with_a_damaged_index_is_unchanged(tmp_path: Path, text: str) -> None:
    build(tmp_path / "out", "1", "me/a:1")
    (tmp_path / "out" / "index.json").write_text(text)
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match="has no list of manifests"):
        build(tmp_path / "out", "2", "me/b:1")
    assert snapshot(tmp_path) == before


def test_invalid_targets(tmp_path: Path) -> None:
    check_layout_target(tmp_path / "absent")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "index.json").write_text('{"manifests": []}')  # any program's
    for name in ("dangling", "file", "full"):
        with pytest.raises(UsageError, match="so no image can be written there"):
            check_layout_target(tmp_path / name)


def test_an_empty_folder_stays_the_same_folder(tmp_path: Path) -> None:
    """It may be a mounted one, which nothing can take the place of."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    number = (tmp_path / "disk").stat().st_ino
    made = build(tmp_path / "out", "1", "me/a:1")
    assert (tmp_path / "disk").stat().st_ino == number
    assert (tmp_path / "out").is_symlink()
    assert names(tmp_path / "disk") == {"me/a:1": made.digest}


@pytest.mark.parametrize("there", [None, "empty", "layout"])
def test_a_failure_at_any_step_leaves_the_target_unchanged(
    tmp_path: Path, there: str | None
) -> None:
    out = tmp_path / "out"
    if there == "empty":
        out.mkdir()
    if there == "layout":
        build(out, "1", "me/a:1")
    before, folders = snapshot(tmp_path), sorted(tmp_path.rglob("*"))
    real = Path.replace
    number = 0
    while True:
        number += 1
        count = 0

        def replace(path: Path, target: Any, last: int = number) -> Path:
            nonlocal count
            count += out in Path(target).parents and ".spark-build-" not in str(target)
            if count == last:
                raise KeyboardInterrupt
            return real(path, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "replace", replace)
            try:
                build(out, "2", "me/a:1")
            except KeyboardInterrupt:
                assert snapshot(tmp_path) == before
                assert sorted(tmp_path.rglob("*")) == folders
            else:
                break
    assert number > (4 if there else 0)


def test_an_interruption_before_the_folder_is_locked_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives after ``mkdir``; the exception is kept, as the end of a program does."""
    target = tmp_path / "out"
    lock = fcntl.flock

    def interrupted(handle: int, how: int) -> None:
        if list(tmp_path.glob(".out.spark-build*")):
            raise KeyboardInterrupt
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept, work_folder(target):
        pytest.fail("it was not interrupted")
    assert kept.tb is not None
    assert not list(tmp_path.glob(".out.spark-build*"))


def test_existing_blobs_are_not_fetched_again(tmp_path: Path) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    for folder in (made, out):
        (folder / "blobs" / "sha256").mkdir(parents=True)
    data = b"twenty gigabytes"
    blob = Descriptor(media_type="", digest=sha256_digest(data), size=len(data))
    path = out / LayoutDirectory.blob_path(blob.digest)
    filling = LayoutWriter(made, out)
    assert not filling.has(blob.digest)
    path.write_bytes(data)
    assert filling.has(blob.digest)
    path.unlink()  # as another run may, that replaces the image that had it
    assert filling.has(blob.digest)


def test_two_entries_are_not_one_image(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"manifests": [{}, {}]}')
    (tmp_path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    with pytest.raises(ValueError, match="too many values"):
        add_image(tmp_path, tmp_path / "out", "x")


def test_disk_space_is_needed_only_for_missing_blobs(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    plan = make_plan_of(base, make_layer("fix", BACKEND))
    out = tmp_path / "out"
    request = BuildRequest(plan=plan, tag="me/a:1", output=out, base=base)
    assert base_bytes(request) > 0
    OciEngine().build(request)
    assert base_bytes(request) == 0


# ---------------------------------------------------------------------------- on the command line


def test_several_images_in_one_layout(call: Call, tmp_path: Path) -> None:
    put_vllm(tmp_path / "base")
    image = ("image", "-l", "fix", "-b", f"oci:{tmp_path}/base", "--no-verify")
    first = call(*image, "-o", "oci:out:me/a:1")
    second = call(*image, "-o", "oci:out", "-t", "me/b:1", "--single-layer")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "contains 2 images; this one is named me/b:1" in second.err
    assert second.out.startswith("oci:out@sha256:")
    assert set(names(tmp_path / "work" / "out")) == {"me/a:1", "me/b:1"}
    asked = call("verify", "oci:out", "--level", "static")
    assert asked.code == 2
    assert "has 2 images; its names: me/a:1, me/b:1" in asked.err
    assert "try: spark-build verify oci:out:me/a:1" in asked.err
    for name in ("oci:out:me/a:1", second.out.strip()):
        assert call("verify", name, "--level", "static").code == 0
    (tmp_path / "work" / "full").mkdir()
    (tmp_path / "work" / "full" / "f").touch()
    early = call("image", "-l", "fix", "-b", "oci:nowhere", "-o", "oci:full")
    assert early.code == 2
    assert "is not an OCI layout, so no image can be written there" in early.err, (
        "before the base is read"
    )
    for words, message in (
        (["-o", "oci:out:me/a:1", "-t", "me/b:1"], "are two names"),
        (["-o", second.out.strip()], "give a name without a digest"),
    ):
        refused = call(*image, *words)
        assert refused.code == 2
        assert message in refused.err


@pytest.mark.parametrize(
    ("text", "folder", "name"),
    [
        ("oci:a:b/out:me/x:1", "a:b/out", "me/x:1"),
        ("oci:a:b/out", "a:b/out", ""),
        ("oci:a:b/out@sha256:" + "0" * 64, "a:b/out", "sha256:" + "0" * 64),
        ("oci:u@home/new", "u@home/new", ""),
        ("oci:new:x", "new", "x"),
    ],
)
def test_a_directory_and_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, folder: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a:b/out").mkdir(parents=True)
    assert layout_place(Ref(text)) == (Path(folder), name)
