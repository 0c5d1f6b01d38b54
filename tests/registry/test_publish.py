"""``publish`` on real registries: names, proofs, order, races, and the way back."""

from __future__ import annotations

import json
import threading
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from builder.__main__ import run
from builder.errors import RemoteError
from builder.images.engines import metadata
from builder.images.registry.client import Repository
from builder.images.registry.copy import Locations, copy_image
from builder.images.registry.layout import LayoutDirectory
from builder.pipeline import publish as command
from builder.publishing import evidence
from builder.publishing import evidence as proof
from builder.publishing.evidence import OF_FILES, Evidence, attached_evidence
from builder.publishing.run import _push_from_engine
from builder.publishing.subject import read_subject
from tests.faultproxy import Always, Fault
from tests.memoryregistry import MemoryRegistry

from . import overlays, servers
from .conftest import QUICK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from builder.images.registry.model import Descriptor
    from builder.publishing.evidence import Claim
    from builder.publishing.sources import EngineImage
    from tests.engine.machine import Programs, Registry
    from tests.faultproxy import FaultProxy

TYPES = {proof.EVIDENCE_TYPE, evidence.PROVENANCE_TYPE, evidence.BOM_TYPE}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Impatient; and what verify would need of the package index is not there."""
    monkeypatch.setattr(command, "Locations", partial(Locations, QUICK))

    monkeypatch.setattr(command, "_verify_now", files_only)


def files_only(_checks: object, claim: Claim, levels: Sequence[str]) -> Evidence:
    """What is run of each image; the made-up packages of the tests are in no package index."""
    assert set(levels) <= set(OF_FILES), "what needs more than files was run"
    return ran(claim, levels)


def ran(claim: Claim, levels: Sequence[str], **changes: Any) -> Evidence:
    """The evidence of levels that pass."""
    checks = [{**overlays.PASS, "level": level, "name": "here", **changes} for level in levels]
    document = overlays.report(claim.digest, claim.plan_digest, checks=checks)
    return Evidence(document=document, origin="run now")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A layout with an overlay, and evidence beside it."""
    overlays.build(tmp_path / "out")
    overlays.evidence(tmp_path / "out")
    return tmp_path / "out"


def publish(layout: Path | str, *words: object) -> int:
    """Run the command; evidence that lies beside a layout is given, and an overlay is meant."""
    given: list[str] = []
    if not isinstance(layout, str):
        file = layout.with_suffix(".evidence.json")
        given = ["--evidence", str(file)] if file.exists() else []
        given += ["--overlay"] if read_subject(LayoutDirectory(layout), "").overlay else []
    source = layout if isinstance(layout, str) else f"oci:{layout}"
    return run(["publish", source, *given, *map(str, words)])


def repository(address: str, name: str) -> Repository:
    """A repository as the command opens it."""
    return Repository(Locations(QUICK).registry(address), name)


def tags(address: str, name: str) -> dict[str, str | None]:
    """Tags of images, not those of attachments, and what they name."""
    opened = repository(address, name)
    return {tag: opened.digest_of(tag) for tag in opened.tags() if not tag.startswith("sha256-")}


def name_of(seed: str = "one", *, verified: bool = True) -> str:
    """The immutable tag of a plan."""
    short = overlays.make_plan(seed).digest.removeprefix("sha256:")[:12]
    return f"0.20.1-test-{short}{'' if verified else '-unverified'}"


def attached(address: str, name: str, digest: str) -> list[Descriptor]:
    """What is attached to an image."""
    return list(repository(address, name).referrers(digest))


@pytest.fixture(params=["registry", "second"])
def any_registry(request: pytest.FixtureRequest) -> Registry:
    """One that keeps no list of referrers, and one that does."""
    found: Registry = request.getfixturevalue(request.param)
    return found


# ---------------------------------------------------------------------------- what is published


