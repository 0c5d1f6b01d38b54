"""Where credentials come from, and that they are shown nowhere."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.errors import UsageError
from builder.images.registry.transport import find_credential

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "s3cret:with:colons"
AUTH = base64.b64encode(f"me:{SECRET}".encode()).decode()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Docker's configuration folder; Podman's files and the home are beside it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "docker").mkdir()
    return tmp_path


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def docker(folder: Path, value: Any) -> None:
    write(folder / "docker" / "config.json", value)


def test_no_credentials() -> None:
    assert find_credential("ghcr.io", "a/b") is None


@pytest.mark.parametrize(
    "key", ["ghcr.io", "https://ghcr.io", "https://ghcr.io/", "http://ghcr.io/v1/", "ghcr.io/v2/"]
)
def test_docker_config_file(folder: Path, key: str) -> None:
    docker(folder, {"auths": {key: {"auth": AUTH}, "other.example": {"auth": "eDp5"}}})
    found = find_credential("ghcr.io", "a/b")
    assert found is not None
    assert (found.kind, found.username, found.secret) == ("basic", "me", SECRET)
    assert found.basic == f"Basic {AUTH}"
    assert find_credential("ghcr.io.evil.example") is None
    assert SECRET not in repr(found)
    assert AUTH not in repr(found)


@pytest.mark.parametrize("key", ["https://index.docker.io/v1/", "docker.io", "index.docker.io"])
def test_docker_hub_has_many_names(folder: Path, key: str) -> None:
    docker(folder, {"auths": {key: {"auth": AUTH}}})
    assert find_credential("docker.io", "library/debian") is not None


def test_the_longest_path_of_podman_wins(folder: Path) -> None:
    rows = {"ghcr.io": "host", "ghcr.io/a": "space", "ghcr.io/a/b": "repository"}
    write(
        folder / "config" / "containers" / "auth.json",
        {"auths": {key: {"username": name, "password": SECRET} for key, name in rows.items()}},
    )
    for repository, name in (("a/b", "repository"), ("a/c", "space"), ("x", "host")):
        found = find_credential("ghcr.io", repository)
        assert found is not None
        assert found.username == name


def test_a_named_auth_file_is_used_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker(folder, {"auths": {"ghcr.io": {"auth": AUTH}}})
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(folder / "auth.json"))
    assert find_credential("ghcr.io") is None
    write(folder / "auth.json", {"auths": {"ghcr.io": {"identitytoken": SECRET}}})
    found = find_credential("ghcr.io")
    assert found is not None
    assert (found.kind, found.secret) == ("identity", SECRET)


def test_our_variables_apply_to_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_BUILD_REGISTRY_USER", "me")
    monkeypatch.setenv("SPARK_BUILD_REGISTRY_PASSWORD", SECRET)
    with pytest.raises(UsageError, match="must be set together") as caught:
        find_credential("ghcr.io")
    assert SECRET not in str(caught.value)
    monkeypatch.setenv("SPARK_BUILD_REGISTRY", "ghcr.io")
    assert find_credential("docker.io") is None
    found = find_credential("ghcr.io")
    assert found is not None
    assert found.source == "SPARK_BUILD_REGISTRY_PASSWORD"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (f"{{'auths': '{SECRET}'", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ({"auths": SECRET}, "'auths' is not an object"),
        ({"credHelpers": [SECRET]}, "'credHelpers' is not an object"),
        ({"auths": {"ghcr.io": {"auth": f"!{SECRET}"}}}, "is not base64"),
        ({"credsStore": f"../{SECRET}"}, "is not the name of a credential helper"),
        ({"credsStore": {"a": 1}}, "is not the name of a credential helper"),
    ],
)
def test_malformed_files(folder: Path, value: Any, why: str) -> None:
    docker(folder, value)
    with pytest.raises(UsageError, match=r"config\.json") as caught:
        find_credential("ghcr.io")
    assert why in str(caught.value)


def test_an_unreadable_file(folder: Path) -> None:
    (folder / "docker" / "config.json").mkdir()
    with pytest.raises(UsageError, match=r"config\.json cannot be read: Is a directory"):
        find_credential("ghcr.io")


def test_an_empty_file_and_an_entry_without_a_secret(folder: Path) -> None:
    docker(folder, "")
    assert find_credential("ghcr.io") is None
    docker(folder, {"auths": {"ghcr.io": {}}})
    assert find_credential("ghcr.io") is None


def test_a_helper_that_is_not_installed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docker(folder, {"credsStore": "absent", "auths": {"ghcr.io": {"auth": AUTH}}})
    assert find_credential("ghcr.io") is not None
    assert "docker-credential-absent, which is not on PATH" in capsys.readouterr().err
