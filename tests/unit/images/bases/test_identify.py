"""What an image is, told from its layers: interpreter, site-packages, packages, platform."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.edits import ENV_PTH
from builder.applier.receipts import receipts_of
from builder.applier.sources import Member
from builder.applier.values import sha256_hex
from builder.common.document import plain
from builder.common.pypi import PackageIndex, WheelFile
from builder.common.reference import Ref
from builder.errors import RemoteError, SparkBuildError, UsageError
from builder.images.bases import image as image_module
from builder.images.bases.identify import asks_engine, identify
from builder.images.bases.image import known_base, survey_image
from builder.images.bases.imagetree import Survey, survey_of
from builder.images.engines import docker
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import (
    DOCKER_CONFIG,
    DOCKER_INDEX,
    DOCKER_LAYER_GZIP,
    DOCKER_MANIFEST,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    ImageConfig,
    RawManifest,
    check_entry_platform,
)
from builder.images.rootfs import index
from builder.images.rootfs.image import LayerCache, find_image, open_image
from builder.images.rootfs.view import InLayers, Rootfs, interpreters
from builder.images.subject import BaseRequest
from builder.publishing.subject import read_subject
from tests.unit.fakes import dist_files, make_layer, make_plan_of, replace_op, vllm_files
from tests.unit.imagefiles import (
    CONFIG,
    SITE,
    Item,
    folder,
    packed,
    put_image,
    put_index,
    put_json,
    put_vllm,
    python_items,
    site_items,
    symlink,
    tar_of,
    view_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from builder.images.subject import Subject


def base_of(root: Path, suffix: str = "", **more: Any) -> Subject:
    request = BaseRequest(ref=Ref(f"oci:{root}{suffix}"), pins={}, index=PackageIndex(), **more)
    return identify(request)


def test_everything_is_read_from_the_image(tmp_path: Path) -> None:
    raw = put_vllm(
        tmp_path,
        items=[
            *site_items(dist_files("flashinfer-python", "0.6.8", {"flashinfer/a.py": "A = 1\n"})),
            *site_items(dist_files("unrelated", "1", {"unrelated.py": ""})),
        ],
        config={**CONFIG, "User": "1000:1000", "Env": [*CONFIG["Env"], "X=a=b"]},
    )
    base = base_of(tmp_path)
    identity = base.identity
    assert (identity.kind, identity.digest) == ("image", raw.digest)
    assert identity.site_packages == f"/{SITE}"
    assert identity.interpreter == "/opt/app/bin/python3.12"
    assert (identity.platform.oci, identity.platform.python) == ("linux/arm64", "cp312")
    assert identity.packages == {"vllm": "0.20.1", "flashinfer-python": "0.6.8"}
    assert identity.env["X"] == "a=b"
    assert (identity.user, identity.created) == ("1000:1000", "2026-05-06T07:08:09Z")
    assert base.tree.children("") == [
        "flashinfer", "flashinfer_python-0.6.8.dist-info", "vllm", "vllm-0.20.1.dist-info",
    ]  # fmt: skip
    assert base.tree.read("vllm/core.py") == vllm_files()["vllm/core.py"]
    assert base.tree.read("vllm/gone.py") is None
    base.close()


def test_upper_layers_override_lower_ones(tmp_path: Path) -> None:
    new = vllm_files("0.21.0")
    site = f"{SITE}/vllm-0.20.1.dist-info"
    top = packed(tar_of(Item(f"{SITE}/.wh.vllm-0.20.1.dist-info"), *site_items(new)))
    put_vllm(tmp_path, top)
    base = base_of(tmp_path)
    assert base.identity.packages == {"vllm": "0.21.0"}
    assert base.tree.children("") == ["vllm", "vllm-0.21.0.dist-info"]
    assert base.tree.read(site.removeprefix(f"{SITE}/") + "/RECORD") is None


def test_owners_and_unusual_folders_are_recorded(tmp_path: Path) -> None:
    put_vllm(
        tmp_path,
        items=[
            folder(f"{SITE}/vllm", 0o2775, uid=1000, gid=100),
            Item(f"{SITE}/vllm/core.py", b"X = 1\n", mode=0o600, uid=1000, gid=100),
            folder("workspace", 0o777, uid=5),
        ],
    )
    identity = base_of(tmp_path).identity
    assert identity.folders == {
        f"/{SITE}/vllm": [0o2775, 1000, 100], "/workspace": [0o777, 5, 0],
    }  # fmt: skip
    assert identity.owners == {"vllm/core.py": [1000, 100]}


def test_settings_left_by_a_mod_are_read(tmp_path: Path) -> None:
    receipt: dict[str, object] = {
        "layer": "x", "layer_digest": "", "variant": None, "sequence": 1, "files": {},
        "env": {"A": "1", "X": "2"}, "serve_flags": [], "moe_serve_flags": [],
    }  # fmt: skip
    put_vllm(
        tmp_path,
        items=[
            Item(f"{SITE}/{ENV_PTH}", b"import os\n"),
            Item(f"{SITE}/.spark-build/receipts/x.json", json.dumps(receipt).encode()),
        ],
        config={"Env": [*CONFIG["Env"], "X=own"]},
    )
    base = base_of(tmp_path)
    assert base.identity.env["A"] == "1"
    assert base.identity.env["X"] == "own"
    assert [r.layer for r in receipts_of(base.tree)] == ["x"]


# ----------------------------------------------------------------------------- which interpreter


def layout(root: Path, *items: Item, **config: Any) -> Path:
    put_image(root, packed(tar_of(*items)), config=config)
    return root


def test_debian_python_uses_dist_packages(tmp_path: Path) -> None:
    site = "usr/local/lib/python3.11/dist-packages"
    root = layout(
        tmp_path,
        Item("usr/bin/python3.11", b"", mode=0o755),
        symlink("usr/bin/python3", "python3.11"),
        symlink("bin", "usr/bin"),
        Item("usr/lib/python3.11/os.py"),
        Item("usr/lib/python3.11/site.py", b"for sitedir in ('dist-packages',): ..."),
        *site_items(site="usr/local/lib/python3.11/site-packages"),
        *site_items(vllm_files("0.22.1"), site=site),
    )
    identity = base_of(root).identity
    assert identity.site_packages == f"/{site}"
    assert identity.interpreter == "/usr/bin/python3.11"
    assert identity.packages == {"vllm": "0.22.1"}
    assert identity.platform.python == "cp311"


@pytest.mark.parametrize("named", [True, False], ids=["VIRTUAL_ENV", "PATH"])
def test_a_virtual_environment_keeps_its_path(tmp_path: Path, named: bool) -> None:
    root = layout(
        tmp_path,
        *python_items("root/.uv/cpython-3.13", "3.13"),
        *site_items(vllm_files("0.1.0"), site="root/.uv/cpython-3.13/lib/python3.13/site-packages"),
        symlink("venv/bin/python", "/root/.uv/cpython-3.13/bin/python3.13"),
        symlink("venv/bin/python3", "python"),
        Item("venv/pyvenv.cfg", b"home = /root/.uv/cpython-3.13/bin\nversion_info = 3.13.1\n"),
        symlink("venv/lib64", "lib"),
        *site_items(site="venv/lib/python3.13/site-packages"),
        Env=["VIRTUAL_ENV=/venv"] if named else ["PATH=/nowhere:/venv/bin"],
    )
    identity = base_of(root).identity
    assert identity.interpreter == f"/venv/bin/python{'' if named else '3'}"
    assert identity.site_packages == "/venv/lib/python3.13/site-packages"
    assert identity.packages == {"vllm": "0.20.1"}
    assert identity.platform.python == "cp313"


@pytest.mark.parametrize("shares", [True, False])
def test_a_virtual_environment_can_include_system_packages(tmp_path: Path, shares: bool) -> None:
    config = f"home = /opt/app/bin\ninclude-system-site-packages = {str(shares).lower()}\n"
    root = layout(
        tmp_path,
        *python_items(),
        *site_items(),
        symlink("venv/bin/python", "/opt/app/bin/python3"),
        Item("venv/pyvenv.cfg", config.encode()),
        folder("venv/lib/python3.12/site-packages"),
        Env=["VIRTUAL_ENV=/venv", "PATH=/venv/bin:/opt/app/bin"],
    )
    identity = base_of(root).identity
    assert identity.interpreter == ("/venv/bin/python" if shares else "/opt/app/bin/python3.12")
    assert identity.site_packages == f"/{SITE}"


def test_the_next_interpreter_is_tried_if_one_has_no_vllm(tmp_path: Path) -> None:
    root = layout(
        tmp_path,
        *python_items("usr/local", "3.10"),
        *python_items("opt/venv"),
        *site_items(site="opt/venv/lib/python3.12/site-packages"),
    )
    assert base_of(root).identity.interpreter == "/opt/venv/bin/python3.12"


def test_pythonpath_and_the_working_directory_come_first(tmp_path: Path) -> None:
    view = view_of(tmp_path, packed(tar_of(*python_items())))
    env = {"PATH": "/opt/app/bin", "PYTHONPATH": "/a:b", "HOME": "/home/u"}
    (found,) = interpreters(view, env, "/work")
    assert found.path[:4] == ("/work", "/a", "/work/b", f"/home/u/.local/lib/{SITE[12:]}")
    (found,) = interpreters(view, {**env, "PYTHONNOUSERSITE": "1"}, "/work")
    assert not any(".local" in folder for folder in found.path)


def test_a_site_packages_that_is_a_link(tmp_path: Path) -> None:
    root = layout(
        tmp_path,
        *python_items(),
        symlink(SITE, "/data/packages"),
        *site_items(site="data/packages"),
        Env=CONFIG["Env"],
    )
    assert base_of(root).identity.site_packages == "/data/packages"


def test_linked_folders_are_recorded(tmp_path: Path) -> None:
    put_vllm(
        tmp_path,
        items=[
            symlink("workspace", "/data/w"),
            folder("data/w", 0o777),
            symlink(f"{SITE}/flashinfer", "/src/fi"),
            Item("src/fi/a.py", b"A = 1\n"),
            *site_items(dist_files("flashinfer-python", "1", {"flashinfer/b.py": ""}))[-2:],
        ],
    )
    base = base_of(tmp_path)
    assert base.identity.links == {"/workspace": "/data/w", f"/{SITE}/flashinfer": "/src/fi"}
    assert base.identity.folders == {"/data/w": [0o777, 0, 0]}
    assert base.tree.read("flashinfer/a.py") == b"A = 1\n"


@pytest.mark.parametrize("mode", [0o644, None])
def test_an_image_without_python_or_without_vllm(tmp_path: Path, mode: int | None) -> None:
    items = [*python_items()] if mode is None else [Item("usr/bin/python3", mode=mode)]
    with pytest.raises(UsageError, match="has no Python with vllm"):
        base_of(layout(tmp_path, *items, Env=CONFIG["Env"]))


def test_packages_in_two_directories_are_refused(tmp_path: Path) -> None:
    other = site_items(dist_files("flashinfer-python", "1", {}), site="extra")
    put_vllm(tmp_path, items=other, config={"Env": [*CONFIG["Env"], "PYTHONPATH=/extra"]})
    with pytest.raises(UsageError, match="flashinfer-python in /extra; layers patch one directory"):
        base_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("METADATA", b"Name: vllm\n", "has no version"),
        ("RECORD", b"a,sha256=%%%,x\n", "RECORD is damaged"),
        ("RECORD", b"\xff\xfe", "RECORD is damaged"),
        ("RECORD", b"", "its 0 rows do not name"),
        ("RECORD", b"\0" * 90, "its 1 rows do not name"),
        ("RECORD", b"vllm/__init__.py,,\nvllm/core.py,sha256=c2hvcnQ,9\n", "damaged: row 2"),
        ("RECORD", b"vllm/__init__.py,,\n", "its 1 rows do not name"),
        (".wh.RECORD", b"", "has no RECORD"),
    ],
)
def test_damaged_metadata(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    put_vllm(tmp_path, packed(tar_of(Item(f"{SITE}/vllm-0.20.1.dist-info/{name}", data))))
    with pytest.raises(UsageError, match=message):
        base_of(tmp_path)


# ------------------------------------------------------------- an image that was surveyed before


def surveyed(root: Path) -> tuple[BaseRequest, InLayers, Survey]:
    """An image, opened anew, and what an earlier survey of it gave, through JSON."""
    request = BaseRequest(ref=Ref(f"oci:{root}"), pins={}, index=PackageIndex())
    survey = survey_image(request, opened_of(root), "x")
    return request, opened_of(root), survey_of(f"a warning\n{json.dumps(plain(survey))}\n", "x")


def opened_of(root: Path) -> InLayers:
    image = open_image(Ref(f"oci:{root}"))
    return InLayers(image, Rootfs(image.layers, LayerCache(image.source)))


def test_an_image_read_by_an_engine_is_the_same_base(tmp_path: Path) -> None:
    put_vllm(tmp_path, items=[folder(f"{SITE}/vllm", 0o700, uid=3)])
    request, opened, answer = surveyed(tmp_path)
    known = known_base(request, opened, f"oci:{tmp_path}", answer)
    assert known.identity == base_of(tmp_path).identity
    layer = make_layer("fix", replace_op("BACKEND = 'cutlass'", "BACKEND = 'b12x'"))
    assert make_plan_of(known, layer).digest == make_plan_of(base_of(tmp_path), layer).digest
    assert opened.view.layers_read == 0


@pytest.mark.parametrize("reply", ["", "[]", "{}", "killed", '{"files": [1, 2]}', "[" * 99999])
def test_a_reply_that_is_no_survey(reply: str) -> None:
    with pytest.raises(UsageError, match="image x: its Python gave no survey of its files"):
        survey_of(reply, "x")


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package index that has vLLM 0.20.1, with another core.py; gives what was read of it."""
    files = vllm_files() | {"vllm/core.py": b"changed since\n"}
    read: list[str] = []

    class Wheel:
        def __init__(self, *_words: object) -> None:
            self.members = {p: Member(p, sha256_hex(d), len(d), 0o644) for p, d in files.items()}

        def preload(self, _paths: object) -> None: ...

        def read(self, path: str) -> bytes:
            read.append(path)
            return files[path]

    monkeypatch.setattr(image_module, "RemoteWheel", Wheel)
    monkeypatch.setattr(
        PackageIndex,
        "choose",
        lambda *_: WheelFile(filename="vllm-1-py3-none-any.whl", url="", sha256="0" * 64),
    )
    return read


