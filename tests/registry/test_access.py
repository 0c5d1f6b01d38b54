"""Who may do what on real registries: passwords, tokens, helper programs, private authorities."""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from builder.common.net import speaks_tls
from builder.common.reference import Ref
from builder.errors import RemoteError, UsageError
from builder.images.registry.copy import Copied, Locations, copy_image
from builder.images.registry.layout import LayoutDirectory
from tests.faultproxy import Fault, FaultProxy

from . import images
from .conftest import QUICK
from .servers import PASSWORD, USER, DockerRegistry, skopeo
from .tokens import TokenServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engine.machine import Programs

AUTH = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
#: Everything that must never be seen.
SECRETS = (PASSWORD, AUTH, "refresh-me-not")


@pytest.fixture(autouse=True)
def _no_secret_is_shown(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Whatever a test does, on no stream and in no log, the debug logs of libraries included."""
    with caplog.at_level("DEBUG"):
        yield
    shown = capfd.readouterr()
    for secret in SECRETS:
        assert secret not in shown.out + shown.err + caplog.text


@contextmanager
def refusal(match: str) -> Iterator[pytest.ExceptionInfo[RemoteError]]:
    """A clear error, exit code 8, and no secret in it or in anything that hangs on it."""
    with pytest.raises(RemoteError, match=match) as caught:
        yield caught
    assert caught.value.code == 8
    error: BaseException | None = caught.value
    while error is not None:
        for secret in SECRETS:
            assert secret not in f"{error!r} {error} {vars(error)}"
        error = error.__cause__


def config(value: dict[str, Any]) -> None:
    """Write Docker's configuration, where the client looks for it."""
    folder = os.environ["DOCKER_CONFIG"]
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    with open(f"{folder}/config.json", "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(value, file)


def push(path: Path, address: str, name: str, jobs: int = 3) -> Copied:
    """Push the image of a layout with a client that has just been started."""
    with Locations(QUICK) as locations:
        there = locations.open(Ref(f"{address}/{name}"))
        source = LayoutDirectory(path)
        return copy_image(source, "v1", there.image, there.reference, jobs=jobs)


# --- passwords ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(programs: Programs) -> Iterator[DockerRegistry]:
    with DockerRegistry(programs, htpasswd=True) as running:
        yield running


def test_a_password_from_docker_s_configuration(
    guarded: DockerRegistry, programs: Programs, tmp_path: Path
) -> None:
    made = images.image(tmp_path / "from", "password")
    with refusal("needs a user name and a password"):
        push(tmp_path / "from", guarded.address, "password:v1")
    config({"auths": {guarded.address: {"auth": AUTH}}})
    assert push(tmp_path / "from", guarded.address, "password:v1").streamed == 3
    shown = skopeo(
        programs, "inspect", "--tls-verify=false", f"--creds={USER}:{PASSWORD}",
        f"docker://{guarded.address}/password:v1",
    )  # fmt: skip
    assert shown["Digest"] == made.digest


def test_a_wrong_password(guarded: DockerRegistry, tmp_path: Path) -> None:
    images.image(tmp_path / "from", "wrong")
    wrong = base64.b64encode(f"{USER}:not-{PASSWORD}".encode()).decode()
    config({"auths": {guarded.address: {"auth": wrong}}})
    with refusal("answered 401"):
        push(tmp_path / "from", guarded.address, "wrong:v1")


def test_a_password_from_the_environment(
    guarded: DockerRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images.image(tmp_path / "from", "environment")
    monkeypatch.setenv("SPARK_BUILD_REGISTRY", guarded.address)
    monkeypatch.setenv("SPARK_BUILD_REGISTRY_USER", USER)
    monkeypatch.setenv("SPARK_BUILD_REGISTRY_PASSWORD", PASSWORD)
    assert push(tmp_path / "from", guarded.address, "environment:v1").streamed == 3
    monkeypatch.setenv("SPARK_BUILD_REGISTRY", "another.example")
    with refusal("needs a user name"):
        push(tmp_path / "from", guarded.address, "environment:v2")


def helper(folder: Path, name: str, body: str) -> Path:
    """A credential helper that writes down how it was called."""
    program = folder / f"docker-credential-{name}"
    program.write_text(f'#!/bin/sh\nserver=$(cat)\necho "$@ < $server" >> {folder}/calls\n{body}\n')
    program.chmod(0o755)
    return folder / "calls"


def test_a_helper_program(
    guarded: DockerRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images.image(tmp_path / "from", "helper")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    answer = json.dumps({"ServerURL": guarded.address, "Username": USER, "Secret": PASSWORD})
    calls = helper(tmp_path, "test", f"echo '{answer}'")
    config({"credHelpers": {guarded.address: "test"}})
    assert push(tmp_path / "from", guarded.address, "helper:v1").streamed == 3
    assert calls.read_text() == f"get < {guarded.address}\n"
    config({"credsStore": "test"})
    assert push(tmp_path / "from", guarded.address, "helper:v2").present == 3


# --- tokens ---------------------------------------------------------------------------------


@pytest.fixture
def tokens() -> Iterator[TokenServer]:
    server = TokenServer(accounts={USER: PASSWORD}, refresh_tokens={"refresh-me-not": USER})
    with server as running:
        yield running


@pytest.fixture
def guarded_by_tokens(programs: Programs, tokens: TokenServer) -> Iterator[DockerRegistry]:
    with DockerRegistry(programs, tokens=tokens) as running:
        yield running


def test_tokens_for_visitors_and_for_accounts(
    guarded_by_tokens: DockerRegistry, tokens: TokenServer, tmp_path: Path
) -> None:
    address = guarded_by_tokens.address
    made = images.image(tmp_path / "from", "token")
    with refusal("answered 401 .UNAUTHORIZED"):
        push(tmp_path / "from", address, "token/a:v1")
    assert {asked.account for asked in tokens.log} == {""}
    config({"auths": {address: {"auth": AUTH}}})
    tokens.log.clear()
    push(tmp_path / "from", address, "token/a:v1")
    # one token for all of it
    assert [asked.scopes for asked in tokens.log] == [("repository:token/a:pull,push",)]
    config({})
    tokens.log.clear()
    with Locations(QUICK) as locations:  # everybody may read
        there = locations.open(Ref(f"{address}/token/a:v1"))
        copy_image(there.image, "v1", LayoutDirectory(tmp_path / "to"), "v1")
    assert images.check(tmp_path / "to") == made.digest
    assert [asked.scopes for asked in tokens.log] == [("repository:token/a:pull",)]


def test_a_mount_needs_access_to_two_repositories(
    guarded_by_tokens: DockerRegistry, tokens: TokenServer, tmp_path: Path
) -> None:
    address = guarded_by_tokens.address
    images.image(tmp_path / "from", "two")
    config({"auths": {address: {"auth": AUTH}}})
    push(tmp_path / "from", address, "two/a:v1")
    tokens.log.clear()
    with Locations(QUICK) as locations:
        source = locations.open(Ref(f"{address}/two/a:v1"))
        target = locations.open(Ref(f"{address}/two/b:v1"))
        copied = copy_image(source.image, "v1", target.image, "v1")
    assert (copied.mounted, copied.streamed) == (3, 0)
    assert ("repository:two/a:pull", "repository:two/b:pull,push") in [
        asked.scopes for asked in tokens.log
    ]


def test_a_refresh_token_is_exchanged_and_never_sent_to_the_registry(
    guarded_by_tokens: DockerRegistry, tokens: TokenServer, tmp_path: Path
) -> None:
    images.image(tmp_path / "from", "refresh")
    config({"auths": {guarded_by_tokens.address: {"identitytoken": "refresh-me-not"}}})
    push(tmp_path / "from", guarded_by_tokens.address, "refresh:v1")
    assert {asked.grant for asked in tokens.log} == {"refresh_token"}
    config({"auths": {guarded_by_tokens.address: {"identitytoken": "another"}}})
    with refusal(r"a token server that rejects the credential from .*config.json"):
        push(tmp_path / "from", guarded_by_tokens.address, "refresh:v2")


def test_an_expired_token_is_replaced_once(
    guarded_by_tokens: DockerRegistry, tokens: TokenServer, tmp_path: Path
) -> None:
    address = guarded_by_tokens.address
    images.image(tmp_path / "from", "expired")
    config({"auths": {address: {"auth": AUTH}}})
    with FaultProxy(address, expired_token=tokens.expired_token()) as proxy:
        config({"auths": {proxy.address: {"auth": AUTH}}})
        push(tmp_path / "from", proxy.address, "expired/0:v1", jobs=1)
        plain = list(proxy.log)
        # the first request learns that a token is needed; every other one carries one
        assert [seen.status for seen in plain].count(401) == 1
        assert {seen.method for seen in plain} == {"HEAD", "POST", "PATCH", "PUT"}
        for number in range(2, len(plain)):
            proxy.reset({number: Fault.EXPIRED})
            push(tmp_path / "from", proxy.address, f"expired/{number}:v1", jobs=1)
            assert [seen.status for seen in proxy.log].count(401) == 2
            assert len(proxy.log) == len(plain) + 1
    tokens.expired = 10**6  # the token server itself gives out nothing better
    with refusal("answered 401"):
        push(tmp_path / "from", address, "expired/never:v1")


# --- authorities ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def encrypted(programs: Programs, authority: trustme.CA) -> Iterator[DockerRegistry]:
    with DockerRegistry(programs, authority=authority, htpasswd=True) as running:
        yield running


def test_a_private_authority(
    encrypted: DockerRegistry,
    authority: trustme.CA,
    programs: Programs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = images.image(tmp_path / "from", "tls")
    address = encrypted.address
    config({"auths": {address: {"auth": AUTH}}})
    with refusal(r"certificate is not trusted \(unable to get local issuer certificate\)"):
        push(tmp_path / "from", address, "tls:v1")

    folder = tmp_path / "docker" / "certs.d" / address
    folder.mkdir(parents=True)
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    assert push(tmp_path / "from", address, "tls:v1").streamed == 3
    shown = skopeo(
        programs, "inspect", f"--cert-dir={folder}", f"--creds={USER}:{PASSWORD}",
        f"docker://{address}/tls:v1",
    )  # fmt: skip
    assert shown["Digest"] == made.digest

    (folder / "ca.crt").unlink()
    authority.cert_pem.write_to_path(str(tmp_path / "bundle.pem"))
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(tmp_path / "bundle.pem"))
            assert push(tmp_path / "from", address, f"tls:{name}").present == 3


def test_a_certificate_authority_is_used_only_for_its_host(
    encrypted: DockerRegistry, authority: trustme.CA, tmp_path: Path
) -> None:
    folder = tmp_path / "docker" / "certs.d" / "127.0.0.1:1"
    folder.mkdir(parents=True)
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    images.image(tmp_path / "from", "tls")
    with refusal("certificate is not trusted"):
        push(tmp_path / "from", encrypted.address, "tls:v9")


@pytest.fixture(scope="module")
def members() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def members_only(
    programs: Programs, authority: trustme.CA, members: trustme.CA
) -> Iterator[DockerRegistry]:
    with DockerRegistry(programs, authority=authority, clients=members) as running:
        yield running


def as_client(folder: Path, authority: trustme.CA) -> None:
    """A certificate that says who we are, as Docker wants it: NAME.cert and NAME.key."""
    own = authority.issue_cert("tester@registry.example")
    own.private_key_pem.write_to_path(str(folder / "client.key"))
    (folder / "client.cert").unlink(missing_ok=True)
    for pem in own.cert_chain_pems:
        pem.write_to_path(str(folder / "client.cert"), append=True)


def test_a_registry_that_requires_a_client_certificate(
    members_only: DockerRegistry,
    authority: trustme.CA,
    members: trustme.CA,
    programs: Programs,
    tmp_path: Path,
) -> None:
    made = images.image(tmp_path / "from", "member")
    address = members_only.address
    folder = tmp_path / "docker" / "certs.d" / address
    folder.mkdir(parents=True)
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    with refusal("requires a client certificate") as caught:
        push(tmp_path / "from", address, "tls:v1")
    assert f"certs.d/{address}/client.cert" in caught.value.hint
    as_client(folder, trustme.CA())
    with refusal("requires a client certificate"):
        push(tmp_path / "from", address, "tls:v1")
    as_client(folder, members)
    assert push(tmp_path / "from", address, "tls:v1").streamed == 3
    shown = skopeo(programs, "inspect", f"--cert-dir={folder}", f"docker://{address}/tls:v1")
    assert shown["Digest"] == made.digest
    (folder / "client.key").unlink()
    with pytest.raises(UsageError, match=r"client\.cert cannot be used .*No such file"):
        push(tmp_path / "from", address, "tls:v1")


def test_a_client_certificate_is_sent_to_no_other_host(
    members_only: DockerRegistry, authority: trustme.CA, members: trustme.CA, tmp_path: Path
) -> None:
    images.image(tmp_path / "from", "member")
    for host in ("127.0.0.1:1", members_only.address):
        folder = tmp_path / "docker" / "certs.d" / host
        folder.mkdir(parents=True)
        authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    as_client(tmp_path / "docker" / "certs.d" / "127.0.0.1:1", members)
    with refusal("requires a client certificate"):
        push(tmp_path / "from", members_only.address, "tls:v9")


def test_an_older_tls_that_requires_a_certificate_is_still_tls(authority: trustme.CA) -> None:
    """There the server ends the greeting with an alert, which is not plain http."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            client, _ = listener.accept()
            with client, suppress(ssl.SSLError):
                context.wrap_socket(client, server_side=True).close()

        thread = threading.Thread(target=greet)
        thread.start()
        assert speaks_tls(f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
