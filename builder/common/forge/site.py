"""The configured forge and its token, from the environment."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

from builder import settings
from builder.errors import UsageError

#: GitHub's own API and the host of its pages.
GITHUB_API, GITHUB_HOST = "https://api.github.com", "github.com"
#: Path of GitHub Enterprise Server's API.
_ENTERPRISE_PATH = "/api/v3"
#: Our own variable is for the configured forge; the others are for GitHub, or for the server
#: in GITHUB_API_URL or GH_HOST, and are sent to no other host.
_GITHUB_TOKENS = (settings.GITHUB_TOKEN, settings.GH_TOKEN)
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A forge: ``api`` is the root of its REST API, ``host`` the host of its pages."""

    api: str
    host: str
    token: str = field(default="", repr=False)
    #: the token's variable
    token_name: str = ""

    @property
    def origin(self) -> tuple[str, str, int | None]:
        """Scheme, host and port that the token may be sent to."""
        parts = urlsplit(self.api)
        return parts.scheme, (parts.hostname or "").lower(), parts.port


def site() -> Site:
    """The forge in ``SPARK_BUILD_FORGE`` (a host, or an API's URL), else GitHub.

    Raises:
        UsageError: the setting is not a URL, has credentials, or is not https.
    """
    text = settings.FORGE.value.strip() or GITHUB_API
    parts, host = _parts(settings.FORGE.name, text if "://" in text else f"https://{text}")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise UsageError(
            "SPARK_BUILD_FORGE is not a host or the address of an API",
            hint="SPARK_BUILD_FORGE=https://github.example.com",
        )
    if parts.username or parts.password:
        raise UsageError(
            "SPARK_BUILD_FORGE contains a user name or password",
            hint=f"put the token into {settings.FORGE_TOKEN.name}",
        )
    if parts.scheme == "http" and not _LOOPBACK.fullmatch(host):
        raise UsageError(f"SPARK_BUILD_FORGE: {host} uses http; only https is allowed")
    if host in (GITHUB_HOST, urlsplit(GITHUB_API).hostname):
        api, host = GITHUB_API, GITHUB_HOST
    else:
        api = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or _ENTERPRISE_PATH}"
    name, token = _token(api, host)
    return Site(api=api, host=host, token=token, token_name=name)


def _parts(name: str, address: str) -> tuple[SplitResult, str]:
    """The parts of the address in a variable, and its host.

    Raises:
        UsageError: it is not an address.
    """
    try:
        parts = urlsplit(address)
        _ = parts.port  # checked when it is read
        return parts, (parts.hostname or "").lower()
    except ValueError as error:
        raise UsageError(f"{name} is not the address of an API: {error}") from None


def _token(api: str, host: str) -> tuple[str, str]:
    variables = [settings.FORGE_TOKEN]
    if api == GITHUB_API or host in _hosts_of_github_tokens():
        variables += _GITHUB_TOKENS
    for variable in variables:
        name, value = variable.name, variable.value.strip()
        if value and not (value.isascii() and value.isprintable()):
            raise UsageError(f"{name} has characters that are not allowed in a token")
        if value:
            return name, value
    return "", ""


def _hosts_of_github_tokens() -> set[str]:
    """Hosts for which GITHUB_TOKEN and GH_TOKEN are valid, according to the environment."""
    named = settings.GITHUB_API_URL.value
    _, host = _parts(settings.GITHUB_API_URL.name, named)
    return {host, settings.GH_HOST.value.lower()} - {""}
