"""Challenges and tokens: what is asked for, what is sent, and to whom."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
from requests.adapters import HTTPAdapter

from builder.errors import RemoteError
from builder.images.registry.transport import _token_of, parse_challenge
from tests.unit.fakeregistry import FakeRegistry, Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    import requests

ZERO = "sha256:" + "0" * 64
SECRET = "never-to-be-seen"


@pytest.mark.parametrize(
    ("value", "scheme", "parameters"),
    [
        ('Basic realm="x"', "basic", {"realm": "x"}),
        ("Basic", "basic", {}),
        (
            'Bearer realm="https://a/t",service="s",scope="repository:a/b:pull,push"',
            "bearer",
            {"realm": "https://a/t", "service": "s", "scope": "repository:a/b:pull,push"},
        ),
        ('bearer Realm="https://a/t", error=invalid', "bearer",
         {"realm": "https://a/t", "error": "invalid"}),
        ('Basic realm="x", Bearer realm="https://a"', "bearer", {"realm": "https://a"}),
        ('Bearer realm="https://a", Basic realm="x"', "bearer", {"realm": "https://a"}),
        (r'Basic realm="a \"quoted\" word"', "basic", {"realm": 'a "quoted" word'}),
    ],
)  # fmt: skip
def test_challenges(value: str, scheme: str, parameters: dict[str, str]) -> None:
    found = parse_challenge(value)
    assert found is not None
    assert (found.scheme, found.parameters) == (scheme, parameters)


@pytest.mark.parametrize("value", ["", "Negotiate", "Digest realm=x", "basically no", '"'])
def test_unsupported_challenges(value: str) -> None:
    assert parse_challenge(value) is None


def guarded(
    token: Callable[[Request], Reply], realm: str = "{url}/token", more: str = ""
) -> FakeRegistry:
    """A registry that is its own token server, and takes the token ``good``."""

    def answer(request: Request) -> Reply:
        if request.path.startswith("/token"):
            return token(request)
        if request.headers.get("Authorization") == "Bearer good":
            return Reply(200)
        where = realm.format(url=fake.url)
        challenge = f'Bearer realm="{where}",service="reg"{more}'
        return Reply(401, headers={"WWW-Authenticate": challenge})

    fake = FakeRegistry(answer)
    return fake


def gives(value: object) -> Callable[[Request], Reply]:
    return lambda _request: Reply(200, json.dumps(value).encode())


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def use(host: str) -> None:
        monkeypatch.setenv("SPARK_BUILD_REGISTRY", host)
        monkeypatch.setenv("SPARK_BUILD_REGISTRY_USER", "me")
        monkeypatch.setenv("SPARK_BUILD_REGISTRY_PASSWORD", SECRET)

    return use


@pytest.mark.parametrize("name", ["token", "access_token"])
def test_a_token_for_anybody(name: str) -> None:
    with guarded(gives({name: "good"}), more=',scope="repository:a/b:pull"') as fake:
        repository = fake.repository()
        assert repository.has(ZERO)
        assert repository.has(ZERO)
    asked = [request for request in fake.log if request.path.startswith("/token")]
    assert len(asked) == 1
    assert parse_qs(urlsplit(asked[0].path).query) == {
        "service": ["reg"],
        "scope": ["repository:a/b:pull"],
    }
    assert "Authorization" not in asked[0].headers


def test_a_token_for_an_account(account: Callable[[str], None]) -> None:
    with guarded(gives({"token": "good"})) as fake:
        account(fake.address)
        assert fake.repository().has(ZERO)
    (asked,) = [request for request in fake.log if request.path.startswith("/token")]
    basic = base64.b64encode(f"me:{SECRET}".encode()).decode()
    assert asked.headers["Authorization"] == f"Basic {basic}"
    assert SECRET not in asked.path
    others = [request for request in fake.log if request is not asked]
    assert all(not r.headers.get("Authorization", "").startswith("Basic") for r in others)


def test_the_realm_keeps_its_own_query() -> None:
    with guarded(gives({"token": "good"}), realm="{url}/token?tenant=t%26x") as fake:
        assert fake.repository().has(ZERO)
    (asked,) = [request for request in fake.log if request.path.startswith("/token")]
    assert parse_qs(urlsplit(asked.path).query)["tenant"] == ["t&x"]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"token": ""},
        {"token": None},
        {"token": 5},
        {"token": "bad\r\nX-Injected: yes"},
        {"token": "with space"},
        {"token": "good", "expires_in": "soon"},
        {"token": "good", "expires_in": int("9" * 400)},
        {"token": "good", "expires_in": [300]},
        [],
        "good",
    ],
)
def test_malformed_tokens(answer: object) -> None:
    fake = guarded(gives(answer))
    with fake, pytest.raises(RemoteError, match="answer is not a token"):
        fake.repository().has(ZERO)
    assert not any("X-Injected" in request.headers for request in fake.log)


@pytest.mark.parametrize("life", ["-1", "1e300", '"-inf"', '"nan"', '"1e400"', "0.1", "true"])
def test_an_odd_lifetime_is_the_default(life: str) -> None:
    """Negative, endless, no number: the token is used, and for a minute."""
    assert _token_of(b'{"token": "good", "expires_in": %s}' % life.encode(), "x") == ("good", 60.0)
    assert _token_of(b'{"token": "good", "expires_in": 300}', "x") == ("good", 300.0)


@pytest.mark.parametrize("life", ["1" * 5000, "NaN", "1e400", "[" * 10_000 + "]" * 10_000])
def test_a_lifetime_that_is_no_number_of_json(life: str) -> None:
    with pytest.raises(RemoteError, match="answer is not a token"):
        _token_of(b'{"token": "good", "expires_in": %s}' % life.encode(), "x")


def test_a_token_that_the_registry_rejects() -> None:
    """It is asked for once more, because it may have expired, and then no more."""
    fake = guarded(gives({"token": "bad"}))
    with fake, pytest.raises(RemoteError, match="answered 401"):
        fake.repository().has(ZERO)
    assert [request.path.startswith("/token") for request in fake.log] == [False, True, False]


def test_the_token_server_refuses(account: Callable[[str], None]) -> None:
    with guarded(lambda _request: Reply(401)) as fake:
        with pytest.raises(RemoteError, match="rejects anonymous visitors") as caught:
            fake.repository().has(ZERO)
        assert caught.value.hint == f"docker login {fake.address}"
        account(fake.address)
        with pytest.raises(RemoteError, match="rejects the credential from SPARK_BUILD") as caught:
            fake.repository().has(ZERO)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "realm", ["http://evil.example/token", "ftp://evil.example/token", "", "/token", "https://"]
)
def test_secrets_are_never_sent_to_a_token_server_without_tls(
    realm: str, account: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with guarded(gives({"token": "good"}), realm=realm) as fake:
        account(fake.address)
        repository = fake.repository()
        # as if the registry spoke TLS: then its token server must, too
        monkeypatch.setattr(type(repository.transport), "root", f"https://{fake.address}")
        repository.transport._session.get_adapter = _plain  # type: ignore[method-assign]
        with pytest.raises(
            RemoteError, match="token server; this is refused because it is not https"
        ):
            repository.has(ZERO)
    assert all(SECRET not in str(request) for request in fake.log)


@pytest.mark.parametrize(
    "realm",
    [
        "http://evil.example/token",
        "http://localhost:1@evil.example/token",
        "http://127.0.0.1@evil.example/token",
        "https://me@evil.example/token",
    ],
)
def test_a_local_plain_registry_sends_no_secret_elsewhere(
    realm: str, account: Callable[[str], None]
) -> None:
    with guarded(gives({"token": "good"}), realm=realm) as fake:
        account(fake.address)
        repository = fake.repository()
        repository.transport._session.get_adapter = _plain  # type: ignore[method-assign]
        with pytest.raises(
            RemoteError, match=r"evil\.example as its token server; this is refused"
        ):
            repository.has(ZERO)


def test_a_tls_registry_sends_no_secret_without_tls(
    account: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    realm = FakeRegistry(gives({"token": "good"}))
    with realm, guarded(gives({}), realm=f"{realm.url}/token") as fake:
        account(fake.address)
        repository = fake.repository()
        monkeypatch.setattr(type(repository.transport), "root", f"https://{fake.address}")
        repository.transport._session.get_adapter = _plain  # type: ignore[method-assign]
        with pytest.raises(RemoteError, match="it is not https"):
            repository.has(ZERO)
    assert not realm.log


class _Plain(HTTPAdapter):
    """Sends what is meant for https in the open, to a server that speaks no TLS."""

    def send(self, request: requests.PreparedRequest, *words: Any, **more: Any) -> Any:
        request.url = str(request.url).replace("https://", "http://")
        return super().send(request, *words, **more)


def _plain(url: object) -> HTTPAdapter:
    return _Plain()


def test_a_realm_on_another_local_port_is_used() -> None:
    realm = FakeRegistry(gives({"token": "good"}))
    with realm, guarded(gives({}), realm=f"{realm.url}/token") as fake:
        assert fake.repository().has(ZERO)
    assert len(realm.log) == 1


def test_a_token_server_on_another_host_gets_the_credential(account: Callable[[str], None]) -> None:
    """The registry decides who checks its accounts, as docker.io does; SECURITY.md says so."""
    realm = FakeRegistry(gives({"token": "good"}))
    with realm, guarded(gives({}), realm=f"{realm.url}/token") as fake:
        account(fake.address)
        assert fake.repository().has(ZERO)
    (asked,) = realm.log
    basic = base64.b64encode(f"me:{SECRET}".encode()).decode()
    assert asked.headers["Authorization"] == f"Basic {basic}"
    assert basic not in str(fake.log), "the registry gets only the token"


def test_a_token_server_that_leads_elsewhere_takes_no_credential_along(
    account: Callable[[str], None],
) -> None:
    elsewhere = FakeRegistry(gives({"token": "good"}))
    realm = FakeRegistry(lambda _: Reply(307, headers={"Location": f"{elsewhere.url}/token"}))
    with elsewhere, realm, guarded(gives({}), realm=f"{realm.url}/token") as fake:
        account(fake.address)
        assert fake.repository().has(ZERO)
        # the credential of one registry is not used for another that names the same token server
        with guarded(gives({}), realm=f"{realm.url}/token") as other:
            assert other.repository().has(ZERO)
    assert "Authorization" in realm.log[0].headers
    assert all("Authorization" not in request.headers for request in elsewhere.log)
    assert "Authorization" not in realm.log[-1].headers


def test_refused_basic_authentication_is_not_repeated(account: Callable[[str], None]) -> None:
    reply = Reply(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
    with FakeRegistry(lambda _request: reply) as fake:
        account(fake.address)
        repository = fake.repository()
        with pytest.raises(RemoteError, match="answered 401"):
            repository.has(ZERO)
        with pytest.raises(RemoteError, match="refuses the credential from SPARK_BUILD"):
            repository.has(ZERO)
    assert len(fake.log) == 3
    assert SECRET not in repr(repository.authenticator)


def test_a_401_without_a_challenge() -> None:
    fake = FakeRegistry(lambda _request: Reply(401))
    with (
        fake,
        pytest.raises(RemoteError, match="requires authentication without a supported challenge"),
    ):
        fake.repository().has(ZERO)
