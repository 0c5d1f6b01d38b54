"""A token server whose tokens a real docker-registry accepts."""

from __future__ import annotations

import base64
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import jwt
import trustme
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate

from tests.loopback import LoopbackHandler, LoopbackServer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ISSUER, SERVICE = "spark-build-test-issuer", "spark-build-test-registry"
#: docker-registry 2.8 accepts a token for this long after its end.
LEEWAY = 60


@dataclass(frozen=True)
class Asked:
    """One request for a token."""

    account: str
    scopes: tuple[str, ...]
    grant: str


@dataclass
class TokenServer(LoopbackServer):
    """Gives everybody leave to pull, and the accounts leave for all that they ask."""

    accounts: Mapping[str, str] = field(default_factory=dict)
    refresh_tokens: Mapping[str, str] = field(default_factory=dict)
    life: int = 300
    #: tokens given out before this many were asked for have expired when they arrive
    expired: int = 0
    #: repositories of which no token allows anything
    closed: frozenset[str] = frozenset()
    log: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        certificate = trustme.CA().issue_cert("token.example")
        self._key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
        self._certificate = certificate.cert_chain_pems[0].bytes()
        self.listen(_Handler)

    @property
    def realm(self) -> str:
        return f"{self.url}/token"

    def registry_settings(self, work: Path) -> dict[str, str]:
        """What the registry's configuration says about us."""
        (work / "token.pem").write_bytes(self._certificate)
        return {
            "realm": self.realm,
            "service": SERVICE,
            "issuer": ISSUER,
            "rootcertbundle": str(work / "token.pem"),
        }

    def token(self, account: str, access: list[dict[str, Any]], *, age: int = 0) -> str:
        """A token of that age; one that is older than its life and the leeway has expired."""
        now = int(time.time()) - age
        der = load_pem_x509_certificate(self._certificate)
        from cryptography.hazmat.primitives.serialization import Encoding

        chain = [base64.b64encode(der.public_bytes(Encoding.DER)).decode()]
        claims = {
            "iss": ISSUER, "sub": account, "aud": SERVICE, "iat": now, "nbf": now - 5,
            "exp": now + self.life, "jti": str(uuid.uuid4()), "access": access,
        }  # fmt: skip
        return jwt.encode(claims, self._key, algorithm="ES256", headers={"x5c": chain})  # type: ignore[arg-type]

    def expired_token(self) -> str:
        """One that was good for everything, once."""
        return self.token("nobody", [], age=self.life + LEEWAY + 60)

    def answer(self, account: str, scopes: tuple[str, ...], grant: str) -> bytes:
        """What a visitor gets."""
        self.log.append(Asked(account, scopes, grant))
        access = []
        for scope in scopes:
            kind, name, actions = scope.split(":")
            wanted = actions.split(",")
            allowed = wanted if account else [a for a in wanted if a == "pull"]
            if name not in self.closed and allowed:
                access.append({"type": kind, "name": name, "actions": allowed})
        age = self.life + LEEWAY + 60 if len(self.log) <= self.expired else 0
        answer = {"token": self.token(account, access, age=age), "expires_in": self.life}
        return json.dumps(answer).encode()


class _Handler(LoopbackHandler):
    owner: TokenServer

    def do_GET(self) -> None:
        account = ""
        given = self.headers.get("Authorization", "")
        if given:
            account, _, password = base64.b64decode(given.split()[1]).decode().partition(":")
            if self.owner.accounts.get(account) != password:
                self._send(401, b"{}")
                return
        query = parse_qs(urlsplit(self.path).query)
        self._send(200, self.owner.answer(account, tuple(query.get("scope", ())), "basic"))

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        account = self.owner.refresh_tokens.get(form["refresh_token"][0], "")
        if not account or form["grant_type"] != ["refresh_token"]:
            self._send(401, b"{}")
            return
        scopes = tuple(form["scope"][0].split())
        self._send(200, self.owner.answer(account, scopes, "refresh_token"))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
