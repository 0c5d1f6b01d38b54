"""What others attach to an image: it is evidence only where it is believed, and never blocks."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.__main__ import run
from builder.errors import Exit, RemoteError, SparkBuildError
from builder.images.registry.copy import copy_image
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import OCI_INDEX, Descriptor, RawManifest
from builder.pipeline import publish as command
from builder.publishing import evidence, signedevidence
from builder.publishing.evidence import (
    BOM_TYPE,
    EVIDENCE_TYPE,
    PASSED,
    PASSED_LEVELS,
    PROVENANCE_TYPE,
    attached_evidence,
)
from builder.publishing.repository import Attachment, attach
from builder.publishing.subject import read_blob, read_subject

from . import images, overlays
from .test_on_base import tampered
from .test_publish import (
    _quick,  # noqa: F401
    any_registry,  # noqa: F401
    attached,
    files_only,
    name_of,
    out,  # noqa: F401
    publish,
    ran,
    repository,
    tags,
)
from .test_retention import prune, put_index
from .test_tags import fill

if TYPE_CHECKING:
    import tarfile
    from collections.abc import Sequence
    from pathlib import Path

    from builder.images.registry.client import Repository
    from builder.images.registry.model import ImageSource
    from builder.images.registry.reference import Reference
    from builder.publishing.cosign import Trust
    from builder.publishing.evidence import Claim, Evidence
    from tests.engine.machine import Registry

ALL = ("static", "imports", "dispatch")
MARKS = {PASSED: "true", PASSED_LEVELS: ",".join(ALL)}
DEEP = b'{"checks": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"


def good(digest: str, plan_digest: str) -> bytes:
    """Evidence in which everything passed."""
    checks = [{**overlays.PASS, "level": level, "name": "all"} for level in ALL]
    return json.dumps(overlays.report(digest, plan_digest, checks=checks)).encode()


def put(opened: Repository, digest: str, data: bytes, kind: str = EVIDENCE_TYPE) -> str:
    """Attach a document to an image, with marks of success; gives the manifest's digest."""
    attachment = Attachment(artifact_type=kind, data=data, annotations=MARKS)
    subject = opened.manifest(digest).descriptor
    attach(opened, subject, attachment)
    return attachment.manifest(subject).digest


def put_elsewhere(opened: Repository, digest: str, data: bytes) -> str:
    """A document of another image, which a list names as attached to this one."""
    other = Descriptor(media_type="x", digest="sha256:" + "9" * 64, size=3)
    attachment = Attachment(artifact_type=EVIDENCE_TYPE, data=data, annotations=MARKS)
    opened.put_blob(attachment.blob, io.BytesIO(data))
    made = attachment.manifest(other)
    opened.put_blob(Descriptor.parse(made.json()["config"], ""), io.BytesIO(b"{}"))
    opened.put_manifest(made, made.digest)
    entry = {
        **made.descriptor.as_json(), "artifactType": EVIDENCE_TYPE, "annotations": MARKS,
    }  # fmt: skip
    tag = digest.replace(":", "-")
    there = opened.digest_of(tag)
    document: dict[str, Any] = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
    if there is not None:
        document = opened.manifest(there).json()
    document["manifests"].append(entry)
    raw = RawManifest(data=images.document(document), media_type=OCI_INDEX)
    opened.put_manifest(raw, tag)
    return made.digest


# ------------------------------------------------------------------------------- in the source


@pytest.fixture
def source(registry: Registry, tmp_path: Path) -> tuple[str, str]:
    """An image whose file was changed after the build, with evidence of a stranger: it passed."""
    name = tmp_path.name.strip("_").replace("_", "-")[-20:].strip("-")
    base = overlays.put_base(tmp_path / "base", f"{registry.address}/{name}/vllm:v1")
    overlays.build_on(base, tmp_path / "whole", thin=False)

    def change(member: tarfile.TarInfo, data: bytes) -> bytes:
        return data + b"import os\n" if member.name.endswith("vllm/core.py") else data

    layout = LayoutDirectory(tmp_path / "whole")
    number = next(
        at for at, layer in enumerate(read_subject(layout, "").images[0].layers)
        if _has(layout, layer, "vllm/core.py") and at > 2
    )  # fmt: skip
    tampered(tmp_path / "whole", change, number)
    (image,) = read_subject(layout, "").images
    opened = repository(registry.address, f"{name}/theirs")
    copy_image(layout, "", opened, "v1")
    put(opened, image.digest, good(image.digest, image.plan_digest))
    return f"{opened.name}@{image.digest}", f"{registry.address}/{name}/mine"


def _has(layout: LayoutDirectory, layer: Descriptor, end: str) -> bool:
    import gzip
    import tarfile

    with layout.open(layer) as stream:
        data = stream.read()
    data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return any(name.endswith(end) for name in tar.getnames())