def forget_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no file's bytes but what says which files are whose."""
    monkeypatch.setattr(index, "worth_keeping", lambda path, _: "RECORD" in path)


def test_a_file_of_a_released_wheel_is_read_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: list[str]
) -> None:
    forget_content(monkeypatch)
    put_vllm(tmp_path)
    base = base_of(tmp_path)
    assert base.in_layers is not None
    read_before = base.in_layers.view._cache.meter.packed
    assert base.tree.read("vllm/envs.py") == vllm_files()["vllm/envs.py"]
    assert released == ["vllm/envs.py"]
    assert base.in_layers.view._cache.meter.packed == read_before


def test_a_modified_file_is_read_from_its_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: list[str]
) -> None:
    forget_content(monkeypatch)
    put_vllm(tmp_path, items=[Item(f"{SITE}/vllm/envs.py", b"edited in the image\n")])
    base = base_of(tmp_path)
    assert base.tree.read("vllm/envs.py") == b"edited in the image\n"
    assert base.tree.read("vllm/core.py") == vllm_files()["vllm/core.py"]
    assert released == []


def test_without_an_index_the_layers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_words: object) -> WheelFile:
        raise RemoteError("the package index did not answer")

    forget_content(monkeypatch)
    monkeypatch.setattr(PackageIndex, "choose", down)
    put_vllm(tmp_path)
    assert base_of(tmp_path).tree.read("vllm/envs.py") == vllm_files()["vllm/envs.py"]


