"""Pins pull requests, and caches their diffs by sha256."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from builder import settings
from builder.applier.digests import sha256_hex
from builder.common.console import console
from builder.common.document import plain, read
from builder.common.documents.pulls import Pin, read_pin
from builder.common.forge.http import ForgeClient, ForgeMissing
from builder.common.forge.normalize import normalise
from builder.common.forge.site import site
from builder.common.net.retry import NoAnswer
from builder.common.paths import cache_dir
from builder.common.pypi.index import write_atomically
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.common.forge import Forge, PullFacts
    from builder.common.forge.clone import Clone
    from builder.common.forge.reference import PullRef

_UNREADABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]+")
_PAGE = re.compile("https?://[!-~]+")


class Forges:
    """The configured forge, and local clones to use instead of it."""

    def __init__(self, clones: Sequence[str] = ()) -> None:
        named = settings.FORGE_CLONE.value
        self._words = [*clones, *(word for word in named.split(os.pathsep) if word)]
        self._clones: list[Clone] | None = None
        self._api: Forge | None = None

    def for_repository(self, repository: str) -> tuple[Forge, str]:
        """The forge or clone for a repository, and its name.

        Raises:
            UsageError: a setting is wrong.
        """
        from builder.common.forge.clone import Clone
        from builder.common.forge.github import GitHub

        if self._clones is None:
            pairs = [word.rpartition("=") for word in self._words]
            self._clones = [Clone(_folder(place), name) for name, _, place in pairs]
        for clone in self._clones:
            if clone.holds(repository):
                return clone, f"clone {clone.folder}"
        if self._api is None:
            self._api = GitHub(ForgeClient(site()))
        return self._api, site().host


def _folder(place: str) -> Path:
    try:
        return Path(place).expanduser()
    except RuntimeError:
        raise UsageError(f"--forge-clone {place}: there is no such user") from None


@dataclass(frozen=True)
class PullStore:
    """Turns references into pins, and pins into diffs."""

    forges: Forges

    # -- pinning

    def resolve(self, ref: PullRef) -> Pin:
        """Pin the current state of a reference, with a request to the forge.

        If the forge does not respond, the last pin is used, with a notice.

        Raises:
            RemoteError: it does not exist, or the forge does not respond and nothing is cached.
            SparkBuildError: the change is empty (exit 3).
            UsageError: the page is on another host than the configured forge.
        """
        host = site().host
        if ref.host and ref.host != host:
            raise UsageError(
                f"{ref} is on {ref.host}, but the configured forge is {host}",
                hint=f"SPARK_BUILD_FORGE={ref.host}",
            )
        forge, _ = self.forges.for_repository(ref.repository)
        known = self._cached_pin(host, ref)
        try:
            facts = forge.facts(ref)
        except NoAnswer as error:
            if known is None:
                raise
            console.warn(f"{error}; using the cached state of {ref}, at {known.short}")
            return known
        if facts.notice:
            console.warn(f"{ref}: {facts.notice}")
        pin = self._pin(host, ref, facts, forge, known)
        self._keep(host, ref, pin)
        return pin

    def _pin(
        self, host: str, ref: PullRef, facts: PullFacts, forge: Forge, known: Pin | None
    ) -> Pin:
        repository = facts.repository
        if known and known.commit == facts.commit and self._diff_file(known.sha256).is_file():
            base, date, sha256, size = known.base, known.date, known.sha256, known.size
        else:
            base = facts.target
            if facts.number:
                base = forge.merge_base(repository, facts.target, facts.commit)
            console.say(f"  fetching {ref} at {facts.commit[:12]}")
            data = self._fetched(forge, str(ref), repository, base, facts.commit)
            if not data:
                raise SparkBuildError(
                    f"{ref} is empty: from {base[:12]} to {facts.commit[:12]} its diff is empty",
                    Exit.NOTHING_TO_DO,
                    hint="leave it out, or name a commit of it: OWNER/REPO#NUMBER@COMMIT",
                )
            date, sha256, size = forge.date(repository, facts.commit), sha256_hex(data), len(data)
            write_atomically(self._diff_file(sha256), data)
        released = known.release if known and known.merge_commit == facts.merge_commit else ""
        if facts.merge_commit and not released:
            versions = forge.releases_with(repository, facts.merge_commit)
            released = versions[0] if versions else ""
        found = Pin(
            request=str(ref),
            forge=host,
            repository=repository,
            number=facts.number,
            base=base,
            commit=facts.commit,
            date=date,
            sha256=sha256,
            size=size,
            title=_UNREADABLE.sub(" ", facts.title).strip()[:200],
            state=facts.state,
            url=facts.url if _PAGE.fullmatch(facts.url) else "",  # no javascript: in a page's link
            merge_commit=facts.merge_commit,
            merged_at=facts.merged_at,
            superseded_by=facts.superseded_by,
            release=released,
        )
        try:  # by the rules that a lock is read with
            return read(plain(found), Pin)
        except ValueError as error:
            raise RemoteError(f"{ref}: {host} gave what cannot be pinned: {error}") from None

    @staticmethod
    def _fetched(forge: Forge, request: str, repository: str, base: str, commit: str) -> bytes:
        """A diff in normal form.

        Raises:
            RemoteError: the forge has none, or gives what is not a diff.
        """
        data = forge.diff(repository, base, commit)
        try:
            return normalise(data)
        except UsageError as error:
            short = f"{base[:12]}...{commit[:12]}"
            raise RemoteError(f"{request}: the diff of {short}: {error}", error.hint) from None

    def released(self, pin: Pin, release: str) -> Pin:
        """The pin with the first release that has the change; cached."""
        found = replace(pin, release=release)
        write_atomically(self._pin_file(pin.forge, pin.request), _json(found))
        return found

    # -- diffs

    def diff(self, pin: Pin) -> bytes:
        """The diff of a pin in normal form: from the cache, else from the forge.

        Raises:
            RemoteError: the forge no longer has the commit, or returns a different diff.
        """
        with contextlib.suppress(OSError):
            data = self._diff_file(pin.sha256).read_bytes()
            if sha256_hex(data) == pin.sha256:
                return data
        forge, name = self.forges.for_repository(pin.repository)
        console.say(f"  fetching {pin.request} at {pin.short}, as pinned")
        try:
            data = self._fetched(forge, pin.request, pin.repository, pin.base, pin.commit)
        except ForgeMissing as error:
            raise RemoteError(
                f"{pin.request} is pinned at {pin.commit}, which {name} no longer has "
                "(force-pushed or deleted), and its diff is not in the cache; update the pin, or "
                "name a clone that still has the commit with --forge-clone",
                hint="spark-build lock --upgrade",
            ) from error
        if sha256_hex(data) != pin.sha256:
            raise RemoteError(
                f"{pin.request}: the diff of {pin.base[:12]}...{pin.short} has sha256 "
                f"{sha256_hex(data)}, pinned is {pin.sha256}; do not build from it: find the cause "
                "before you update the pin",
                hint="spark-build lock --upgrade",
            )
        write_atomically(self._diff_file(pin.sha256), data)
        return data

    # -- the cache

    @staticmethod
    def _diff_file(sha256: str) -> Path:
        return cache_dir() / "forge" / "diffs" / f"{sha256}.diff"

    @staticmethod
    def _pin_file(host: str, request: str) -> Path:
        return cache_dir() / "forge" / "pins" / f"{sha256_hex(f'{host} {request}'.encode())}.json"

    def _cached_pin(self, host: str, ref: PullRef) -> Pin | None:
        with contextlib.suppress(OSError, ValueError, RecursionError, UsageError):
            return read_pin(json.loads(self._pin_file(host, str(ref)).read_bytes()), "cache")
        return None

    def _keep(self, host: str, ref: PullRef, pin: Pin) -> None:
        write_atomically(self._pin_file(host, str(ref)), _json(pin))


def _json(pin: Pin) -> bytes:
    return json.dumps(plain(pin), indent=1, sort_keys=True).encode() + b"\n"