def test_the_image_and_its_proofs(
    any_registry: Registry, programs: Programs, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = overlays.build(out)
    where = f"{any_registry.address}/first/x"
    assert publish(out, "--to", where) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"{where}:{name_of()}@{digest}"
    assert tags(any_registry.address, "first/x") == {name_of(): digest}
    assert "published" in said.err

    found = attached(any_registry.address, "first/x", digest)
    assert {entry.artifact_type for entry in found} == TYPES
    opened = repository(any_registry.address, "first/x")
    (kept,) = attached_evidence(opened, digest)
    assert kept.document["target"] == digest
    assert "somebody" not in json.dumps(kept.document)

    shown = servers.skopeo(
        programs, "inspect", "--tls-verify=false", f"docker://{where}:{name_of()}"
    )
    assert shown["Digest"] == digest
    for entry in found:
        name = f"docker://{where}@{entry.digest}"
        raw = servers.skopeo(programs, "inspect", "--raw", "--tls-verify=false", name)
        assert raw["subject"]["digest"] == digest
        assert raw["artifactType"] == entry.artifact_type


def test_publishing_again_sends_nothing(
    registry: Registry, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"{registry.address}/again/x"
    assert publish(out, "--to", where, "--move-tag", "latest") == 0
    before = attached(registry.address, "again/x", overlays.build(out))
    capsys.readouterr()
    assert publish(out, "--to", where, "--move-tag", "latest", "--json") == 0
    said = capsys.readouterr()
    (result,) = json.loads(said.out)["results"]
    assert (result["status"], result["steps"], result["sent_bytes"]) == ("up to date", [], 0)
    assert "up to date" in said.err
    assert attached(registry.address, "again/x", overlays.build(out)) == before


def test_a_dry_run_writes_nothing(
    registry: Registry, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--to", f"{registry.address}/dry/x", "--move-tag", "latest", "--dry-run")
    assert publish(out, *words, "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    kinds = [step["kind"] for step in result["steps"]]
    assert kinds == ["image", "attach", "attach", "attach", "tag", "move"]
    assert result["status"] == "dry run"
    assert not repository(registry.address, "dry/x").tags()


def test_an_index_gets_one_tag(
    registry: Registry, programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = overlays.build_index(tmp_path / "many")
    overlays.evidence(tmp_path / "many")
    where = f"{registry.address}/many/x"
    assert publish(tmp_path / "many", "--to", where, "--move-tag", "latest") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f"@{digest}")
    assert set(tags(registry.address, "many/x").values()) == {digest}
    assert name_of() not in tags(registry.address, "many/x"), "the plans are two"
    source = f"docker://{where}:latest"
    servers.skopeo(
        programs, "copy", "--all", "--src-tls-verify=false", source, f"oci:{tmp_path}/back:v1"
    )
    for entry in json.loads(repository(registry.address, "many/x").manifest(digest).data)[
        "manifests"
    ]:
        found = attached(registry.address, "many/x", entry["digest"])
        assert {one.artifact_type for one in found} == TYPES


def test_an_index_with_an_unverified_image_is_refused(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlays.build_index(tmp_path / "many")
    file = overlays.evidence(tmp_path / "many")
    rows = json.loads(file.read_text())
    rows[1]["checks"][0]["status"] = "fail"
    file.write_text(json.dumps(rows))
    assert publish(tmp_path / "many", "--to", f"{registry.address}/many/y") == 5
    assert rows[1]["digests"][0] in capsys.readouterr().err
    assert not repository(registry.address, "many/y").tags()


# --------------------------------------------------------------------------------------- refusals


def test_an_unverified_image_is_refused(
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overlays.build(tmp_path / "bare")
    bad = {"status": "fail", "reason": "damaged"}
    monkeypatch.setattr(command, "_verify_now", lambda _, claim, levels: ran(claim, levels, **bad))
    assert publish(tmp_path / "bare", "--to", f"{registry.address}/refused/x") == 5
    said = capsys.readouterr().err
    assert "is not verified" in said
    assert "damaged" in said
    assert "--force" in said
    assert not repository(registry.address, "refused/x").tags()


def test_verify_runs_if_there_is_no_evidence(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = overlays.build(tmp_path / "bare")
    asked: list[str] = []

    def verify(_checks: object, claim: Claim, levels: Sequence[str]) -> Evidence:
        asked.append(",".join(levels))
        return ran(claim, levels)

    monkeypatch.setattr(command, "_verify_now", verify)
    where = f"{registry.address}/now/x"
    assert publish(tmp_path / "bare", "--to", where) == 0
    assert publish(tmp_path / "bare", "--to", where) == 0
    assert asked == ["static,imports", "dispatch", "static,imports"], "what is attached is found"
    (kept,) = attached_evidence(repository(registry.address, "now/x"), digest)
    assert kept.levels() == ["static", "imports", "dispatch"]


def test_evidence_for_another_digest_is_refused(
    registry: Registry, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = overlays.build(tmp_path / "other", "two")
    file = overlays.evidence(tmp_path / "other")
    words = ("publish", f"oci:{out}", "--to", f"{registry.address}/other/x", "--overlay")
    assert run([*words, "--evidence", str(file)]) == 2
    assert other in capsys.readouterr().err
    file.write_text(json.dumps(overlays.report(overlays.build(out), "sha256:" + "0" * 64)))
    assert run([*words, "--evidence", str(file)]) == 5, "about another plan"
    assert not repository(registry.address, "other/x").tags()


@pytest.mark.parametrize(
    "changes",
    [
        {"checks": [], "passed": True},
        {"checks": [{**overlays.PASS, "level": "static", "name": "x"}]},
        {"checks": [{**overlays.PASS, "level": "static", "name": "x"},
                    {**overlays.PASS, "level": "imports", "name": "y", "status": "not-run"}]},
        {"checks": [{**overlays.PASS, "level": "static", "name": "x"},
                    {**overlays.PASS, "level": "imports", "name": "y", "status": "PASS"}]},
    ],
    ids=["no-check", "level-missing", "not-run", "odd-status"],
)  # fmt: skip
def test_insufficient_evidence_is_refused(
    registry: Registry, out: Path, changes: dict[str, Any]
) -> None:
    overlays.evidence(out, **changes)
    assert publish(out, "--to", f"{registry.address}/nothing/x") == 5
    assert not repository(registry.address, "nothing/x").tags()


def test_fewer_levels_can_be_required(registry: Registry, out: Path) -> None:
    overlays.evidence(out, checks=[{**overlays.PASS, "level": "static", "name": "x"}])
    where = f"{registry.address}/static/x"
    assert publish(out, "--to", where, "--require", "static") == 0


def test_an_immutable_tag_is_never_overwritten(
    registry: Registry,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = f"{registry.address}/taken/x"
    assert publish(out, "--to", where) == 0
    digest = overlays.build(out)
    # the same plan, by code of the same version that was edited
    monkeypatch.setattr(metadata, "COMMAND_TEXT", "#!/bin/sh\n")
    other = overlays.build(tmp_path / "again")
    assert other != digest
    overlays.evidence(tmp_path / "again")
    assert publish(tmp_path / "again", "--to", where, "--move-tag", "latest") == 8
    said = capsys.readouterr().err
    assert digest in said
    assert other in said
    assert "rebuild" in said
    assert tags(registry.address, "taken/x") == {name_of(): digest}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "{}/a/b:tag"], "give only the repository"),
        (["--to", "{}/a/b", "--to", "{}/a/b"], "named twice"),
        (["--to", "{}/a/b", "--move-tag", "no/tag"], "not a tag"),
        (["--to", "{}/a/b", "--move-tag", "latest-previous"], "sets this tag itself"),
        (["--to", "{}/a/b", "--move-tag", "0.20.1-test-0123456789ab"], "cannot be moved"),
        (["--to", "{}/a/b", "--move-tag", "sha256-" + "0" * 64], "cannot be moved"),
        (["--to", "{}/a/b", "--rollback", "latest"], "cannot be combined with SOURCE"),
        (["--to", "{}/a/b", "--require", "dispach"], "did you mean 'dispatch'"),
        (["--to", "{}/a/b", "--evidence", "/nonexistent"], "cannot be read"),
    ],
)
def test_usage(
    registry: Registry,
    out: Path,
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert publish(out, *(word.format(registry.address) for word in words)) == 2
    assert said in capsys.readouterr().err
    assert not repository(registry.address, "a/b").tags()


def test_a_foreign_image_is_refused(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from . import images

    images.image(tmp_path / "foreign")
    assert publish(tmp_path / "foreign", "--to", f"{registry.address}/foreign/x") == 2
    assert "not made by spark-build" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ force


def test_a_forced_image_is_tagged_unverified(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = overlays.build(tmp_path / "bare")
    where = f"{registry.address}/forced/x"
    assert publish(tmp_path / "bare", "--to", where, "--force") == 0
    assert tags(registry.address, "forced/x") == {name_of(verified=False): digest}
    (kept,) = attached_evidence(repository(registry.address, "forced/x"), digest)
    assert (kept.document["passed"], kept.document["forced"]) == (False, True)
    assert kept.document["lacks"]
    capsys.readouterr()
    assert run(["tags", where]) == 0
    assert "UNVERIFIED" in capsys.readouterr().out


def test_a_forced_image_never_gets_a_moving_tag(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlays.build(tmp_path / "bare")
    where = f"{registry.address}/forced/moving"
    assert publish(tmp_path / "bare", "--to", where, "--force", "--move-tag", "latest") == 5
    assert "latest" in capsys.readouterr().err
    assert not repository(registry.address, "forced/moving").tags()


def test_a_forced_image_can_be_verified_later(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = overlays.build(tmp_path / "late")
    where = f"{registry.address}/forced/late"
    assert publish(tmp_path / "late", "--to", where, "--force") == 0
    overlays.evidence(tmp_path / "late")
    assert publish(tmp_path / "late", "--to", where, "--move-tag", "latest") == 0
    assert tags(registry.address, "forced/late") == {
        name_of(verified=False): digest, name_of(): digest, "latest": digest,
    }  # fmt: skip
    capsys.readouterr()
    assert run(["tags", where, "--json"]) == 0
    (held,) = json.loads(capsys.readouterr().out)["images"]
    assert (held["verified"], held["levels"]) == (True, ["static", "imports"])


def test_force_with_good_evidence_publishes_normally(registry: Registry, out: Path) -> None:
    assert publish(out, "--to", f"{registry.address}/forced/good", "--force") == 0
    assert list(tags(registry.address, "forced/good")) == [name_of()]


# ------------------------------------------------------------------------- moving tags, and back


def test_a_moving_tag_and_its_rollback(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"{registry.address}/moving/x"
    digests = {}
    for seed in ("one", "two"):
        digests[seed] = overlays.build(tmp_path / seed, seed)
        overlays.evidence(tmp_path / seed)
        assert publish(tmp_path / seed, "--to", where, "--move-tag", "latest") == 0
    now = tags(registry.address, "moving/x")
    assert (now["latest"], now["latest-previous"]) == (digests["two"], digests["one"])

    capsys.readouterr()
    back = ["publish", "--rollback", "latest", "--to", where]
    assert run(back) == 2
    assert "is an overlay and cannot run alone" in capsys.readouterr().err
    assert run([*back, "--overlay", "--dry-run"]) == 0
    assert tags(registry.address, "moving/x") == now
    assert run([*back, "--overlay"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{where}:latest@{digests['one']}"
    assert tags(registry.address, "moving/x") == {**now, "latest": digests["one"]}

    assert run(back) == 3
    assert "no other previous image" in capsys.readouterr().err
    # forward again, by digest: nothing is uploaded, and the evidence is found there
    source = f"{where}@{digests['two']}"
    assert run(["publish", source, "--to", where, "--move-tag", "latest", "--overlay"]) == 0
    assert tags(registry.address, "moving/x") == now


def test_a_rollback_that_another_publisher_overwrites(
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Within the second after it, on a registry that ignores conditions."""
    where, now = f"{registry.address}/moving/raced", ""
    for seed in ("one", "two"):
        now = overlays.build(tmp_path / seed, seed)
        overlays.evidence(tmp_path / seed)
        assert publish(tmp_path / seed, "--to", where, "--move-tag", "latest") == 0
    opened = repository(registry.address, "moving/raced")
    monkeypatch.setattr(
        Repository, "settle", lambda one: one.put_manifest(opened.manifest(now), "latest")
    )
    assert run(["publish", "--rollback", "latest", "--to", where, "--overlay"]) == 8
    assert f"latest is {now} right after it was set back" in capsys.readouterr().err


def test_rollback_of_a_tag_that_never_moved(
    registry: Registry, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"{registry.address}/moving/once"
    assert publish(out, "--to", where, "--move-tag", "latest") == 0
    assert run(["publish", "--rollback", "latest", "--to", where]) == 3
    assert "there is no latest-previous" in capsys.readouterr().err
    assert run(["publish", "--rollback", "absent", "--to", where]) == 3


def test_from_one_repository_to_another(
    registry: Registry,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whoever can push to the source can attach evidence there, so the levels are run again."""
    digest = overlays.build(out)
    assert publish(out, "--to", f"{registry.address}/from/x") == 0
    capsys.readouterr()
    asked: list[str] = []

    def verify(_checks: object, claim: Claim, levels: Sequence[str]) -> Evidence:
        asked.append(",".join(levels))
        return ran(claim, levels)

    monkeypatch.setattr(command, "_verify_now", verify)
    source = f"{registry.address}/from/x@{digest}"
    assert run(["publish", source, "--to", f"{registry.address}/to/x", "--json", "--overlay"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["sent_blobs"] == 0, "every blob is mounted"
    assert result["mounted_blobs"] == 3
    assert asked == ["static,imports", "dispatch"]
    found = attached(registry.address, "to/x", digest)
    assert {entry.artifact_type for entry in found} == TYPES


# ---------------------------------------------------------------------------- trouble, and others


def faulty(proxy: FaultProxy, fault: Fault, layout: Path, where: str) -> Iterator[int]:
    """Publish with the line broken from request 0 on, from 1 on, ... until it succeeds."""
    for number in range(400):
        proxy.reset()
        proxy.faults = Always(fault, since=number)
        code = publish(layout, "--to", where, "--move-tag", "latest")
        proxy.reset()
        yield code
        if code == 0:
            return


@pytest.mark.parametrize("fault", [Fault.CUT_AFTER, Fault.ERROR_500])
def test_an_interruption_leaves_no_wrong_tag_and_the_next_run_resumes(
    proxy: FaultProxy, registry: Registry, tmp_path: Path, fault: Fault
) -> None:
    """Each run stops one request later than the one before, and goes on where that one stopped."""
    name = f"broken/{fault.name.lower()}"
    old = overlays.build(tmp_path / "old", "old")
    overlays.evidence(tmp_path / "old")
    assert publish(tmp_path / "old", "--to", f"{registry.address}/{name}",
                   "--move-tag", "latest") == 0  # fmt: skip
    before = tags(registry.address, name)
    new = overlays.build(tmp_path / "new", "new")
    overlays.evidence(tmp_path / "new")
    codes = []
    for code in faulty(proxy, fault, tmp_path / "new", f"{proxy.address}/{name}"):
        codes.append(code)
        now = tags(registry.address, name)
        assert now["latest"] in (old, new)
        if name_of("new") in now:  # whoever sees the tag finds everything that belongs to it
            assert now[name_of("new")] == new
            found = attached(registry.address, name, new)
            assert {entry.artifact_type for entry in found} == TYPES
        else:
            assert now == before
        if now["latest"] == new:
            assert now["latest-previous"] == old
            assert now[name_of("new")] == new
    assert codes[-1] == 0
    assert set(codes[:-1]) == {8}
    assert len(codes) > 20
    assert tags(registry.address, name)["latest"] == new


def test_a_failed_target_does_not_stop_the_others(
    proxy: FaultProxy, registry: Registry, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.reset()
    proxy.faults = Always(Fault.ERROR_500)
    good, bad = f"{registry.address}/two/x", f"{proxy.address}/two/y"
    code = publish(out, "--to", bad, "--to", good, "--json")
    proxy.reset()
    assert code == 8
    document = json.loads(capsys.readouterr().out)
    assert [r["repository"] for r in document["results"]] == [good]
    assert [f["repository"] for f in document["failed"]] == [bad]
    assert document["error"]["code"] == 8
    assert name_of() in tags(registry.address, "two/x")
    assert not repository(registry.address, "two/y").tags()


def test_two_runs_publish_the_same_plan_at_once(any_registry: Registry, out: Path) -> None:
    digest = overlays.build(out)
    for turn in range(4):
        name = f"race/{turn}"
        words = ("--to", f"{any_registry.address}/{name}", "--move-tag", "latest")
        codes: list[int] = []
        threads = [
            threading.Thread(target=lambda: codes.append(publish(out, *words)))  # noqa: B023
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert codes == [0, 0, 0]
        assert tags(any_registry.address, name) == {name_of(): digest, "latest": digest}
        found = attached(any_registry.address, name, digest)
        assert {entry.artifact_type for entry in found} == TYPES


# ------------------------------------------------------- what others do to the registry meanwhile


@pytest.fixture
def memory() -> Iterator[MemoryRegistry]:
    with MemoryRegistry() as running:
        yield running


def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, str, str]:
    """An image of the same plan with other bytes: its manifest, type and digest."""
    monkeypatch.setattr(metadata, "COMMAND_TEXT", "#!/bin/sh\n")
    digest = overlays.build(tmp_path / "another")
    made = LayoutDirectory(tmp_path / "another").manifest(digest)
    return made.data, made.media_type, digest


def manifest_path(reference: str) -> str:
    return f"/v2/x/y/manifests/{reference}"


@pytest.mark.parametrize("moment", ["uploading", "conditional", "afterwards"])
def test_one_of_two_publishers_fails_with_a_message(
    memory: MemoryRegistry, out: Path, tmp_path: Path, moment: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The other one writes the tag while we upload, while our tag travels, or right after it."""
    digest = overlays.build(out)
    data, kind, other = another(tmp_path, monkeypatch)
    memory.conditional = moment == "conditional"

    def intrude() -> None:
        memory.manifests["x/y", name_of()] = memory.manifests["x/y", other] = (data, kind)

    tagged = ("PUT", manifest_path(name_of()))
    looked = ("HEAD", manifest_path(name_of()))
    faults: dict[str, dict[tuple[str, str], Callable[[], object]]] = {
        "uploading": {("PUT", manifest_path(digest)): intrude},
        "conditional": {tagged: intrude},
        "afterwards": {tagged: lambda: memory.before.update({looked: intrude})},
    }
    memory.before = faults[moment]
    assert publish(out, "--to", f"{memory.address}/x/y", "--move-tag", "latest") == 8
    said = capsys.readouterr()
    assert (
        f"{name_of()} was made {other}, and this is {digest}: the same plan gave two images"
        in said.err
    )
    assert f"try: spark-build rebuild {memory.address}/x/y@{other}" in said.err
    assert said.out == ""
    assert memory.tag("x/y", name_of()) == other
    assert memory.tag("x/y", "latest") is None


def test_a_moving_tag_moved_by_another_client(
    memory: MemoryRegistry, out: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    data, kind, other = another(tmp_path, monkeypatch)

    def intrude() -> None:
        memory.manifests["x/y", "latest"] = memory.manifests["x/y", other] = (data, kind)

    memory.before = {("PUT", manifest_path(name_of())): intrude}
    assert publish(out, "--to", f"{memory.address}/x/y", "--move-tag", "latest") == 8
    assert f"latest is {other}" in capsys.readouterr().err
    assert memory.tag("x/y", "latest") == other


def test_a_blob_that_was_deleted_is_sent_again(
    memory: MemoryRegistry, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"{memory.address}/x/y"
    assert publish(out, "--to", where, "--move-tag", "latest") == 0
    layer = read_subject(LayoutDirectory(out), "").images[0].layers[0].digest
    memory.lose(layer)
    assert publish(where + ":latest", "--to", where, "--overlay") == 8
    assert layer in capsys.readouterr().err  # there it is not to be had
    capsys.readouterr()
    assert publish(out, "--to", where, "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["status"], result["sent_blobs"]) == ("published", 1)
    assert ("x/y", layer) in memory.blobs
    assert publish(out, "--to", where, "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["status"] == "up to date"


def test_rollback_to_an_incomplete_image_is_refused(
    memory: MemoryRegistry, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"{memory.address}/x/y"
    assert publish(out, "--to", where, "--move-tag", "latest") == 0
    now = overlays.build(tmp_path / "newer", "two")
    overlays.evidence(tmp_path / "newer")
    assert publish(tmp_path / "newer", "--to", where, "--move-tag", "latest") == 0
    layer = read_subject(LayoutDirectory(out), "").images[0].layers[0].digest
    memory.lose(layer)
    words = ["publish", "--rollback", "latest", "--to", where, "--overlay"]
    assert run(words) == 8
    assert layer in capsys.readouterr().err
    assert memory.tag("x/y", "latest") == now


class PushedByEngine:
    """An image of a Docker Engine, as publishing sees it; pushing is what a test says."""

    def __init__(self, digest: str, push: Callable[[], object]) -> None:
        self.image = SimpleNamespace(id=digest, digests=(digest,))
        self._push = push
        self.pushes = 0

    def push(self, _name: str, _tag: str) -> None:
        self.pushes += 1
        self._push()


def in_memory(memory: MemoryRegistry, layout: Path, digest: str) -> None:
    """An image under the immutable tag, however it came there."""
    target = repository(memory.address, "x/y")
    copy_image(LayoutDirectory(layout), digest, target, name_of())


def test_an_engine_push_overwritten_by_another_client(
    memory: MemoryRegistry, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = overlays.build(out)
    *_, other = another(tmp_path, monkeypatch)
    opened = PushedByEngine(digest, lambda: in_memory(memory, tmp_path / "another", other))
    target = repository(memory.address, "x/y")
    with pytest.raises(RemoteError, match=f"was made {other}, and this is {digest}"):
        _push_from_engine(cast("EngineImage", opened), target, name_of())


def test_an_engine_pushes_blobs_lost_by_the_registry_again(
    memory: MemoryRegistry, out: Path
) -> None:
    digest = overlays.build(out)
    opened = PushedByEngine(digest, lambda: in_memory(memory, out, digest))
    target = repository(memory.address, "x/y")
    push = partial(_push_from_engine, cast("EngineImage", opened), target, name_of())
    assert push()
    assert not push()
    memory.lose(read_subject(target, digest).images[0].layers[0].digest)
    assert push()
    assert not push()
    assert opened.pushes == 2
