"""Patch layers on an image in a layout: the base untouched, the tree right, the bytes the same."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.applying import finish
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.errors import BuildFailed, RemoteError, UsageError
from builder.images.bases.identify import identify
from builder.images.engines import baked, metadata, oci
from builder.images.engines.choice import engine_for
from builder.images.engines.model import BuildRequest, BuiltImage
from builder.images.engines.oci import OciEngine, archive, check_writable_base, merged_env
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import (
    DOCKER_CONFIG,
    DOCKER_LAYER_GZIP,
    DOCKER_MANIFEST,
    OCI_LAYER_GZIP,
    OCI_MANIFEST,
    RawManifest,
    sha256_digest,
)
from builder.images.rootfs import limits
from builder.images.rootfs.image import LayerCache, open_image
from builder.images.rootfs.view import Rootfs
from builder.images.subject import BaseRequest
from tests.unit.fakes import (
    copy_op,
    dist_files,
    env_op,
    make_layer,
    make_plan_of,
    replace_op,
    vllm_files,
)
from tests.unit.imagefiles import (
    CONFIG,
    SITE,
    Item,
    folder,
    packed,
    put_image,
    put_vllm,
    python_items,
    site_items,
    symlink,
    tar_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from builder.common.plan import BuildPlan
    from builder.images.subject import Subject

EDIT = replace_op("BACKEND = 'cutlass'", "BACKEND = 'b12x'")
LAYERS = (
    make_layer("fix", EDIT, copy_op("vllm/new/deep.py", b"N = 1\n")),
    make_layer("clean", {"op": "remove", "distribution": "lib"}),
    make_layer("set", env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin")),
)
#: What the base has besides vLLM: one distribution that goes, compiled files, odd owners.
LIB = dist_files("lib", "1", {"lib/__init__.py": "", "lib/x.py": "", "lib/data/t.bin": "1"})
EXTRA = [
    *site_items(LIB),
    Item(f"{SITE}/lib-1.dist-info/INSTALLER", b"pip\n"),
    Item(f"{SITE}/lib/__pycache__/x.cpython-312.pyc", b"old"),
    Item(f"{SITE}/vllm/__pycache__/core.cpython-312.pyc", b"stale"),
    Item(f"{SITE}/vllm/__pycache__/envs.cpython-312.pyc", b"fresh"),
    Item(f"{SITE}/vllm/core.py", vllm_files()["vllm/core.py"], mode=0o640, uid=7, gid=8),
    folder(f"{SITE}/vllm", 0o2750, uid=7, gid=8),
]


def base_of(root: Path, items: Sequence[Item] = EXTRA, **options: Any) -> Subject:
    put_vllm(root, items=items, **options)
    tracked = ("vllm", "lib")
    return identify(
        BaseRequest(ref=Ref(f"oci:{root}"), pins={}, index=PackageIndex(), tracked=tracked)
    )


def build(base: Subject, target: Path, plan: BuildPlan | None = None, **more: Any) -> BuiltImage:
    request = BuildRequest(
        plan=plan or make_plan_of(base, *LAYERS), tag="x:1", output=target, base=base, **more
    )
    return OciEngine().build(request)


def layout_json(root: Path, descriptor: dict[str, Any]) -> dict[str, Any]:
    name = descriptor["digest"].removeprefix("sha256:")
    value: dict[str, Any] = json.loads((root / "blobs/sha256" / name).read_bytes())
    return value


def manifest_of(root: Path) -> dict[str, Any]:
    (entry,) = json.loads((root / "index.json").read_text())["manifests"]
    return layout_json(root, entry)


def members(root: Path, descriptor: dict[str, Any]) -> list[tarfile.TarInfo]:
    name = descriptor["digest"].removeprefix("sha256:")
    with tarfile.open(root / "blobs/sha256" / name) as tar:
        return tar.getmembers()


def view_of_layout(root: Path) -> Rootfs:
    image = open_image(Ref(f"oci:{root}"))
    return Rootfs(image.layers, LayerCache(image.source))


# ------------------------------------------------------------------------------------- the tree


def test_the_tree_is_the_base_with_the_changes(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    build(base, tmp_path / "out")
    seen = view_of_layout(tmp_path / "out")
    below = seen.below(f"/{SITE}")
    assert seen.read(f"/{SITE}/vllm/core.py") == vllm_files()["vllm/core.py"].replace(
        b"'cutlass'", b"'b12x'"
    )
    assert seen.read(f"/{SITE}/vllm/new/deep.py") == b"N = 1\n"
    assert not [path for path in below if path.startswith("lib")]
    assert "vllm/__pycache__/core.cpython-312.pyc" not in below
    assert "vllm/__pycache__/envs.cpython-312.pyc" in below
    assert seen.read(f"{baked.SHARE}/plan.json") is not None
    script = seen.stat("/usr/local/bin/spark-verify")
    assert script is not None
    assert script.executable


def test_owners_and_modes_are_those_of_the_base(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    build(base, tmp_path / "out")
    below = view_of_layout(tmp_path / "out").below(f"/{SITE}")
    facts = {p: (e.row.mode, e.row.uid, e.row.gid) for p, e in below.items()}
    assert facts["vllm"] == (0o2750, 7, 8)
    assert facts["vllm/core.py"] == (0o640, 7, 8)
    assert facts["vllm/new"] == (0o755, 0, 0)
    assert facts["vllm/new/deep.py"] == (0o644, 0, 0)
    assert facts["vllm/envs.py"] == (0o644, 0, 0)


def unpacked(root: Path, view: Rootfs) -> Path:
    """Site-packages on this disk, so that the real ``finish`` can run there."""
    for path, entry in view.below(f"/{SITE}").items():
        if entry.kind == "dir":
            (root / path).mkdir(parents=True, exist_ok=True)
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(view.read(f"/{SITE}/{path}") or b"")
    return root


CASES: dict[str, list[Item]] = {
    "usual": EXTRA,
    "caches-alone": [*EXTRA, Item(f"{SITE}/lib/data/__pycache__/y.cpython-312.pyc")],
    "something-stays": [*EXTRA, Item(f"{SITE}/lib/mine.txt", b"not of lib")],
    "a-module-stays": [*EXTRA, Item(f"{SITE}/lib/sub/own.py"), Item(f"{SITE}/lib/__pycache__/z.p")],
    "an-empty-folder": [*EXTRA, folder(f"{SITE}/lib/empty")],
    "no-vllm-cache": [i for i in EXTRA if "vllm/__pycache__" not in i.name],
    "only-stale": [i for i in EXTRA if "envs.cpython" not in i.name],
    "unrecorded-cache": [*EXTRA, Item(f"{SITE}/lib-1.dist-info/__pycache__/q.pyc")],
}


@pytest.mark.parametrize("case", CASES)
def test_removed_files_match_those_removed_in_a_container(tmp_path: Path, case: str) -> None:
    """The same plan copied onto the same files and finished there, as BuildKit's RUN does it."""
    base = base_of(tmp_path / "base", CASES[case])
    plan = make_plan_of(base, *LAYERS)
    assert base.in_layers is not None
    disk = unpacked(tmp_path / "disk", base.in_layers.view)
    for path, content in plan.changes.items():
        if content is not None:
            (disk / path).parent.mkdir(parents=True, exist_ok=True)
            (disk / path).write_bytes(content.read())
    finish(disk)
    build(base, tmp_path / "out", plan)
    ours = unpacked(tmp_path / "ours", view_of_layout(tmp_path / "out"))
    trees = [
        {p.relative_to(root): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}
        for root in (disk, ours)
    ]
    assert trees[0] == trees[1]
    assert len(trees[0]) > 8