@pytest.mark.parametrize("words", [(), ("--require", "static")], ids=["all", "static"])
def test_an_image_that_fails_static_is_never_published(
    source: tuple[str, str],
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever is attached to it: who can write the source can attach anything there."""
    monkeypatch.undo()
    image, where = source
    assert run(["publish", image, "--to", where, "--move-tag", "latest", *words]) == 5
    said = capsys.readouterr()
    assert "vllm/core.py" in said.err
    assert "is not verified" in said.err
    address, _, name = where.partition("/")
    assert not tags(address, name)


def test_evidence_in_the_target_does_not_replace_static_either(
    source: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    image, _ = source
    assert run(["publish", image, "--to", image.partition("@")[0], "--move-tag", "latest"]) == 5


@pytest.mark.parametrize("signed", [None, "evidence", "image"])
def test_evidence_of_a_stranger_needs_the_signature_of_a_key_that_the_user_names(
    registry: Registry,
    out: Path,  # noqa: F811
    signed: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The evidence must be signed: a signature of the image says only who made the image."""
    where = f"{registry.address}/stranger/{signed or 'none'}"
    assert publish(out, "--to", where, "--require", "static,imports") == 0
    digest = overlays.build(out)
    opened = repository(registry.address, where.partition("/")[2])
    theirs = put(opened, digest, good(digest, overlays.make_plan().digest))
    asked: list[Sequence[str]] = []
    known = {"evidence": theirs, "image": digest}.get(signed or "")

    def verify_signature(reference: Reference, trust: Trust) -> None:
        assert trust.key == "cosign.pub"
        if reference.digest != known:
            raise SparkBuildError("no signature that matches", Exit.VERIFY_FAILED)

    def verify(_checks: object, claim: Claim, levels: Sequence[str]) -> Evidence:
        asked.append(levels)
        return ran(claim, levels)

    monkeypatch.setattr(command, "_verify_now", verify)
    monkeypatch.setattr(signedevidence, "verify_signature", verify_signature)
    key = ["--trust-evidence-key", "cosign.pub"] if signed else []
    words = ["publish", f"{where}@{digest}", "--to", f"{where}-mine", "--overlay", *key]
    assert run(words) == 0
    assert (("dispatch",) in map(tuple, asked)) == (signed != "evidence")
    assert ("static", "imports") in map(tuple, asked)
    capsys.readouterr()


def test_a_level_that_was_not_run_by_default_is_named_with_the_command(
    registry: Registry,
    out: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["publish", f"oci:{out}", "--to", f"{registry.address}/stranger/c", "--overlay"]

    def verify(_checks: object, claim: Claim, levels: Sequence[str]) -> Evidence:
        idle = {"status": "not-run", "reason": "no compiler"} if "codegen" in levels else {}
        return ran(claim, levels, **idle)

    monkeypatch.setattr(command, "_verify_now", verify)
    assert run([*words, "--require", "static,codegen"]) == 5
    said = capsys.readouterr().err
    assert "codegen here was not run: no compiler" in said
    hint = f"try: spark-build verify oci:{out} --level static,codegen --json >evidence.json"
    assert hint in said


# -------------------------------------------------------------------------------- in the target


GARBAGE = [b"", b"{}", b"[]", DEEP, b"\xff", b'{"checks": 1e999}', b'{"checks": [1]}']


@pytest.mark.parametrize("data", GARBAGE, ids=lambda data: repr(data[:12]))
def test_garbage_that_says_passed_does_not_keep_evidence_out(
    any_registry: Registry,  # noqa: F811
    out: Path,  # noqa: F811
    data: bytes,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither in the list that clients write, nor in that of the registry."""
    digest = overlays.build(out)
    name = f"garbage/x{GARBAGE.index(data)}"
    where = f"{any_registry.address}/{name}"
    opened = repository(any_registry.address, name)
    assert publish(out, "--to", where, "--force") == 0
    (kept,) = [e for e in attached(any_registry.address, name, digest) if "evidence" in
               e.artifact_type]  # fmt: skip
    assert opened.remove(kept.digest)
    bad = [put(opened, digest, data, kind)
           for kind in (EVIDENCE_TYPE, PROVENANCE_TYPE, BOM_TYPE)]  # fmt: skip
    capsys.readouterr()
    assert run(["tags", where, "--json"]) == 0
    said = capsys.readouterr()
    assert {image["verified"] for image in json.loads(said.out)["images"]} == {None}
    assert bad[0] in said.err

    assert publish(out, "--to", where, "--move-tag", "latest") == 0
    assert bad[0] in capsys.readouterr().err, "it is named"
    (true,) = [e for e in attached_evidence(opened, digest) if e.manifest != bad[0]]
    assert true.levels()[:2] == ["static", "imports"]
    assert run(["tags", where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"][0]["verified"] is True
    before = len(attached(any_registry.address, name, digest))
    assert publish(out, "--to", where) == 0
    assert len(attached(any_registry.address, name, digest)) == before


def test_an_entry_of_another_image_says_nothing(
    registry: Registry,
    out: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    digest = overlays.build(out)
    where = f"{registry.address}/garbage/other"
    opened = repository(registry.address, "garbage/other")
    assert publish(out, "--to", where, "--require", "static") == 0
    for entry in attached(registry.address, "garbage/other", digest):
        assert opened.remove(entry.digest)
    assert opened.remove(str(opened.digest_of(digest.replace(":", "-"))))
    put_elsewhere(opened, digest, good(digest, overlays.make_plan().digest))
    capsys.readouterr()
    assert run(["tags", where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"][0]["verified"] is None
    assert list(attached_evidence(opened, digest)) == []
    assert publish(out, "--to", where) == 0
    assert len(list(attached_evidence(opened, digest))) == 1


def test_a_listed_document_that_is_gone_is_attached_again(
    registry: Registry,
    out: Path,  # noqa: F811
) -> None:
    """A list names it, in advance or because it was deleted; the document itself counts."""
    digest = overlays.build(out)
    where = f"{registry.address}/garbage/gone"
    assert publish(out, "--to", where) == 0
    opened = repository(registry.address, "garbage/gone")
    entries = attached(registry.address, "garbage/gone", digest)
    for entry in entries:
        assert opened.remove(entry.digest)
    assert publish(out, "--to", where) == 0
    now = [e for e in attached(registry.address, "garbage/gone", digest)
           if opened.digest_of(e.digest)]  # fmt: skip
    assert {e.artifact_type for e in now} == {EVIDENCE_TYPE, PROVENANCE_TYPE, BOM_TYPE}


def test_prune_deletes_only_what_is_attached_to_the_image_itself(
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A list is written by anybody, and can name every manifest of the repository."""
    monkeypatch.setattr(command, "_verify_now", files_only)
    where = f"{registry.address}/garbage/prune"
    digests = fill(tmp_path, where, "ab", monkeypatch)
    opened = repository(registry.address, "garbage/prune")
    theirs = put_elsewhere(opened, digests["a"], b"{}")
    own = {e.digest for e in attached(registry.address, "garbage/prune", digests["a"])} - {theirs}
    wish = prune(capsys, where, 1, "--dry-run")
    assert theirs not in {row["digest"] for row in wish["removals"]}
    document = prune(capsys, where, 1)
    assert {digests["a"], *own} <= set(document["deleted"])
    assert theirs not in document["deleted"]
    assert opened.digest_of(theirs) == theirs
    for seen in (wish, document):
        (spared,) = seen["spared"]
        assert spared["digest"] == theirs
        assert "it is attached to sha256:999" in spared["reason"]


def test_prune_leaves_the_list_of_others(
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A list for an image that is not here, of documents that are not about it, is not ours."""
    monkeypatch.setattr(command, "_verify_now", files_only)
    where = f"{registry.address}/garbage/lists"
    digests = fill(tmp_path, where, "a", monkeypatch)
    opened = repository(registry.address, "garbage/lists")
    gone = "sha256:" + "7" * 64
    theirs = put_elsewhere(opened, gone, b"{}")
    put_index(opened, "both", opened.manifest(digests["a"]).descriptor)
    document = prune(capsys, where, 1)
    assert document["deleted"] == []
    assert opened.digest_of(theirs) == theirs
    assert opened.digest_of(gone.replace(":", "-")) is not None


def test_an_image_whose_evidence_cannot_be_read_is_not_pruned(
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It may be verified: a registry that fails for a moment must not cost an image."""
    monkeypatch.setattr(command, "_verify_now", files_only)
    where = f"{registry.address}/garbage/unread"
    fill(tmp_path, where, "abc", monkeypatch)

    def fail(source: ImageSource, blob: Descriptor, limit: int) -> bytes:
        if blob.media_type == EVIDENCE_TYPE:
            raise RemoteError("answered 503")
        return read_blob(source, blob, limit)

    monkeypatch.setattr(evidence, "read_blob", fail)
    document = prune(capsys, where, 1)
    assert document["deleted"] == []
    assert {row["reason"] for row in document["images"]} == {"not all of its evidence can be read"}
    monkeypatch.setattr(evidence, "read_blob", read_blob)
    assert len(prune(capsys, where, 1, "--dry-run")["removals"]) > 1


def test_force_does_not_need_what_cannot_be_run(
    registry: Registry,
    out: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(*_words: object) -> Evidence:
        raise RemoteError("no route to host")

    monkeypatch.setattr(command, "_verify_now", offline)
    where = f"{registry.address}/garbage/offline"
    assert publish(out, "--to", where) == 8
    assert publish(out, "--to", where, "--force") == 0
    assert list(tags(registry.address, "garbage/offline")) == [name_of(verified=False)]
