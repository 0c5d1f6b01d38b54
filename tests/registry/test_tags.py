"""``tags``: what a repository holds, and what retention takes away."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from builder.__main__ import run
from builder.images.registry import copy as locations
from builder.images.registry.copy import Locations
from builder.pipeline import publish as publish_command

from . import images, overlays, servers
from .conftest import QUICK
from .test_publish import attached, files_only, name_of, publish, repository, tags

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engine.machine import Programs


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (publish_command, locations):
        monkeypatch.setattr(module, "Locations", partial(Locations, QUICK))
    monkeypatch.setattr(publish_command, "_verify_now", files_only)


@dataclass
class Keeper(servers.DockerRegistry):
    """A registry that deletes nothing, as its default configuration is."""

    def _config(self, work: Path) -> dict[str, Any]:
        config = super()._config(work)
        config["storage"]["delete"] = {"enabled": False}
        return config


@pytest.fixture
def keeper(programs: Programs) -> Iterator[Keeper]:
    with Keeper(programs) as running:
        yield running


def fill(
    folder: Path, where: str, seeds: str, monkeypatch: pytest.MonkeyPatch, *words: str
) -> dict[str, str]:
    """Publish one image for each letter, an hour after the other; gives their digests."""
    digests = {}
    for seed in seeds:
        digests[seed] = overlays.build(folder / seed, seed)
        overlays.evidence(folder / seed)
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(1_700_000_000 + 3600 * ord(seed)))
        assert publish(folder / seed, "--to", where, *words) == 0
        monkeypatch.delenv("SOURCE_DATE_EPOCH")
    return digests


def test_list(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = f"{registry.address}/list/x"
    digests = fill(tmp_path, where, "ab", monkeypatch, "--move-tag", "latest")
    images.image(tmp_path / "foreign")
    servers.skopeo(
        servers.programs(), "copy", "--dest-tls-verify=false", f"oci:{tmp_path}/foreign:v1",
        f"docker://{where}:foreign",
    )  # fmt: skip
    capsys.readouterr()
    assert run(["tags", where, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    b, a, foreign = document["images"]
    assert [a["digest"], b["digest"]] == [digests["a"], digests["b"]]
    assert {t["tag"]: t["kind"] for t in b["tags"]} == {
        name_of("b"): "immutable", "latest": "moving",
    }  # fmt: skip
    assert {t["kind"] for t in a["tags"]} == {"immutable", "previous"}
    plan = overlays.make_plan("a")
    assert a["plan_digest"] == plan.digest
    assert (a["version"], a["layers"], a["profiles"]) == ("0.20.1", ["fix"], ["test"])
    assert a["base"].startswith("pypi:vllm==0.20.1@sha256:")
    assert a["published"] == "2023-11-18T23:13:20Z"
    assert (a["verified"], a["levels"], a["signed"]) == (True, ["static", "imports"], False)
    manifest = repository(registry.address, "list/x").manifest(digests["a"]).json()
    assert a["added_bytes"] == sum(layer["size"] for layer in manifest["layers"])
    assert foreign["tags"] == [{"tag": "foreign", "kind": "other"}]
    assert (foreign["plan_digest"], foreign["verified"]) == (None, None)

    assert run(["tags", where]) == 0
    text = capsys.readouterr().out
    for word in (name_of("a"), digests["b"], "latest (moving)", "verified (static, imports)"):
        assert word in text
    assert a["overlay"] is True
    assert "an overlay: it runs on vllm/vllm-openai:v0.20.1, not alone" in text
    assert "sha256-" not in text, "attachments are no images"


def test_an_empty_repository(
    registry: servers.DockerRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tags", f"{registry.address}/not/there", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == []


def prune(where: str, keep: int, *words: str) -> int:
    return run(["tags", where, "--prune", "--keep", str(keep), *words])


def test_retention(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The newest two stay, and what a moving tag or its previous image needs."""
    name = "prune/x"
    where = f"{registry.address}/{name}"
    digests = fill(tmp_path, where, "ab", monkeypatch, "--move-tag", "latest")
    digests |= fill(tmp_path, where, "cdef", monkeypatch)
    proofs = [entry.digest for entry in attached(registry.address, name, digests["c"])]
    before = tags(registry.address, name)

    assert prune(where, 2, "--dry-run") == 0
    assert tags(registry.address, name) == before
    capsys.readouterr()
    assert prune(where, 2, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    gone = {row["digest"]: row["reason"] for row in document["images"] if not row["keep"]}
    assert set(gone) == {digests["c"], digests["d"]}
    assert set(document["deleted"]) >= {*gone, *proofs}

    now = tags(registry.address, name)
    assert now == {tag: digest for tag, digest in before.items() if digest not in gone}
    assert {now["latest"], now["latest-previous"]} == {digests["b"], digests["a"]}
    opened = repository(registry.address, name)
    for digest in (digests["c"], *proofs):
        assert opened.digest_of(digest) is None
    assert not any(digests["c"].removeprefix("sha256:") in tag for tag in opened.tags())
    assert len(attached(registry.address, name, digests["a"])) == 3
    assert prune(where, 2) == 0
    assert tags(registry.address, name) == now


def test_retention_counts_each_profile(
    registry: servers.DockerRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = f"{registry.address}/prune/profiles"
    fill(tmp_path, where, "ab", monkeypatch)
    monkeypatch.setattr(overlays, "make_plan", _other_profile(overlays.make_plan))
    fill(tmp_path, where, "cd", monkeypatch)
    assert prune(where, 1) == 0
    left = {tag.split("-")[1] for tag in tags(registry.address, "prune/profiles")}
    assert left == {"test", "other"}
    assert len(tags(registry.address, "prune/profiles")) == 2


def _other_profile(make: Any) -> Any:
    import dataclasses

    return lambda *words: dataclasses.replace(make(*words), name="other", profiles=("other",))


def test_an_index_goes_with_its_images(
    registry: servers.DockerRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = f"{registry.address}/prune/index"
    digest = overlays.build_index(tmp_path / "a", "a")
    overlays.evidence(tmp_path / "a")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert publish(tmp_path / "a", "--to", where) == 0
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    fill(tmp_path, where, "b", monkeypatch)
    opened = repository(registry.address, "prune/index")
    children = [entry["digest"] for entry in opened.manifest(digest).json()["manifests"]]
    assert prune(where, 1) == 0
    assert list(tags(registry.address, "prune/index")) == [name_of("b")]
    assert [opened.digest_of(child) for child in children] == [None, None]


def test_proofs_of_deleted_images(
    registry: servers.DockerRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an interrupted run has left is taken away by the next."""
    name = "prune/orphans"
    where = f"{registry.address}/{name}"
    digests = fill(tmp_path, where, "ab", monkeypatch)
    opened = repository(registry.address, name)
    assert opened.remove(digests["a"])
    assert len(opened.tags()) == 3
    assert prune(where, 1) == 0
    assert len(opened.tags()) == 2


def test_a_registry_that_refuses_deletes(
    keeper: Keeper,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = f"{keeper.address}/kept/x"
    fill(tmp_path, where, "ab", monkeypatch)
    assert prune(where, 1, "--dry-run") == 0
    assert prune(where, 1) == 8
    said = capsys.readouterr().err
    assert "refuses deletes" in said
    assert name_of("a") in said
    assert len(tags(keeper.address, "kept/x")) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prune"], "must be set together"),
        (["--keep", "3"], "must be set together"),
        (["--prune", "--keep", "0"], "1 or more"),
    ],
)
def test_usage(
    registry: servers.DockerRegistry,
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["tags", f"{registry.address}/usage/x", *words]) == 2
    assert said in capsys.readouterr().err