# ------------------------------------------------------------------------- references and formats


def test_an_image_is_found_by_name_or_digest_or_as_the_only_one(tmp_path: Path) -> None:
    raw = put_vllm(tmp_path, name="one")
    for suffix in ("", ":one", f"@{raw.digest}"):
        assert base_of(tmp_path, suffix).identity.digest == raw.digest
    with pytest.raises(UsageError, match="no single image 'two'"):
        base_of(tmp_path, ":two")
    with pytest.raises(UsageError, match="there is no such folder"):
        base_of(tmp_path / "gone")


def test_the_plan_does_not_depend_on_the_path_of_the_layout(tmp_path: Path) -> None:
    layer = make_layer("fix", replace_op("BACKEND = 'cutlass'", "BACKEND = 'b12x'"))
    digests = set()
    for name in ("a", "b"):
        put_vllm(tmp_path / name)
        digests.add(make_plan_of(base_of(tmp_path / name), layer).digest)
    assert len(digests) == 1


def index_of(root: Path, *architectures: str, name: str = "") -> RawManifest:
    manifests = {a: put_vllm(root, architecture=a, name=f"only-{a}") for a in architectures}
    return put_index(root, manifests, name=name or "all")


def test_the_platform_is_chosen_from_an_index(tmp_path: Path) -> None:
    raw = index_of(tmp_path, "amd64", "arm64")
    for platform, wanted in ((None, "arm64"), ("linux/amd64", "amd64"), ("x86_64", "amd64")):
        base = base_of(tmp_path, ":all", platform=platform)
        assert base.identity.platform.architecture == wanted
        assert base.identity.digest == raw.digest, "the reference names the index"


