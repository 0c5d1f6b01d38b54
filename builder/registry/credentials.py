"""Registry credentials from Docker's and Podman's files and credential helpers.

No secret appears in a message, a ``repr`` or a command line.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from builder import settings
from builder.errors import RemoteError, UsageError
from builder.registry.model import parse_json
from builder.registry.reference import DOCKER_HUB
from builder.util.console import console

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: The key that ``docker login`` uses for Docker Hub.
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"
#: Timeout in seconds: helpers may query a key chain or a cloud, but must not wait for user input.
HELPER_TIMEOUT = 30.0
_HELPER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: The user name that helpers return with an identity token, which is exchanged and never sent.
_TOKEN_USER = "<token>"  # noqa: S105 - a name of the helpers' protocol, not a secret
_VARIABLES = (settings.REGISTRY, settings.REGISTRY_USER, settings.REGISTRY_PASSWORD)


@dataclass(frozen=True, kw_only=True)
class Credential:
    """A registry credential.

    ``kind`` is ``basic`` (user and password), ``identity`` (a refresh token that the token
    server exchanges) or ``bearer`` (a registry token, sent as it is).
    """

    kind: Literal["basic", "identity", "bearer"]
    source: str
    username: str = ""
    secret: str = field(repr=False)

    @property
    def basic(self) -> str:
        """The value of an ``Authorization: Basic`` header."""
        pair = f"{self.username}:{self.secret}".encode()
        return f"Basic {base64.b64encode(pair).decode()}"


def find_credential(host: str, repository: str = "") -> Credential | None:
    """The credential for a repository, or None for anonymous access.

    In this order: our own three variables, where they name this host; ``REGISTRY_AUTH_FILE`` if it
    is set, else Docker's ``config.json``, then Podman's ``auth.json``.

    Raises:
        UsageError: a file or variable is malformed.
        RemoteError: a helper program failed.
    """
    found = _from_environment(host)
    if found is not None:
        return found
    for path in _files():
        config = _read(path)
        if config is not None:
            found = _from_config(config, path, host, repository)
            if found is not None:
                return found
    return None


def _from_environment(host: str) -> Credential | None:
    registry, user, password = (variable.value for variable in _VARIABLES)
    if not (user or password):
        return None
    if not (registry and user and password):
        names = ", ".join(variable.name for variable in _VARIABLES)
        raise UsageError(
            f"{names} must be set together; the first names the only host that receives the "
            f"other two"
        )
    if registry not in _names(host):
        return None
    return Credential(
        kind="basic", source=settings.REGISTRY_PASSWORD.name, username=user, secret=password
    )


def _files() -> Iterator[Path]:
    named = os.environ.get("REGISTRY_AUTH_FILE")
    if named:
        yield Path(named)
        return
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and no such user: a bare container
        home = Path("/nonexistent")
    yield Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield Path(runtime) / "containers" / "auth.json"
    config = os.environ.get("XDG_CONFIG_HOME")
    yield (Path(config) if config else home / ".config") / "containers" / "auth.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    try:
        value = parse_json(data or b"{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object", hint=f"docker login, or remove {path}")
    return value


def _from_config(
    config: Mapping[str, Any], path: Path, host: str, repository: str
) -> Credential | None:
    """``credHelpers`` before ``credsStore`` before ``auths``, as Docker does."""
    helpers = _table(config, "credHelpers", path)
    for key in _names(host):
        if key in helpers:
            return _ask_helper(helpers[key], key, path)
    store = config.get("credsStore")
    if store:
        found = _ask_helper(store, _DOCKER_HUB_KEY if host == DOCKER_HUB else host, path)
        if found is not None:
            return found
    auths = {_plain(key): value for key, value in _table(config, "auths", path).items()}
    for key in _keys(host, repository):
        entry = auths.get(key)
        if isinstance(entry, dict) and (found := _from_entry(entry, path, key)) is not None:
            return found
    return None


def _table(config: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise UsageError(f"{path}: {name!r} is not an object")
    return value


def _names(host: str) -> tuple[str, ...]:
    if host == DOCKER_HUB:
        return (_DOCKER_HUB_KEY, DOCKER_HUB, "index.docker.io", "registry-1.docker.io")
    return (host, f"https://{host}")


def _plain(key: str) -> str:
    """Host and path of a key: old files hold addresses of the version 1 API."""
    plain = re.sub(r"^https?://", "", key).rstrip("/")
    return re.sub(r"/v[12]$", "", plain)


def _keys(host: str, repository: str) -> Iterator[str]:
    """Podman keys by path, the longest wins; Docker keys by host."""
    parts = repository.split("/") if repository else []
    for name in dict.fromkeys(_plain(name) for name in _names(host)):
        for length in range(len(parts), -1, -1):
            yield "/".join([name, *parts[:length]])


def _from_entry(entry: Mapping[str, Any], path: Path, key: str) -> Credential | None:
    source = f"{path} ({key})"
    texts = {name: value for name, value in entry.items() if isinstance(value, str) and value}
    if "identitytoken" in texts:
        return Credential(kind="identity", source=source, secret=texts["identitytoken"])
    if "registrytoken" in texts:
        return Credential(kind="bearer", source=source, secret=texts["registrytoken"])
    username, password = texts.get("username", ""), texts.get("password", "")
    if "auth" in texts:
        try:
            pair = base64.b64decode(texts["auth"], validate=True).decode()
        except (binascii.Error, ValueError):
            raise UsageError(
                f"{path}: 'auth' of {key} is not base64", hint=f"docker login {key}"
            ) from None
        username, _, password = pair.partition(":")
        password = password.rstrip("\0")
    if not username:
        return None
    return Credential(kind="basic", source=source, username=username, secret=password)


def _ask_helper(name: object, server: str, path: Path) -> Credential | None:
    """``docker-credential-NAME get``: the server goes to its stdin, JSON comes from its stdout."""
    if not isinstance(name, str) or not _HELPER_NAME.fullmatch(name):
        raise UsageError(f"{path}: {name!r} is not the name of a credential helper")
    program = f"docker-credential-{name}"
    if shutil.which(program) is None:
        console.warn(f"{path} names {program}, which is not on PATH; continuing without it")
        return None
    try:
        done = subprocess.run(
            [program, "get"],
            input=server.encode(),
            capture_output=True,
            timeout=HELPER_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RemoteError(
            f"{program} did not answer for {server} in {HELPER_TIMEOUT:.0f} s",
            hint=f"try it by hand: echo {server} | {program} get",
        ) from None
    except OSError as error:
        raise RemoteError(f"{program} cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        if b"credentials not found" in done.stdout + done.stderr:
            return None
        raise RemoteError(
            f"{program} exited {done.returncode} for {server}",
            hint=f"try it by hand: echo {server} | {program} get",
        )
    return _from_helper(done.stdout, program)


def _from_helper(output: bytes, program: str) -> Credential | None:
    try:
        answer = parse_json(output)
        username, secret = answer["Username"], answer["Secret"]
    except (ValueError, KeyError, TypeError):
        answer = username = secret = None
    if not isinstance(username, str) or not isinstance(secret, str):
        raise RemoteError(f"{program} returned no user name and secret")
    if not secret:
        return None
    if username == _TOKEN_USER:
        return Credential(kind="identity", source=program, secret=secret)
    return Credential(kind="basic", source=program, username=username, secret=secret)
