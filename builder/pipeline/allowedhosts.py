"""The registries that a command may contact for an image whose plan names others.

A plan comes from whoever made the image, and a request to a host that it names tells that host
who rebuilds what, or reaches into the user's own network.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from builder.common.console import confirm, has_terminal
from builder.common.hints import again, instead
from builder.errors import UsageError
from builder.images.registry.reference import DOCKER_HUB, parse_reference, wrong_host

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.common.reference import Ref

#: The registry of every base that our own profiles name.
USUAL = frozenset({DOCKER_HUB})


class AllowedHosts:
    """Hosts that are contacted without a question: the usual one, and those that the user named."""

    def __init__(self, named: Iterable[Ref], allowed: Iterable[str]) -> None:
        """``named`` are references of the user's command line, whose registries are meant.

        Raises:
            UsageError: ``allowed`` has something that is no host.
        """
        self._hosts = set(USUAL)
        for ref in named:
            if host := host_of(ref):
                self._hosts.add(host)
        for host in allowed:
            if problem := wrong_host(host):
                raise UsageError(f"--allow-host {host}: {problem}", hint=instead(host, "ghcr.io"))
            self._hosts.add(host)

    def need(self, hosts: Iterable[str], why: str) -> None:
        """Ask before hosts are contacted that the user has not named.

        Raises:
            UsageError: there is no terminal to ask on; the hint allows them.
            SparkBuildError: the user declined.
        """
        missing = [host for host in dict.fromkeys(hosts) if host and host not in self._hosts]
        if not missing:
            return
        listed = " and ".join(missing)
        allowing = [word for host in missing for word in ("--allow-host", host)]
        if not has_terminal():
            raise UsageError(
                f"{why} {listed}, which you did not name; nothing was sent there",
                hint=again(*allowing),
            )
        confirm(f"contact {listed}", f": {why} {listed}", "nothing was sent there", allowing)
        self._hosts.update(missing)


def host_of(ref: Ref) -> str:
    """The registry of an image by name; "" for anything else."""
    if ref.has_name:
        with suppress(UsageError):
            return parse_reference(ref.text).host
    return ""
