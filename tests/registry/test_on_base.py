"""Images that stand on a base in a registry: thin layouts, mirrors of the base, rebuilding."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from builder.__main__ import run
from builder.common.paths import package_file
from builder.images.registry.copy import Locations, copy_image
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import Descriptor, RawManifest, sha256_digest
from builder.images.registry.reference import parse_reference
from builder.images.registry.transport import Transport
from builder.layers.catalog import Catalog
from builder.pipeline import allowedhosts
from builder.pipeline import publish as publish_command
from builder.publishing import run as run_command
from builder.publishing.subject import read_subject
from tests.memoryregistry import MemoryRegistry

from . import overlays, servers
from .conftest import QUICK
from .test_publish import attached, files_only, publish, repository, tags

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.machine import Programs


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_command, "Locations", partial(Locations, QUICK))


@pytest.fixture
def base(registry: servers.DockerRegistry, tmp_path: Path) -> str:
    """A base for two platforms in a registry: ``HOST/NAME:TAG``."""
    return overlays.put_base(tmp_path / "base", f"{registry.address}/{_name(tmp_path)}/vllm:v1")


def _name(tmp_path: Path) -> str:
    return tmp_path.name.strip("_").replace("_", "-")[-20:].strip("-")


@pytest.fixture
def thin(base: str, tmp_path: Path) -> Path:
    """A thin layout, with evidence beside it."""
    overlays.build_on(base, tmp_path / "thin")
    lines = [{**overlays.PASS, "level": level, "name": "all"}
             for level in ("static", "imports", "dispatch")]  # fmt: skip
    overlays.evidence(tmp_path / "thin", checks=lines)
    return tmp_path / "thin"


def test_a_thin_layout_takes_the_base_from_its_registry(
    registry: servers.DockerRegistry,
    programs: Programs,
    thin: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"{_name(tmp_path)}/out"
    assert publish(thin, "--to", f"{registry.address}/{name}", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    ours = read_subject(LayoutDirectory(thin), "").images[0]
    assert result["mounted_blobs"] == 3, "the layers of the base"
    assert result["sent_blobs"] == 4, "three layers and a configuration"
    source = f"docker://{registry.address}/{name}@{ours.digest}"
    servers.skopeo(programs, "copy", "--src-tls-verify=false", source, f"oci:{tmp_path}/back:v1")


def test_a_full_layout_does_not_send_blobs_that_the_base_has(
    registry: servers.DockerRegistry,
    base: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overlays.build_on(base, tmp_path / "whole", thin=False)
    where = f"{registry.address}/{_name(tmp_path)}/whole"
    assert publish(tmp_path / "whole", "--to", where, "--force", "--dry-run") == 0
    assert "(4 blobs to send, 3 to mount)" in capsys.readouterr().err
    assert publish(tmp_path / "whole", "--to", where, "--force", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["mounted_blobs"], result["sent_blobs"]) == (3, 4)


def test_evidence_without_the_expected_line_is_not_enough(
    registry: servers.DockerRegistry, thin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlays.evidence(thin)  # nothing to dispatch, it says; but this plan expects a line
    assert publish(thin, "--to", f"{registry.address}/{_name(tmp_path)}/line") == 5
    assert "dispatch line was not run" in capsys.readouterr().err


def test_mirror_and_rebuild_from_it(
    registry: servers.DockerRegistry,
    base: str,
    thin: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The base is purged; what was published can still be rebuilt from the copy beside it."""
    name = f"{_name(tmp_path)}/mirrored"
    where = f"{registry.address}/{name}"
    assert publish(thin, "--to", where, "--mirror-base", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    (mirror,) = result["mirrors"]
    assert mirror.startswith(f"{where}:base-")
    step = next(s for s in result["steps"] if s["kind"] == "mirror")
    assert step["size"] < 1000, "its layers come with the image"
    kept = tags(registry.address, name)
    opened = repository(registry.address, name)
    mirrored = kept[mirror.rpartition(":")[2]]
    note = next(
        entry for entry in attached(registry.address, name, result["digest"])
        if "base" in entry.artifact_type
    )  # fmt: skip
    assert note.annotations["io.github.spark-build.base-mirror"] == mirrored

    upstream = repository(registry.address, f"{_name(tmp_path)}/vllm")
    index = upstream.digest_of("v1")
    assert index is not None
    document = json.loads(_document(opened, note))
    assert (document["digest"], sha256_digest(document["index"].encode())) == (index, index)
    assert upstream.remove(index)
    pinned = f"{where}@{result['digest']}"
    assert run(["rebuild", pinned, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["same"] is True
    assert "using the mirrored copy" in said.err
    assert run(["rebuild", pinned, "--base", base]) == 8, "a base that is named is the one used"
    assert run(["tags", where]) == 0
    assert "(base)" in capsys.readouterr().out


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_the_tag_of_a_base_is_never_overwritten(
    registry: servers.DockerRegistry,
    thin: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    when: str,
) -> None:
    """Twelve digits of a digest can be made to match, and others can push there."""
    where = f"{registry.address}/{_name(tmp_path)}"
    assert publish(thin, "--to", f"{where}/first", "--mirror-base", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    tag = result["mirrors"][0].rpartition(":")[2]
    opened = repository(registry.address, f"{_name(tmp_path)}/second")
    assert publish(thin, "--to", f"{where}/second", "--move-tag", "other") == 0
    other = opened.manifest("other")

    def put(*_: object, **__: object) -> None:
        opened.put_manifest(other, tag)

    if when == "before":
        put()
    else:

        def copied(source: Any, reference: str, *words: Any) -> Any:
            done = copy_image(source, reference, *words)
            put()
            return done

        monkeypatch.setattr(run_command, "copy_image", copied)
    capsys.readouterr()
    assert publish(thin, "--to", f"{where}/second", "--mirror-base") == 8
    assert "not overwritten" in capsys.readouterr().err
    assert opened.digest_of(tag) == other.digest


def _document(opened: Any, entry: Descriptor) -> bytes:
    (layer,) = opened.manifest(entry.digest).json()["layers"]
    with opened.open(Descriptor.parse(layer, "")) as stream:
        return bytes(stream.read())


def test_an_overlay_has_no_base_image_to_mirror(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(publish_command, "_verify_now", files_only)
    overlays.build(tmp_path / "out")
    overlays.evidence(tmp_path / "out")
    where = f"{registry.address}/{_name(tmp_path)}/overlay"
    assert publish(tmp_path / "out", "--to", where, "--mirror-base") == 2
    assert "no base image to mirror" in capsys.readouterr().err
    assert not tags(registry.address, f"{_name(tmp_path)}/overlay")


# ---------------------------------------------------------------------------------------- rebuild


def rebuild(base: str, *words: str) -> int:
    """The command, with leave to contact the base's registry."""
    return run(["rebuild", *words, "--allow-host", base.partition("/")[0]])


def test_rebuild_gives_the_same_digest(
    base: str, thin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = overlays.build_on(base, tmp_path / "whole", thin=False)
    for layout in (thin, tmp_path / "whole"):
        assert rebuild(base, f"oci:{layout}") == 0
        assert capsys.readouterr().out.strip() == f"same {whole}"


def test_rebuild_ignores_the_current_layers(
    base: str, thin: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(*_words: object) -> None:
        raise AssertionError("the catalogue was read")

    monkeypatch.setattr(Catalog, "discover", forbidden)
    assert rebuild(base, f"oci:{thin}") == 0


def test_rebuild_at_another_time_of_day(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1234567890")
    overlays.build_on(base, tmp_path / "dated")
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert rebuild(base, f"oci:{tmp_path}/dated") == 0


def tampered(layout: Path, change: Any, number: int = -1) -> None:
    """Put an image into a layout whose layer's files were changed; digests are true again."""
    source = LayoutDirectory(layout)
    image = read_subject(source, "").images[0]
    with source.open(image.layers[number]) as stream:
        old = gzip.decompress(stream.read())
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(old)) as tar,
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in tar:
            held = tar.extractfile(member) if member.isfile() else None
            data = held.read() if held else b""
            data = change(member, data)
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    packed = gzip.compress(out.getvalue(), 6, mtime=0)
    layer = Descriptor(media_type=image.layers[number].media_type, digest=sha256_digest(packed),
                       size=len(packed))  # fmt: skip
    config = json.loads((layout / "blobs/sha256" / image.config.digest[7:]).read_bytes())
    config["rootfs"]["diff_ids"][number] = sha256_digest(out.getvalue())
    config["config"]["Env"] += ["ADDED=1"]
    data = json.dumps(config).encode()
    described = Descriptor(media_type=image.config.media_type, digest=sha256_digest(data),
                           size=len(data))  # fmt: skip
    manifest = image.manifest.json()
    manifest["layers"][number], manifest["config"] = layer.as_json(), described.as_json()
    for blob, content in ((layer, packed), (described, data)):
        source.put_blob(blob, io.BytesIO(content))
    raw = RawManifest(data=json.dumps(manifest).encode(), media_type=image.manifest.media_type)
    (layout / "index.json").unlink()
    source.put_manifest(raw, "v1")


def test_rebuild_reports_the_difference(
    base: str, thin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(member: tarfile.TarInfo, data: bytes) -> bytes:
        if member.name.endswith("spark_verify.pyz"):
            return data[:10] + b"XY" + data[12:]
        if member.name.endswith("spark-verify"):
            member.mode = 0o777
        return data

    tampered(thin, change)
    assert rebuild(base, f"oci:{thin}", "--json") == 5
    document = json.loads(capsys.readouterr().out)
    (image,) = document["images"]
    assert document["same"] is image["same"] is False
    found = {row["where"]: row["what"] for row in image["differences"]}
    script = found["/usr/share/spark-build/spark_verify.pyz"]
    assert script.startswith("bytes 10-11 differ")
    assert "0777" in found["/usr/local/bin/spark-verify"]
    assert found["config.Env.ADDED"] == '"1", rebuilt absent'
    assert len(found) == 3
    assert document["error"]["code"] == 5
    layers = {row["blob"] for row in image["differences"] if row["where"].startswith("/")}
    assert len(layers) == 1, "the blob is named"


def test_rebuild_of_an_image_with_another_plan(
    base: str, thin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its label says one plan, and the plan inside is another: nothing is rebuilt from it."""

    def change(member: tarfile.TarInfo, data: bytes) -> bytes:
        if not member.name.endswith("/plan.json"):
            return data
        at = data.index(b'"plan_digest": "sha256:') + len(b'"plan_digest": "sha256:')
        other = b"1" if data[at : at + 1] == b"0" else b"0"
        return data[:at] + other + data[at + 1 :]

    tampered(thin, change)
    assert rebuild(base, f"oci:{thin}") == 2
    assert "modified after the build" in capsys.readouterr().err


def test_rebuild_of_a_foreign_image(
    registry: servers.DockerRegistry, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["rebuild", f"docker://{base}"]) == 2
    assert "not made by spark-build" in capsys.readouterr().err
    assert run(["rebuild", f"docker://{registry.address}/not/there:v1"]) == 8
    assert run(["rebuild", f"docker://{base}", "--engine", "buildkit"]) == 2


def test_layers_are_removed_from_a_thin_image_with_its_base(
    thin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the layers changed is read as it was from the image below, wherever that lies."""
    words = ["verify", f"oci:{thin}", "--prove-necessary", "--level", "static", "--json"]
    assert run(words) == 0
    verdicts = json.loads(capsys.readouterr().out)["necessity"]
    in_force = [verdict for verdict in verdicts if verdict["state"] == "needed"]
    assert in_force
    for verdict in in_force:
        assert verdict["necessary"] == "unknown"
        assert verdict["reason"].startswith("no check fails without it (static), but dispatch was")


# ------------------------------------------------------------------------- whom a rebuild contacts


@pytest.fixture
def contacted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts to which requests were sent, in order."""
    hosts: list[str] = []
    send = Transport.send

    def note(self: Transport, method: str, url: str, **more: Any) -> Any:
        hosts.append(urlsplit(url).netloc)
        return send(self, method, url, **more)

    monkeypatch.setattr(Transport, "send", note)
    return hosts


@pytest.mark.parametrize("stored", ["thin", "whole", "registry"])
def test_a_rebuild_contacts_no_host_that_only_the_plan_names(
    base: str,
    tmp_path: Path,
    stored: str,
    contacted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overlays.build_on(base, tmp_path / stored, thin=stored == "thin")
    image, theirs = f"oci:{tmp_path / stored}", base.partition("/")[0]
    with MemoryRegistry() as memory:
        if stored == "registry":
            opened = repository(memory.address, "x/y")
            digest = copy_image(LayoutDirectory(tmp_path / stored), "", opened, "v").manifest.digest
            image = f"{memory.address}/x/y@{digest}"
        contacted.clear()
        capsys.readouterr()
        assert run(["rebuild", image]) == 2
        said = capsys.readouterr().err
        assert theirs not in contacted
        assert f"{theirs}, which you did not name; nothing was sent there" in said
        assert f"try: spark-build rebuild {image} --allow-host {theirs}\n" in said

        asked: list[str] = []
        monkeypatch.setattr(allowedhosts, "has_terminal", lambda: True)
        monkeypatch.setattr(allowedhosts, "confirm", lambda *words: asked.append(words[0]))
        assert run(["rebuild", image]) == 0
        assert asked == [f"contact {theirs}"]
        asked.clear()
        assert run(["rebuild", image, "--allow-host", theirs]) == 0
        assert run(["rebuild", image, "--base", f"docker://{base}"]) == 0
        assert not asked
    assert run(["rebuild", image, "--allow-host", "http://x"]) == 2


def test_the_registry_of_our_own_bases_is_always_allowed() -> None:
    catalog = Catalog.discover()
    images = [catalog.profile(name).image for name in catalog.profile_files]
    lists = json.loads((package_file("..") / ".github" / "images.json").read_bytes())
    hosts = {parse_reference(name).host for name in (*images, *lists["bases"])}
    assert hosts <= allowedhosts.USUAL
