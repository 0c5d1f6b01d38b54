"""The embedded engine: the same plan gives the same bytes, and a failure leaves nothing behind."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import hashlib
import io
import json
import os
import random
import tarfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.trees import Content
from builder.common.paths import cache_dir
from builder.errors import BuildFailed, SparkBuildError, UsageError
from builder.images.engines import metadata
from builder.images.engines.choice import get_engine
from builder.images.engines.model import BuildRequest, BuiltImage
from builder.images.engines.oci import OciEngine, layout_digest, read_layout
from builder.images.registry.model import sha256_digest
from builder.images.rootfs.tar import ITS_OWN, tar_layer
from tests.unit.fakes import (
    BACKEND,
    copy_op,
    dist_files,
    env_op,
    fake_base,
    make_layer,
    make_plan_of,
    vllm_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.common.plan import BuildPlan

SITE = "/usr/lib/python3/dist-packages"
FILES = vllm_files() | dist_files("lib", "1", {"lib/__init__.py": "", "lib/x.py": ""})


def make_plan(kind: str = "pypi") -> BuildPlan:
    return make_plan_of(
        fake_base(FILES, kind),
        make_layer("fix", BACKEND, copy_op("vllm/new.py", b"N = 1\n")),
        make_layer("clean", {"op": "remove", "distribution": "lib"}),
        make_layer("set", env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin")),
        make_layer("idle", BACKEND, package="sglang"),
    )


PLAN = make_plan()


def build(target: Path, plan: BuildPlan = PLAN) -> BuiltImage:
    return OciEngine().build(BuildRequest(plan=plan, tag="spark/test:1", output=target))


def blob(layout: Path, descriptor: dict[str, Any]) -> bytes:
    algorithm, _, name = str(descriptor["digest"]).partition(":")
    return (layout / "blobs" / algorithm / name).read_bytes()


def manifest_of(layout: Path) -> dict[str, Any]:
    index = json.loads((layout / "index.json").read_bytes())
    manifest: dict[str, Any] = json.loads(blob(layout, index["manifests"][0]))
    return manifest


# ------------------------------------------------------------------------------------- the layout


def test_two_builds_in_two_places_are_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(tmp_path / "a")
    os.umask(os.umask(0o077))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setattr("time.time", lambda: 4e9)
    second = build(tmp_path / "deep" / "b", make_plan())
    assert first.digest == second.digest
    one, two = (
        {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        for root in (tmp_path / "a", tmp_path / "deep" / "b")
    )
    assert one == two


def test_another_plan_is_another_image(tmp_path: Path) -> None:
    other = make_plan_of(fake_base(FILES), make_layer("fix", BACKEND))
    assert build(tmp_path / "a").digest != build(tmp_path / "b", other).digest


def test_every_blob_is_named_by_its_digest_and_listed(tmp_path: Path) -> None:
    layout = tmp_path / "out"
    built = build(layout)
    names = {path.name for path in (layout / "blobs" / "sha256").iterdir()}
    assert names == {
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (layout / "blobs" / "sha256").iterdir()
    }
    manifest = manifest_of(layout)
    listed = [
        built.digest,
        manifest["config"]["digest"],
        *(d["digest"] for d in manifest["layers"]),
    ]
    assert names == {digest.removeprefix("sha256:") for digest in listed}
    for descriptor in (manifest["config"], *manifest["layers"]):
        assert len(blob(layout, descriptor)) == descriptor["size"]
    assert built.added_bytes == sum(d["size"] for d in manifest["layers"])
    assert json.loads((layout / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    assert not list(tmp_path.glob(".*"))


def test_diff_ids_are_those_of_the_uncompressed_layers(tmp_path: Path) -> None:
    build(tmp_path / "out")
    manifest = manifest_of(tmp_path / "out")
    config = json.loads(blob(tmp_path / "out", manifest["config"]))
    unpacked = [gzip.decompress(blob(tmp_path / "out", d)) for d in manifest["layers"]]
    assert config["rootfs"]["diff_ids"] == [
        f"sha256:{hashlib.sha256(data).hexdigest()}" for data in unpacked
    ]


def test_config_carries_platform_environment_and_labels(tmp_path: Path) -> None:
    build(tmp_path / "out")
    manifest = manifest_of(tmp_path / "out")
    config = json.loads(blob(tmp_path / "out", manifest["config"]))
    assert (config["architecture"], config["os"]) == ("arm64", "linux")
    assert config["config"]["Env"] == ["VLLM_NVFP4_GEMM_BACKEND=marlin"]
    assert config["config"]["Labels"] == manifest["annotations"] == metadata.labels(PLAN)
    assert manifest["annotations"]["io.github.spark-build.plan"] == PLAN.digest
    states = json.loads(manifest["annotations"]["io.github.spark-build.states"])
    assert states == {"fix": "needed", "clean": "needed", "set": "needed", "idle": "not-applicable"}


@pytest.mark.parametrize(
    ("epoch", "created", "expected"),
    [
        (None, "", "2026-01-02T00:00:00Z"),
        (None, "2026-03-04T05:06:07.123456789Z", "2026-03-04T05:06:07Z"),
        (None, "1970-01-01T00:00:00Z", "2026-01-02T00:00:00Z"),
        ("1000000000", "2026-03-04T05:06:07Z", "2001-09-09T01:46:40Z"),
        (None, "not a time", "2026-01-02T00:00:00Z"),
    ],
)
def test_times_never_come_from_the_clock(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    epoch: str | None,
    created: str,
    expected: str,
) -> None:
    if epoch is not None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    base = fake_base(FILES, created=created)
    build(tmp_path / "out", make_plan_of(base, make_layer("fix", BACKEND)))
    manifest = manifest_of(tmp_path / "out")
    assert json.loads(blob(tmp_path / "out", manifest["config"]))["created"] == expected


@pytest.mark.parametrize("text", ["abc", "-1", "1.5", "1e9", "9" * 12, "９"])
def test_an_invalid_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    with pytest.raises(UsageError, match="not a number of seconds since 1970"):
        make_plan()


# -------------------------------------------------------------------------------------- the layers


def entries(files: dict[str, Content | None]) -> list[tarfile.TarInfo]:
    out = io.BytesIO()
    tar_layer(out, files, 1_000)
    out.seek(0)
    with tarfile.open(fileobj=out, mode="r:gz") as tar:
        return tar.getmembers()


LAYER: dict[str, Content | None] = {
    "/usr/lib/b.py": Content.of(b"b"),
    "/usr/bin/tool": Content.of(b"#!/bin/sh\n", 0o755),
    "/usr/lib/gone.py": None,
    "/usr/lib/a.py": Content.of(b"a"),
}


def test_entries_are_sorted_with_directories_before_their_files() -> None:
    assert [member.name for member in entries(LAYER)] == [
        "usr",
        "usr/bin",
        "usr/bin/tool",
        "usr/lib",
        "usr/lib/.wh.gone.py",
        "usr/lib/a.py",
        "usr/lib/b.py",
    ]


def test_owner_time_and_modes_are_fixed() -> None:
    members = entries(LAYER)
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", 1_000)}
    modes = {m.name: m.mode for m in members}
    assert modes["usr"] == 0o755
    assert modes["usr/bin/tool"] == 0o755
    assert modes["usr/lib/a.py"] == 0o644
    whiteout = next(m for m in members if ".wh." in m.name)
    assert (whiteout.size, whiteout.isfile()) == (0, True)


def test_the_order_of_input_files_does_not_matter() -> None:
    one, two = io.BytesIO(), io.BytesIO()
    tar_layer(one, LAYER, 0)
    tar_layer(two, dict(reversed(LAYER.items())), 0)
    assert one.getvalue() == two.getvalue()


def test_the_tar_is_what_the_standard_library_writes() -> None:
    out, plain = io.BytesIO(), io.BytesIO()
    files: dict[str, Content | None] = {**LAYER, f"/{'ü' * 60}/{'n' * 90}.so": Content.of(BIG)}
    _, diff_id, _ = tar_layer(out, files, 1_000)
    out.seek(0)
    with (
        tarfile.open(fileobj=out, mode="r:gz") as tar,
        tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as again,
    ):
        for member in tar:
            again.addfile(member, tar.extractfile(member) if member.isfile() else None)
    assert diff_id == sha256_digest(plain.getvalue())


#: A file that is large enough to be a gzip member of its own, as wheels compress it.
BIG = bytes(random.Random(1).choices(b"ab" * 9 + bytes(90), k=ITS_OWN))
DEFLATED = zlib.compressobj(9, zlib.DEFLATED, -15)
PACKED = DEFLATED.compress(BIG) + DEFLATED.flush()


@pytest.mark.parametrize(
    ("packed", "used"),
    [
        (PACKED, True),
        (PACKED[:-1], False),
        (PACKED + b"x", False),
        (b"\xff" * 99, False),
        (zlib.compress(BIG[:-1] + b"\0", wbits=-15), False),
        (zlib.compress(BIG + b"\0", wbits=-15), False),
        (None, False),
    ],
    ids=["its own", "cut", "more after it", "damaged", "another", "longer", "not compressed"],
)
def test_a_file_keeps_its_compressed_bytes_if_they_are_exactly_it(
    packed: bytes | None, used: bool
) -> None:
    files: dict[str, Content | None] = {
        "/a.so": dataclasses.replace(Content.of(BIG), origin="x.whl:a.so"),
        "/small": Content.of(b"a" * 5000),
    }
    out, without = io.BytesIO(), io.BytesIO()
    digests = tar_layer(out, files, 0, deflated={"x.whl:a.so": packed}.get)
    assert digests[0] == sha256_digest(out.getvalue())
    assert digests[1] == tar_layer(without, files, 0)[1]
    assert (PACKED in out.getvalue()) is used
    assert packed or out.getvalue() == without.getvalue()
    assert sha256_digest(gzip.decompress(out.getvalue())) == digests[1]


def test_compressed_data_has_no_file_name_and_no_time() -> None:
    out = io.BytesIO()
    tar_layer(out, LAYER, 0)
    header = out.getvalue()[:10]
    assert (header[3], header[4:8]) == (0, b"\0\0\0\0")


# ------------------------------------------------------------------------------------ reading back


def test_a_built_image_can_be_read(tmp_path: Path) -> None:
    build(tmp_path / "out")
    plan, files, env = read_layout(tmp_path / "out")
    assert plan.json == json.loads(json.dumps(PLAN.as_json()))
    assert env == PLAN.env
    expected = {
        f"{SITE}/{path}": content.read()
        for path, content in PLAN.changes.items()
        if content is not None and not path.startswith("vllm-0.20.1.dist-info/")
    }
    assert {p: data for p, data in files.items() if p.startswith(SITE)} == expected
    assert f"{SITE}/lib/x.py" not in files, "an overlay stands on nothing: no whiteouts"
    assert files["/usr/local/bin/spark-verify"] is not None


def damaged(layout: Path, number: int) -> Path:
    path = sorted((layout / "blobs" / "sha256").iterdir())[number]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("number", range(6))
def test_a_flipped_bit_in_any_blob_is_found(tmp_path: Path, number: int) -> None:
    build(tmp_path / "out")
    path = damaged(tmp_path / "out", number)
    with pytest.raises(SparkBuildError, match=f"{path.name}.* is damaged|{path.name} is sha"):
        read_layout(tmp_path / "out")


def test_a_missing_blob_is_found(tmp_path: Path) -> None:
    build(tmp_path / "out")
    manifest = manifest_of(tmp_path / "out")
    name = manifest["layers"][0]["digest"].removeprefix("sha256:")
    (tmp_path / "out" / "blobs" / "sha256" / name).unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        read_layout(tmp_path / "out")


@pytest.mark.parametrize("text", [None, "{", "[]", '{"manifests": []}', '{"manifests": [{}, {}]}'])
def test_a_layout_without_a_single_image_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "index.json").write_text(text)
    with pytest.raises(UsageError, match=r"is not an OCI layout|has 0 images"):
        layout_digest(tmp_path)


def test_a_foreign_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "baked_files", lambda plan: {})
    build(tmp_path / "out")
    with pytest.raises(UsageError, match="has no plan"):
        read_layout(tmp_path / "out")


# --------------------------------------------------------------------------- targets and failures


def test_an_older_layout_is_replaced(tmp_path: Path) -> None:
    build(tmp_path / "out", make_plan_of(fake_base(FILES), make_layer("fix", BACKEND)))
    digest = build(tmp_path / "out").digest
    assert layout_digest(tmp_path / "out") == digest
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_directory_is_a_valid_target(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    build(tmp_path / "out")
    assert layout_digest(tmp_path / "out")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_folder_that_is_not_a_layout_is_never_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "mine"
    precious = target if kind == "file" else target / "notes.txt"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("precious")
    with pytest.raises(UsageError, match=r"is not (a folder|an OCI layout), so no"):
        build(target)
    assert precious.read_text() == "precious"


class Writes:
    """Counts the calls that write; the one with the given number finds the disk full."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("write_bytes", "write_text", "replace", "rename"):
            monkeypatch.setattr(Path, name, self._wrapped(getattr(Path, name)))

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.count += not args[0].is_relative_to(cache_dir())  # which may be full
            if self.count == self.number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        return call


