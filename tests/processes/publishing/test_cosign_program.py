"""A cosign that hangs, says too much, cannot be started, or says yes about something else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from builder.errors import EngineError, Exit, RemoteError, SparkBuildError
from builder.images.registry.reference import parse_reference
from builder.publishing import cosign
from builder.publishing.cosign import Trust, sign, verify_signature

if TYPE_CHECKING:
    from pathlib import Path

DIGEST = "sha256:" + "a" * 64
IMAGE = parse_reference(f"registry.example/a/b@{DIGEST}")
ANSWER = json.dumps([{"critical": {"image": {"docker-manifest-digest": DIGEST}}}])


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A key; nothing but this folder is on PATH before the system's."""
    (tmp_path / "key").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return str(tmp_path / "key")


def program(folder: Path, text: str) -> None:
    path = folder / "cosign"
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    "text",
    ["#!/bin/sh\nexec sleep 5\n", "#!/bin/sh\nsleep 5\n", "#!/bin/sh\nsleep 5 &\nwait\n"],
    ids=["itself", "child", "background"],
)
def test_one_that_hangs(
    text: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with children that keep its output open."""
    program(tmp_path, text)
    monkeypatch.setattr(cosign, "_PATIENCE", 0.2)
    for work in (sign, verify_signature):
        with pytest.raises(RemoteError, match="did not answer for registry"):
            work(IMAGE, Trust(key=key))


@pytest.mark.parametrize("end", ["", " >&2", "; exit 12"])
def test_one_that_says_too_much(
    end: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, f"#!/bin/sh\nhead -c 3000000 /dev/zero{end}\n")
    monkeypatch.setattr(cosign, "_MOST", 1 << 20)
    with pytest.raises(RemoteError, match="more than 1 MiB"):
        verify_signature(IMAGE, Trust(key=key))


def test_one_that_cannot_be_started(key: str, tmp_path: Path) -> None:
    program(tmp_path, "#!/nonexistent\n")
    with pytest.raises(EngineError, match="cannot be run"):
        verify_signature(IMAGE, Trust(key=key))


@pytest.mark.parametrize(
    ("answer", "passes"),
    [(ANSWER, True), ("", False), ("[]", False), (ANSWER.replace("aa", "ab"), False)],
)
def test_yes_counts_for_this_digest_only(
    answer: str, passes: bool, key: str, tmp_path: Path
) -> None:
    program(tmp_path, f"#!/bin/sh\necho '{answer}'\necho noise >&2\n")
    if passes:
        assert verify_signature(IMAGE, Trust(key=key)).signatures == 1
        return
    with pytest.raises(SparkBuildError) as caught:
        verify_signature(IMAGE, Trust(key=key))
    assert caught.value.code in (Exit.VERIFY_FAILED, Exit.REMOTE)


def test_what_it_says_is_shown(key: str, tmp_path: Path) -> None:
    program(tmp_path, "#!/bin/sh\necho 'Error: no signatures found' >&2\nexit 10\n")
    with pytest.raises(SparkBuildError, match="no signature that matches: no signatures found"):
        verify_signature(IMAGE, Trust(key=key))