def test_an_index_without_the_platform(tmp_path: Path) -> None:
    index_of(tmp_path, "amd64")
    assert base_of(tmp_path, ":all").identity.platform.architecture == "amd64"
    with pytest.raises(UsageError, match=r"no image for linux/arm64; it has: linux/amd64"):
        base_of(tmp_path, ":all", platform="linux/arm64")
    put_index(tmp_path, {"s390x": put_vllm(tmp_path), "ppc64le": put_vllm(tmp_path)}, name="odd")
    with pytest.raises(
        UsageError, match="no image for linux/arm64; it has: linux/ppc64le, linux/s390x"
    ):
        base_of(tmp_path, ":odd")


def index_of_variants(root: Path, *variants: str) -> dict[str, RawManifest]:
    """An index of images for arm64 that differ by variant; ``""`` is one that names none."""
    raws = {v: put_vllm(root, name=f"{v}.", config={**CONFIG, "User": v}) for v in variants}
    listed = []
    for variant, raw in raws.items():
        platform = {
            "os": "linux",
            "architecture": "arm64",
            **({"variant": variant} if variant else {}),
        }
        listed.append({**raw.descriptor.as_json(), "platform": platform})
    value = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": listed}
    index = RawManifest(data=json.dumps(value).encode(), media_type=OCI_INDEX)
    LayoutDirectory(root).put_manifest(index, "all")
    return raws