def test_a_file_that_one_layer_adds_and_another_removes(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    plan = make_plan_of(base, make_layer("add", copy_op("lib/added.py", b"A = 1\n")), *LAYERS)
    first = dict(plan.decisions[2].changes)
    assert plan.decisions[2].name == "clean"
    changed = dataclasses.replace(plan.decisions[2], changes={**first, "lib/added.py": None})
    decisions = (*plan.decisions[:2], changed, *plan.decisions[3:])
    build(base, tmp_path / "out", dataclasses.replace(plan, decisions=decisions))
    seen = view_of_layout(tmp_path / "out")
    assert seen.lstat(f"/{SITE}/lib/added.py") is None


def test_folders_that_are_links_stay_links(tmp_path: Path) -> None:
    base = base_of(
        tmp_path / "base",
        [*EXTRA, symlink("workspace", "/data/w"), folder("data/w", 0o777, uid=9)],
    )
    build(base, tmp_path / "out")
    seen = view_of_layout(tmp_path / "out")
    link, real = seen.lstat("/workspace"), seen.lstat("/data/w")
    assert link is not None
    assert real is not None
    assert (link.kind, real.row.mode, real.row.uid) == ("symlink", 0o777, 9)
    assert seen.read("/workspace/build-metadata.yaml") is not None


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Item("usr/share/spark-build", b"a file"), "a file at /usr/share/spark-build"),
        (folder("usr/local/bin/spark-verify"), "a folder at /usr/local/bin/spark-verify"),
    ],
)
def test_conflicting_files_are_named(tmp_path: Path, item: Item, message: str) -> None:
    base = base_of(tmp_path / "base", [*EXTRA, item])
    with pytest.raises(BuildFailed, match=message):
        build(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------- layers, manifest, configuration


def test_the_layers_of_the_base_are_unchanged(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    build(base, tmp_path / "out")
    was, now = manifest_of(tmp_path / "base"), manifest_of(tmp_path / "out")
    count = len(was["layers"])
    assert now["layers"][:count] == was["layers"]
    assert [layer["mediaType"] for layer in now["layers"][count:]] == [OCI_LAYER_GZIP] * 4
    assert now["mediaType"] == OCI_MANIFEST
    assert now["annotations"][f"{baked.LABEL_PREFIX}.plan"]


def test_diff_ids_match_the_tars(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    build(base, tmp_path / "out")
    now = manifest_of(tmp_path / "out")
    config = layout_json(tmp_path / "out", now["config"])
    for descriptor, diff_id in list(zip(now["layers"], config["rootfs"]["diff_ids"], strict=True))[
        2:
    ]:
        name = descriptor["digest"].removeprefix("sha256:")
        data = (tmp_path / "out/blobs/sha256" / name).read_bytes()
        assert sha256_digest(gzip.decompress(data)) == diff_id
        assert sha256_digest(data) == descriptor["digest"]


def test_the_configuration_extends_that_of_the_base(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "Env": ["A=1", "VLLM_NVFP4_GEMM_BACKEND=cutlass", *CONFIG["Env"]],
        "Labels": {"mine": "kept", "org.opencontainers.image.title": "base"},
        "Healthcheck": {"Test": ["CMD", "true"]},
    }
    base = base_of(tmp_path / "base", config=config)
    build(base, tmp_path / "out")
    was = layout_json(tmp_path / "base", manifest_of(tmp_path / "base")["config"])
    now = layout_json(tmp_path / "out", manifest_of(tmp_path / "out")["config"])
    assert now["config"]["Env"] == ["A=1", "VLLM_NVFP4_GEMM_BACKEND=marlin", *CONFIG["Env"]]
    assert now["config"]["Labels"]["mine"] == "kept"
    assert now["config"]["Labels"]["org.opencontainers.image.title"] == "spark-build test"
    for key in ("Healthcheck", "Entrypoint"):
        assert now["config"][key] == config[key]
    assert now["architecture"] == was["architecture"]
    assert now["created"] == "2026-05-06T07:08:09Z"
    assert now["history"][:2] == was["history"]
    assert [step["created_by"] for step in now["history"][2:]] == [
        "spark-build layer fix", "spark-build layer clean", "spark-build layer set",
        "spark-build layer spark-build",
    ]  # fmt: skip


def test_variables_keep_their_position() -> None:
    assert merged_env(["B=1", "A=2", "ODD"], {"A": "3", "C": "4"}) == ["B=1", "A=3", "ODD", "C=4"]


def test_an_inconsistent_history_is_unchanged(tmp_path: Path) -> None:
    root = tmp_path / "base"
    raw = put_image(root, packed(tar_of(*python_items(), *site_items())), config=CONFIG)
    source = LayoutDirectory(root)
    value = raw.json()
    config = layout_json(root, value["config"]) | {"history": [{"created_by": "a"}] * 3}
    data = json.dumps(config).encode()
    blob = dataclasses.replace(
        open_image(Ref(f"oci:{root}")).manifest.descriptor,
        media_type=value["config"]["mediaType"], digest=sha256_digest(data), size=len(data),
    )  # fmt: skip
    source.put_blob(blob, io.BytesIO(data))
    value["config"] = blob.as_json()
    raw = dataclasses.replace(raw, data=json.dumps(value).encode())
    source.put_manifest(raw, "odd")
    base = identify(BaseRequest(ref=Ref(f"oci:{root}:odd"), pins={}, index=PackageIndex()))
    build(base, tmp_path / "out", make_plan_of(base, make_layer("fix", EDIT)))
    now = layout_json(tmp_path / "out", manifest_of(tmp_path / "out")["config"])
    assert len(now["history"]) == 3
    assert len(now["rootfs"]["diff_ids"]) == 3


def test_a_docker_base_keeps_docker_media_types(tmp_path: Path) -> None:
    types = {"manifest": DOCKER_MANIFEST, "config": DOCKER_CONFIG}
    base = base_of(tmp_path / "base", media_types=types, layer_type=DOCKER_LAYER_GZIP)
    build(base, tmp_path / "out")
    now = manifest_of(tmp_path / "out")
    assert now["mediaType"] == DOCKER_MANIFEST
    assert now["config"]["mediaType"] == DOCKER_CONFIG
    assert {layer["mediaType"] for layer in now["layers"]} == {DOCKER_LAYER_GZIP}
    assert "annotations" not in now


def zstd(data: bytes) -> bytes:
    from backports import zstd as library

    return library.compress(data)


@pytest.mark.parametrize(
    ("pack", "end"), [(packed, "+gzip"), (zstd, "+zstd"), (bytes, "")], ids=["gzip", "zstd", "tar"]
)
def test_bases_with_any_compression(tmp_path: Path, pack: Any, end: str) -> None:
    kind = f"application/vnd.oci.image.layer.v1.tar{end}"
    put_image(
        tmp_path / "base",
        pack(tar_of(*python_items(), *site_items())),
        config=CONFIG,
        layer_type=kind,
    )
    base = identify(BaseRequest(ref=Ref(f"oci:{tmp_path}/base"), pins={}, index=PackageIndex()))
    build(base, tmp_path / "out", make_plan_of(base, make_layer("fix", EDIT)))
    now = manifest_of(tmp_path / "out")
    assert [layer["mediaType"] for layer in now["layers"]] == [kind, *[OCI_LAYER_GZIP] * 2]
    seen = view_of_layout(tmp_path / "out").read(f"/{SITE}/vllm/core.py")
    assert seen is not None
    assert b"b12x" in seen


def test_foreign_layers_keep_their_addresses_and_are_not_copied(tmp_path: Path) -> None:
    root = tmp_path / "base"
    kind = "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
    raw = put_vllm(root, layer_type=kind)
    value = raw.json()
    for layer in value["layers"]:
        layer["urls"] = ["https://example.invalid/layer"]
    raw = dataclasses.replace(raw, data=json.dumps(value).encode())
    LayoutDirectory(root).put_manifest(raw, "foreign")
    base = identify(BaseRequest(ref=Ref(f"oci:{root}:foreign"), pins={}, index=PackageIndex()))
    build(base, tmp_path / "out", make_plan_of(base, make_layer("fix", EDIT)))
    now = manifest_of(tmp_path / "out")
    assert now["layers"][:2] == value["layers"]
    names = {p.name for p in (tmp_path / "out/blobs/sha256").iterdir()}
    assert not names & {layer["digest"].removeprefix("sha256:") for layer in value["layers"]}


def test_a_foreign_layer_that_its_layout_lacks_is_named(tmp_path: Path) -> None:
    """It may be at an address in the manifest, from which nothing is fetched."""
    root = tmp_path / "base"
    raw = put_vllm(root, layer_type="application/vnd.docker.image.rootfs.foreign.diff.tar.gzip")
    value = raw.json()
    digest = value["layers"][1]["digest"]
    value["layers"][1]["urls"] = ["https://example.invalid/layer"]
    raw = dataclasses.replace(raw, data=json.dumps(value).encode())
    LayoutDirectory(root).put_manifest(raw, "foreign")
    (root / "blobs/sha256" / digest.removeprefix("sha256:")).unlink()
    with pytest.raises(RemoteError, match=digest[:19]):
        identify(BaseRequest(ref=Ref(f"oci:{root}:foreign"), pins={}, index=PackageIndex()))


# ------------------------------------------------------------------------- one layer, thin, again


def test_a_single_layer_gives_the_same_tree(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    build(base, tmp_path / "each")
    one = dataclasses.replace(make_plan_of(base, *LAYERS), single_layer=True)
    build(base, tmp_path / "one", one)
    assert len(manifest_of(tmp_path / "one")["layers"]) == 3
    trees = []
    for name in ("each", "one"):
        seen = view_of_layout(tmp_path / name)
        trees.append({p: dataclasses.replace(e.row) for p, e in seen.below("/").items()})
    differ = {path for path in trees[0] | trees[1] if trees[0].get(path) != trees[1].get(path)}
    plan = {f"{baked.SHARE}/plan.json".lstrip("/"), "workspace/build-metadata.yaml"}
    assert differ == plan, "these name the plan, which says that it is one layer"


def test_too_many_layers_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci, "_MOST_LAYERS", 8)
    more = [packed(tar_of(Item(f"n{n}"))) for n in range(3)]
    put_vllm(tmp_path / "base", *more, items=EXTRA)
    base = identify(BaseRequest(ref=Ref(f"oci:{tmp_path}/base"), pins={}, index=PackageIndex()))
    build(base, tmp_path / "out", make_plan_of(base, LAYERS[0], LAYERS[2]))
    assert len(manifest_of(tmp_path / "out")["layers"]) == 8
    three = (*LAYERS[::2], make_layer("third", copy_op("vllm/3.py", b"")))
    build(base, tmp_path / "out", make_plan_of(base, *three))
    assert len(manifest_of(tmp_path / "out")["layers"]) == 6


def base_of_many(root: Path, count: int) -> Subject:
    """A base of so many layers, most of which are one and the same."""
    one = packed(tar_of(Item("n")))
    put_vllm(root, *[one] * (count - 2), items=EXTRA)
    return identify(BaseRequest(ref=Ref(f"oci:{root}"), pins={}, index=PackageIndex()))


def test_a_base_with_the_maximum_of_layers_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LAYERS", 12)
    base = base_of_many(tmp_path / "base", limits.LAYERS)
    plan = make_plan_of(base, LAYERS[0])
    for attempt in (
        lambda: build(base, tmp_path / "out", plan),
        lambda: check_writable_base(plan, base),
        lambda: engine_for(plan, base, "oci", None, ""),
    ):
        with pytest.raises(UsageError, match=f"the base has {limits.LAYERS} layers"):
            attempt()
    assert not (tmp_path / "out").exists()


def test_a_warning_names_the_limit_of_the_classic_image_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LAYERS", 130)
    base = base_of_many(tmp_path / "base", limits.LAYERS - 1)
    build(base, tmp_path / "out", make_plan_of(base, LAYERS[0], LAYERS[2]))
    assert len(manifest_of(tmp_path / "out")["layers"]) == limits.LAYERS, "ours is one"
    assert "does not load images with more than 125" in capsys.readouterr().err
    assert view_of_layout(tmp_path / "out").read(f"/{SITE}/vllm/core.py")


def test_the_bases_annotations_are_kept(tmp_path: Path) -> None:
    held = {
        "example.com/team": "kernels",
        "org.opencontainers.image.title": "base",
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.ref.name": "nightly",
        "org.opencontainers.image.base.name": "docker.io/library/debian:13",
    }
    value = put_vllm(tmp_path / "base", items=EXTRA).json() | {"annotations": held}
    raw = RawManifest(data=json.dumps(value).encode(), media_type=OCI_MANIFEST)
    LayoutDirectory(tmp_path / "base").put_manifest(raw, "noted")
    base = identify(
        BaseRequest(ref=Ref(f"oci:{tmp_path}/base:noted"), pins={}, index=PackageIndex())
    )
    plan = make_plan_of(base, *LAYERS)
    build(base, tmp_path / "out", plan)
    now = manifest_of(tmp_path / "out")["annotations"]
    kept = {name: held[name] for name in ("example.com/team", "org.opencontainers.image.licenses")}
    assert now == kept | metadata.labels(plan)


def test_a_thin_layout_has_only_the_new_blobs(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    full = build(base, tmp_path / "full")
    thin = build(base, tmp_path / "thin", thin=True)
    assert full.digest == thin.digest
    blobs = [{p.name for p in (tmp_path / n / "blobs/sha256").iterdir()} for n in ("full", "thin")]
    missing = {name.removeprefix("sha256:") for name in
               (d["digest"] for d in manifest_of(tmp_path / "base")["layers"])}  # fmt: skip
    assert blobs[0] - blobs[1] == missing


def test_two_builds_are_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(base_of(tmp_path / "a"), tmp_path / "one")
    os.umask(os.umask(0o077))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setattr("time.time", lambda: 4e9)
    second = build(base_of(tmp_path / "b"), tmp_path / "deep" / "two")
    assert first.digest == second.digest
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    third = build(base_of(tmp_path / "b"), tmp_path / "three")
    assert third.digest != first.digest
    times = {
        m.mtime for m in members(tmp_path / "three", manifest_of(tmp_path / "three")["layers"][-1])
    }
    assert times == {1700000000}


def test_every_parent_folder_has_an_entry(tmp_path: Path) -> None:
    build(base_of(tmp_path / "base"), tmp_path / "out")
    for layer in manifest_of(tmp_path / "out")["layers"][2:]:
        seen: set[str] = set()
        names = [m.name for m in members(tmp_path / "out", layer)]
        assert names == sorted(names)
        for member in members(tmp_path / "out", layer):
            above = member.name.rpartition("/")[0]
            assert not above or above in seen, member.name
            if member.isdir():
                seen.add(member.name)


def test_the_layout_of_the_base_is_not_replaced(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    with pytest.raises(UsageError, match="contains the base"):
        build(base, tmp_path / "base")
    assert base_of(tmp_path / "base").identity.packages["vllm"] == "0.20.1"


# ------------------------------------------------------------------------------- for docker load


def test_the_archive_for_docker_load_holds_everything(tmp_path: Path) -> None:
    build(base_of(tmp_path / "base"), tmp_path / "out")
    image = open_image(Ref(f"oci:{tmp_path}/out"))
    data = b"".join(archive(image.source, image.manifest, "host.example/me/x:1"))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        held = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    (entry,) = json.loads(held["index.json"])["manifests"]
    assert entry["digest"] == image.manifest.digest
    assert entry["annotations"]["io.containerd.image.name"] == "host.example/me/x:1"
    (older,) = json.loads(held["manifest.json"])
    assert older["RepoTags"] == ["host.example/me/x:1"]
    assert len(older["Layers"]) == len(image.layers)
    for name, blob in held.items():
        if name.startswith("blobs/"):
            assert sha256_digest(blob) == f"sha256:{name.rpartition('/')[2]}"
    for name in (older["Config"], *older["Layers"]):
        assert name in held
