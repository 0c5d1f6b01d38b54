"""Credential helpers that are started."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from builder.errors import RemoteError
from builder.images.registry import transport
from builder.images.registry.transport import Credential, find_credential
from tests.unit.images.registry.test_credentials import AUTH, SECRET, docker, folder  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from pathlib import Path


def helper(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    program = folder / "docker-credential-test"
    program.write_text(f"#!{sys.executable}\nimport sys, time\nserver = sys.stdin.read()\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    docker(folder, {"credsStore": "test"})


def test_a_helper(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = f'print(\'{{"Username": "%s", "Secret": "{SECRET}"}}\' % (sys.argv[1] + " " + server))'
    helper(folder, monkeypatch, answer)
    found = find_credential("ghcr.io", "a/b")
    assert found == Credential(
        kind="basic", source="docker-credential-test", username="get ghcr.io", secret=SECRET
    )
    hub = find_credential("docker.io")
    assert hub is not None
    assert hub.username == "get https://index.docker.io/v1/"
    helper(folder, monkeypatch, f'print(\'{{"Username": "<token>", "Secret": "{SECRET}"}}\')')
    token = find_credential("ghcr.io")
    assert token is not None
    assert token.kind == "identity"


def test_a_helper_without_a_credential_falls_back_to_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "print('credentials not found in native keychain'); sys.exit(1)"
    helper(folder, monkeypatch, body)
    assert find_credential("ghcr.io") is None
    docker(folder, {"credsStore": "test", "auths": {"ghcr.io": {"auth": AUTH}}})
    assert find_credential("ghcr.io") is not None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (f"print('{SECRET}'); sys.exit(3)", "exited 3 for ghcr.io"),
        (f"print('{SECRET}')", "returned no user name and secret"),
        (f'print(\'{{"Username": 1, "Secret": "{SECRET}"}}\')', "returned no user name"),
        ("time.sleep(60)", "did not answer for ghcr.io in 0 s"),
    ],
)
def test_a_helper_that_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, why: str
) -> None:
    monkeypatch.setattr(transport, "HELPER_TIMEOUT", 0.4 if "sleep" in body else 9)
    helper(folder, monkeypatch, body)
    with pytest.raises(RemoteError, match="docker-credential-test") as caught:
        find_credential("ghcr.io")
    assert why in str(caught.value)
    assert SECRET not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"
    assert caught.value.code == 8