@pytest.mark.parametrize("asked", [None, "linux/arm64", "linux/arm64/v8", "arm64"])
@pytest.mark.parametrize("usual", ["v8", "", "8"])
def test_a_later_variant_is_another_platform(tmp_path: Path, usual: str, asked: str | None) -> None:
    raws = index_of_variants(tmp_path, "v9", usual, "v8.2")
    image = find_image(LayoutDirectory(tmp_path), "all", asked)
    assert image.manifest.digest == raws[usual].digest


def test_a_later_variant_is_used_only_by_digest(tmp_path: Path) -> None:
    raws = index_of_variants(tmp_path, "v9")
    layout = LayoutDirectory(tmp_path)
    for asked in (None, "linux/arm64"):
        with pytest.raises(
            UsageError, match="no image for linux/arm64; it has: linux/arm64/v9"
        ) as e:
            find_image(layout, "all", asked)
        assert e.value.hint.endswith(raws["v9"].digest)
    with pytest.raises(UsageError, match="variant v9 of arm64 is not supported"):
        find_image(layout, "all", "linux/arm64/v9")
    assert find_image(layout, raws["v9"].digest, None).manifest == raws["v9"]


@pytest.mark.parametrize(
    ("said", "asked", "has"),
    [
        ({"architecture": "amd64"}, "linux/arm64", "linux/amd64"),
        ({"variant": "v9"}, "linux/arm64", "linux/arm64/v9"),
        ({"os": "windows"}, "linux/arm64", "windows/arm64"),
        ({"variant": "v8"}, "linux/amd64", "linux/arm64"),
    ],
)
def test_a_single_image_for_another_platform(
    tmp_path: Path, said: dict[str, str], asked: str, has: str
) -> None:
    layout, raw = LayoutDirectory(tmp_path), put_vllm(tmp_path, name="x")
    value = raw.json()
    with layout.open(Descriptor.parse(value["config"], "")) as stream:
        config = json.loads(stream.read()) | said
    value["config"] = put_json(layout, config, OCI_CONFIG).as_json()
    layout.put_manifest(RawManifest(data=json.dumps(value).encode(), media_type=OCI_MANIFEST), "y")
    with pytest.raises(UsageError, match=f"y is for {has}, not for {asked}"):
        find_image(layout, "y", asked)
    if "os" in said:
        with pytest.raises(RemoteError, match="y is for 'windows', not for Linux"):
            find_image(layout, "y", None)
    else:
        assert find_image(layout, "y", None).config.architecture


