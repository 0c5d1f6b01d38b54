"""``sign`` and ``verify-signature`` with a real cosign, a key pair, and no transparency log."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.__main__ import run
from builder.pipeline import publish as command
from builder.publishing.evidence import attached_evidence
from tests.engine import cache, debs, machine

from . import overlays, servers
from .test_publish import files_only, publish, ran, repository

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.publishing.evidence import Claim, Evidence

#: The first Debian release with cosign.
SUITE = "trixie"


@pytest.fixture(scope="session")
def cosign() -> Path:
    """The folder of a cosign: this machine's, or Debian's, unpacked."""
    found = shutil.which("cosign")
    if found:
        return Path(found).parent
    if machine.why_not():
        pytest.skip("no cosign here, and Debian's cannot be unpacked")
    unpack = partial(debs.unpack, SUITE, ("cosign",))
    folder = cache.entry(f"cosign/{cache.key(SUITE)}", lambda work: unpack(work / "tree"))
    return folder / "tree" / "usr" / "bin"


@pytest.fixture
def keys(cosign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two key pairs, and cosign on PATH."""
    monkeypatch.setenv("PATH", str(cosign), prepend=":")
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "keys"
    folder.mkdir()
    for name in ("ours", "theirs"):
        subprocess.run(
            [cosign / "cosign", "generate-key-pair", "--output-key-prefix", name],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
    return folder


@pytest.fixture(autouse=True)
def _files_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_verify_now", files_only)


@pytest.fixture
def image(registry: servers.DockerRegistry, tmp_path: Path) -> str:
    """A published image, by tag."""
    overlays.build(tmp_path / "out", tmp_path.name)
    overlays.evidence(tmp_path / "out")
    where = f"{registry.address}/signed/{tmp_path.name.strip('_').replace('_', '-')}"
    assert publish(tmp_path / "out", "--to", where, "--move-tag", "latest") == 0
    return f"{where}:latest"


def verify(image: str, key: Path, *words: str) -> int:
    return run(["verify-signature", image, "--key", str(key), *words])


def test_sign_and_verify(image: str, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(image, keys / "ours.pub") == 5, "nobody has signed yet"
    assert run(["sign", image, "--key", str(keys / "ours.key")]) == 0
    pinned = capsys.readouterr().out.splitlines()[-1]
    assert pinned.startswith(f"{image}@sha256:")
    assert verify(image, keys / "ours.pub", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["passed"], document["signatures"]) == (True, 1)
    assert document["image"] == pinned
    assert verify(image, keys / "theirs.pub") == 5
    assert "no signature that matches" in capsys.readouterr().err

    name = image.removesuffix(":latest")
    assert run(["tags", name, "--json"]) == 0
    (held,) = json.loads(capsys.readouterr().out)["images"]
    assert held["signed"] is True
    assert all("sha256-" not in tag["tag"] for tag in held["tags"])


def test_a_signature_belongs_to_one_image(
    image: str, keys: Path, registry: servers.DockerRegistry, tmp_path: Path
) -> None:
    """The tag is moved on to another image: the old signature says nothing about it."""
    assert run(["sign", image, "--key", str(keys / "ours.key")]) == 0
    other = overlays.build(tmp_path / "other", "other")
    overlays.evidence(tmp_path / "other")
    name = image.removesuffix(":latest")
    assert publish(tmp_path / "other", "--to", name, "--move-tag", "latest") == 0
    assert repository(registry.address, name.partition("/")[2]).digest_of("latest") == other
    assert verify(image, keys / "ours.pub") == 5


def test_signed_evidence_of_another_repository_is_believed(
    image: str, keys: Path, registry: servers.DockerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evidence itself is signed, not only the image."""
    name = image.removesuffix(":latest")
    opened = repository(registry.address, name.partition("/")[2])
    digest = opened.digest_of("latest")
    assert digest is not None
    asked: list[str] = []

    def verify(_checks: object, claim: Claim, levels: Sequence[str]) -> Evidence:
        asked.append(",".join(levels))
        return ran(claim, levels)

    monkeypatch.setattr(command, "_verify_now", verify)
    (evidence,) = attached_evidence(opened, digest)
    assert run(["sign", image, "--key", str(keys / "ours.key")]) == 0
    for number, (key, believed) in enumerate(
        [("ours.pub", False), ("ours.pub", True), ("theirs.pub", False)]
    ):
        if number == 1:
            signed = f"{name}@{evidence.manifest}"
            assert run(["sign", signed, "--key", str(keys / "ours.key")]) == 0
        asked.clear()
        words = ["--to", f"{name}-{number}", "--trust-evidence-key", str(keys / key)]
        assert run(["publish", f"{name}@{digest}", "--overlay", *words]) == 0
        assert asked == ["static,imports", *([] if believed else ["dispatch"])]


def test_signatures_and_evidence_that_are_moved_to_another_image(
    image: str, keys: Path, registry: servers.DockerRegistry, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Who can push copies what our key has signed to where it says nothing."""
    name = image.removesuffix(":latest")
    opened = repository(registry.address, name.partition("/")[2])
    first = opened.digest_of("latest")
    assert first is not None
    (evidence,) = attached_evidence(opened, first)
    for signed in (first, evidence.manifest):
        assert run(["sign", f"{name}@{signed}", "--key", str(keys / "ours.key")]) == 0

    other = overlays.build(tmp_path / "other", "other")
    overlays.evidence(tmp_path / "other")
    assert publish(tmp_path / "other", "--to", name) == 0
    (theirs,) = attached_evidence(opened, other)
    for source, target in ((first, other), (evidence.manifest, theirs.manifest)):
        tags = [f"{digest.replace(':', '-')}.sig" for digest in (source, target)]
        opened.put_manifest(opened.manifest(tags[0]), tags[1])
    for moved in (other, theirs.manifest):
        assert verify(f"{name}@{moved}", keys / "ours.pub") == 5
    # the list of the other image names the signed evidence of the first
    listed = opened.manifest(first.replace(":", "-"))
    opened.put_manifest(listed, other.replace(":", "-"))

    asked: list[str] = []

    def ask(_checks: object, claim: Claim, levels: Sequence[str]) -> Evidence:
        asked.append(",".join(levels))
        return ran(claim, levels)

    monkeypatch.setattr(command, "_verify_now", ask)
    words = ["--to", f"{name}-moved", "--trust-evidence-key", str(keys / "ours.pub")]
    assert run(["publish", f"{name}@{other}", "--overlay", *words]) == 0
    assert asked == ["static,imports", "dispatch"], "nothing of it is believed"


def test_an_encrypted_key_and_no_password(
    image: str, keys: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "wrong")
    assert run(["sign", image, "--key", str(keys / "ours.key")]) == 8
    said = capsys.readouterr().err
    assert "decryption failed" in said
    assert "COSIGN_PASSWORD" in said


def test_without_cosign(
    image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["sign", image, "--key", str(tmp_path / "key")]) == 6
    said = capsys.readouterr().err
    assert "cosign is not installed" in said
    assert "apt-get install cosign" in said


def test_usage(image: str, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sign", image, "--key", "/nonexistent"]) == 2
    assert run(["verify-signature", image]) == 2
    assert "expected signer" in capsys.readouterr().err
    assert run(["verify-signature", "127.0.0.1:1/x:y", "--key", str(keys / "ours.pub")]) == 8