OLDER = make_plan_of(fake_base(FILES), make_layer("fix", BACKEND))


@pytest.mark.parametrize("exists", [False, True], ids=["new", "replacing"])
def test_a_failed_write_leaves_the_target_unchanged(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "out"
    before = build(target, OLDER).digest if exists else None
    number = 1
    while True:
        with pytest.MonkeyPatch.context() as monkeypatch:
            writes = Writes(number)
            writes.watch(monkeypatch)
            try:
                build(target)
            except BuildFailed as error:
                assert "No space left on device" in str(error)  # noqa: PT017 - the loop needs it
            else:
                break
        names = [path.name for path in tmp_path.iterdir()]
        assert names == (["out"] if exists else []), f"write {number}"
        assert not exists or layout_digest(target) == before, f"write {number}"
        number += 1
    assert number > 8


def test_a_wrong_input_leaves_no_output(tmp_path: Path) -> None:
    wrong = Content("0" * 64, 4, load=lambda: b"evil", origin="lib.whl:x.py")
    (decision, *_) = PLAN.decisions
    changed = dataclasses.replace(decision, changes={"vllm/x.py": wrong})
    with pytest.raises(Exception, match=r"lib\.whl:x\.py: sha256"):
        build(tmp_path / "out", dataclasses.replace(PLAN, decisions=(changed,)))
    assert list(tmp_path.iterdir()) == []


def test_a_base_only_in_a_docker_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was read through a Docker Engine"):
        OciEngine().build(BuildRequest(plan=make_plan("image"), tag="t", output=tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "refused"), [("pypi", False), ("image", False), ("dir", True)])
def test_unsupported_plans_are_refused_with_a_reason(kind: str, refused: bool) -> None:
    reason = OciEngine().refuses(make_plan(kind))
    assert bool(reason) == refused
    if reason:
        assert "use spark-build apply" in reason


class TestChoosingAnEngine:
    @pytest.fixture
    def engine_answers(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        def answer(reason: str | None) -> None:
            name = "builder.images.engines.buildkit.BuildkitEngine.missing"
            monkeypatch.setattr(name, lambda self: reason)

        return answer

    @pytest.mark.parametrize(
        ("reason", "name", "chosen"),
        [
            (None, "auto", "buildkit"),
            (None, "buildkit", "buildkit"),
            (None, "oci", "oci"),
            ("no engine", "auto", "oci"),
            ("no engine", "oci", "oci"),
        ],
    )
    def test_by_name(self, engine_answers: Any, reason: str | None, name: str, chosen: str) -> None:
        engine_answers(reason)
        assert get_engine(name).name == chosen

    def test_a_named_engine_that_is_missing_is_exit_6(self, engine_answers: Any) -> None:
        engine_answers("no docker client with buildx is on PATH")
        with pytest.raises(SparkBuildError, match="no docker client") as caught:
            get_engine("buildkit")
        assert caught.value.code == 6

    def test_the_engine_named_by_docker_host_is_required(
        self, engine_answers: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine_answers("no Docker Engine is running")
        monkeypatch.setenv("DOCKER_HOST", "tcp://spark:2375")
        with pytest.raises(SparkBuildError, match="no Docker Engine is running") as caught:
            get_engine("auto")
        assert caught.value.code == 6