def test_docker_schema_2(tmp_path: Path) -> None:
    types = {"manifest": DOCKER_MANIFEST, "config": DOCKER_CONFIG}
    raw = put_vllm(tmp_path, media_types=types, layer_type=DOCKER_LAYER_GZIP, name="d")
    assert base_of(tmp_path, ":d").identity.digest == raw.digest
    entry = {**raw.descriptor.as_json(), "platform": {"os": "linux", "architecture": "arm64"}}
    value = {"schemaVersion": 2, "mediaType": DOCKER_INDEX, "manifests": [entry]}
    index = RawManifest(data=json.dumps(value).encode(), media_type=DOCKER_INDEX)
    LayoutDirectory(tmp_path).put_manifest(index, "list")
    assert base_of(tmp_path, ":list").identity.digest == index.digest


def test_attestations_are_not_images(tmp_path: Path) -> None:
    raw = put_vllm(tmp_path)
    entry = {**raw.descriptor.as_json(), "platform": {"os": "linux", "architecture": "arm64"}}
    attests = {
        **put_vllm(tmp_path, name="x", config={}).descriptor.as_json(),
        "platform": {"os": "unknown", "architecture": "unknown"},
        "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
    }
    value = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [attests, entry]}
    index = RawManifest(data=json.dumps(value).encode(), media_type=OCI_INDEX)
    LayoutDirectory(tmp_path).put_manifest(index, "with")
    assert base_of(tmp_path, ":with").identity.platform.oci == "linux/arm64"


ARM = {"os": "linux", "architecture": "arm64"}


def listed_as(root: Path, platforms: Sequence[Mapping[str, Any]]) -> list[str]:
    """An index ``all`` of images for arm64, each with these fields in its entry; gives digests."""
    raws = [
        put_vllm(root, name=f"n{number}", config={**CONFIG, "User": f"u{number}"})
        for number in range(len(platforms))
    ]
    listed = [
        {**raw.descriptor.as_json(), **more} for raw, more in zip(raws, platforms, strict=True)
    ]
    value = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": listed}
    index = RawManifest(data=json.dumps(value).encode(), media_type=OCI_INDEX)
    LayoutDirectory(root).put_manifest(index, "all")
    return [raw.digest for raw in raws]


@pytest.mark.parametrize(
    "beside",
    [
        {"platform": {**ARM, "variant": "v8"}},
        {"platform": {**ARM, "variant": "V8.0"}},
        {"platform": {"os": "linux", "architecture": "aarch64"}},
        {"platform": {"os": "Linux", "architecture": "ARM64"}},
        {"platform": {"architecture": "arm64"}},
        {"platform": {**ARM, "os.features": ["x"]}},
        {},
        {"platform": ARM, "annotations": {"vnd.docker.reference.type": "attestation-manifest"}},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("asked", [None, "linux/arm64"])
def test_two_images_for_one_platform(
    tmp_path: Path, beside: Mapping[str, Any], asked: str | None
) -> None:
    """Which of them a machine runs depends on its runtime, so neither stands for the name."""
    for order in (1, -1):
        digests = listed_as(tmp_path, [{"platform": ARM}, beside][::order])
        with pytest.raises(RemoteError, match="2 images for linux/arm64") as caught:
            find_image(LayoutDirectory(tmp_path), "all", asked)
        assert set(digests) <= {word.rstrip(",") for word in str(caught.value).split()}
        for digest in digests:
            assert find_image(LayoutDirectory(tmp_path), digest, asked).manifest.digest == digest


def test_the_same_image_twice_is_one(tmp_path: Path) -> None:
    raw = put_vllm(tmp_path, name="x")
    listed = [
        {**raw.descriptor.as_json(), "platform": platform}
        for platform in (ARM, {**ARM, "variant": "v8"})
    ]
    value = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": listed}
    index = RawManifest(data=json.dumps(value).encode(), media_type=OCI_INDEX)
    LayoutDirectory(tmp_path).put_manifest(index, "all")
    assert find_image(LayoutDirectory(tmp_path), "all", None).manifest == raw


def test_an_entry_without_a_platform_is_for_that_of_its_configuration(tmp_path: Path) -> None:
    arm = put_vllm(tmp_path, name="x")
    amd = put_vllm(tmp_path, name="y", architecture="amd64")
    listed = [{**arm.descriptor.as_json(), "platform": ARM}, amd.descriptor.as_json()]
    value = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": listed}
    index = RawManifest(data=json.dumps(value).encode(), media_type=OCI_INDEX)
    LayoutDirectory(tmp_path).put_manifest(index, "all")
    assert find_image(LayoutDirectory(tmp_path), "all", None).manifest == arm


@pytest.mark.parametrize("stated", ["arm64", "amd64", "s390x"])
@pytest.mark.parametrize("has", ["arm64", "amd64", "s390x"])
@pytest.mark.parametrize("others", [False, True])
def test_an_entry_for_another_platform_than_its_image(
    tmp_path: Path, stated: str, has: str, others: bool
) -> None:
    """Runtimes choose by the entry and do not look at the configuration."""
    listed = {stated: put_vllm(tmp_path, architecture=has, name="x")}
    if others:
        listed["riscv64"] = put_vllm(tmp_path, architecture="riscv64", name="z")
    put_index(tmp_path, listed, name="all")
    find = partial(find_image, LayoutDirectory(tmp_path), "all", None)
    if others and stated != "arm64":
        with pytest.raises(UsageError, match="no image for linux/arm64"):
            find()
    elif stated == has:
        assert find().config.architecture == has
    else:
        with pytest.raises(RemoteError, match=f"for linux/{stated}, but .* for linux/{has}"):
            find()


@pytest.mark.parametrize(
    ("stated", "has", "same"),
    [("v8", "", True), ("", "v8", True), ("", "v9", False), ("v9", "", True), ("v9", "v8", False)],
)
def test_the_variant_of_an_entry(stated: str, has: str, same: bool) -> None:
    """What a configuration leaves out is no difference."""
    platform = {**ARM, **({"variant": stated} if stated else {})}
    entry = Descriptor(media_type="", digest="x", size=0, platform=platform)
    config = ImageConfig({"architecture": "arm64", "os": "linux", "variant": has})
    with nullcontext() if same else pytest.raises(RemoteError, match="another platform"):
        check_entry_platform(entry, config, "x")


def test_nested_indexes_are_limited(tmp_path: Path) -> None:
    manifest = put_vllm(tmp_path)
    for depth in range(6):
        manifest = put_index(tmp_path, {"arm64": manifest}, name=f"i{depth}")
    assert find_image(LayoutDirectory(tmp_path), "i2", None).top.media_type == OCI_INDEX
    with pytest.raises(RemoteError, match="nested too deeply"):
        open_image(Ref(f"oci:{tmp_path}:i5"))


def broken_manifest(root: Path, **changes: Any) -> str:
    """An image whose manifest says something else than its parts."""
    source = LayoutDirectory(root)
    value = {**put_vllm(root).json(), **changes}
    raw = RawManifest(data=json.dumps(value).encode(), media_type=OCI_MANIFEST)
    source.put_manifest(raw, "broken")
    return f"oci:{root}:broken"


def test_inconsistent_manifests(tmp_path: Path) -> None:
    whole = put_vllm(tmp_path).json()
    config, layers = whole["config"], whole["layers"]
    for changes, message in (
        ({"layers": layers[:1]}, "1 layers, but 2 diff_ids"),
        ({"layers": layers * 300}, "600 layers"),
        ({"config": {**config, "size": config["size"] + 1}}, "connection cut|is damaged|bytes"),
        ({"config": {**config, "size": 1 << 40}}, "a configuration of"),
        ({"config": {**config, "mediaType": "text/html"}}, "is not an image"),
        ({"config": layers[0] | {"mediaType": config["mediaType"]}}, "is not JSON|is not a JSON"),
    ):
        with pytest.raises(RemoteError, match=message):
            open_image(Ref(broken_manifest(tmp_path, **changes)))
    lying = [{**layers[0], "size": layers[0]["size"] - 1}, layers[1]]
    with pytest.raises(RemoteError, match="longer than expected"):
        identify_named(broken_manifest(tmp_path, layers=lying))
    with pytest.raises(RemoteError, match="No such file"):
        identify_named(
            broken_manifest(
                tmp_path, layers=[layers[0], {**layers[0], "digest": f"sha256:{'0' * 64}"}]
            )
        )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"config": {"Env": [1, 2]}}, "config.Env"),
        ({"config": {"Env": {"PATH": "/bin"}}}, "config.Env"),
        ({"config": {"Env": "PATH=/bin"}}, "config.Env"),
        ({"config": {"Labels": ["a=b"]}}, "config.Labels"),
        ({"config": {"Labels": {"a": {"b": 1}}}}, "config.Labels"),
        ({"config": {"User": 0}}, "config.User"),
        ({"config": {"WorkingDir": ["/"]}}, "config.WorkingDir"),
        ({"config": {"Entrypoint": "vllm serve"}}, "config.Entrypoint"),
        ({"config": [1]}, "config"),
        ({"created": 1_777_000_000}, "created"),
        ({"created": "yesterday"}, "created"),
        ({"architecture": ["arm64"]}, "architecture"),
        ({"history": {"a": 1}}, "history"),
        ({"history": ["step"]}, r"history\[0\]"),
        ({"history": [{"created_by": 5}]}, r"history\[0\].created_by"),
        ({"history": [{"empty_layer": "yes"}]}, r"history\[0\].empty_layer"),
        ({"rootfs": "layers"}, "rootfs"),
        ({"rootfs": {"diff_ids": "12"}}, "rootfs.diff_ids"),
        ({"rootfs": {"diff_ids": [1, 2]}}, "rootfs.diff_ids"),
        ({"rootfs": {"diff_ids": {"a": 1, "b": 2}}}, "rootfs.diff_ids"),
        ({"rootfs": {"diff_ids": ["sha256:1", "sha256:2"]}}, "rootfs.diff_ids"),
    ],
)
def test_a_malformed_configuration_error_names_the_field(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    source = LayoutDirectory(tmp_path)
    config = json.loads(
        (tmp_path / source.blob_path(put_vllm(tmp_path).json()["config"]["digest"])).read_bytes()
    )
    blob = put_json(source, {**config, **changes}, OCI_CONFIG)
    ref = broken_manifest(tmp_path, config=blob.as_json())
    with pytest.raises(RemoteError, match=f": {field} in its configuration is not ") as caught:
        identify_named(ref)
    assert caught.value.code == 8
    with pytest.raises(RemoteError, match=f": {field} in its configuration is not "):
        read_subject(source, "broken")


SMALL = tar_of(Item("etc/motd", b"hello" * 4000))


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (packed(SMALL)[:-4], "ends too early"),
        (packed(SMALL) + b"junk after the end", "is damaged"),
        (packed(SMALL) + packed(SMALL)[:30], "ends too early"),
        (b"", "is empty"),
    ],
    ids=["truncated", "garbage", "half a member", "empty"],
)
def test_a_layer_that_no_runtime_unpacks_is_refused(
    tmp_path: Path, blob: bytes, message: str
) -> None:
    put_vllm(tmp_path, blob)
    with pytest.raises(RemoteError, match=message) as caught:
        base_of(tmp_path)
    assert caught.value.code == 8


@pytest.mark.parametrize("known", [False, True], ids=["unread", "read before"])
def test_a_layer_that_contradicts_the_configuration(tmp_path: Path, known: bool) -> None:
    if known:
        put_vllm(tmp_path, packed(SMALL), name="good")
        base_of(tmp_path, ":good").close()
    source = LayoutDirectory(tmp_path)
    whole = put_vllm(tmp_path, packed(SMALL)).json()
    config = json.loads((tmp_path / source.blob_path(whole["config"]["digest"])).read_bytes())
    config["rootfs"]["diff_ids"][2] = f"sha256:{'1' * 64}"
    blob = put_json(source, config, OCI_CONFIG)
    raw = RawManifest(
        data=json.dumps({**whole, "config": blob.as_json()}).encode(), media_type=OCI_MANIFEST
    )
    source.put_manifest(raw, "lying")
    with pytest.raises(RemoteError, match=r"unpacks to sha256:.* says sha256:1111") as caught:
        base_of(tmp_path, ":lying")
    assert caught.value.code == 8


def identify_named(ref: str) -> Subject:
    return identify(BaseRequest(ref=Ref(ref), pins={}, index=PackageIndex()))


# ------------------------------------------------------------------------ who is asked, and what


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize(
    ("ref", "in_engine", "wanted"),
    [
        ("vllm/vllm-openai:v1", None, None),
        ("docker://vllm/vllm-openai:v1", None, False),
        ("docker://vllm/vllm-openai:v1", True, True),
        ("vllm/vllm-openai:v1", False, False),
        ("vllm/vllm-openai:v1", True, True),
    ],
)
def test_order_in_which_an_image_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
    ref: str,
    in_engine: bool | None,
    wanted: bool | None,
    answers: bool,
) -> None:
    monkeypatch.setattr(docker, "answers", lambda: answers)
    assert asks_engine(Ref(ref), in_engine=in_engine) == (answers if wanted is None else wanted)


def test_an_image_that_does_not_exist_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "answers", lambda: False)
    with pytest.raises(SparkBuildError) as caught:
        identify_named("127.0.0.1:1/nothing:here")
    assert caught.value.code == 8
