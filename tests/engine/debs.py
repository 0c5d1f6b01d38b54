"""Debian packages of any suite, checked by apt and unpacked beside the system, not installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from .cache import MachineError, call, megabytes, say

if TYPE_CHECKING:
    from collections.abc import Sequence

KEYRINGS = tuple(
    Path("/usr/share/keyrings") / name
    for name in ("debian-archive-keyring.gpg", "debian-archive-keyring.pgp")
)
ARCHIVE_VARIABLE = "SPARK_BUILD_TEST_DEBIAN_ARCHIVE"


def archive() -> str:
    """The Debian archive that this machine's own apt uses; a variable can name another."""
    chosen = os.environ.get(ARCHIVE_VARIABLE)
    if chosen:
        return chosen
    configured = call(
        "apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI)",
        "Created-By: Packages",
    )  # fmt: skip
    for address in configured.split():
        if address.rstrip("/").endswith("/debian"):
            return address
    raise MachineError(f"apt's sources name no Debian archive: set {ARCHIVE_VARIABLE} to one")


def source_line(suite: str) -> str:
    """A line for a `sources.list` that trusts Debian's own keys and nothing else."""
    return f"deb [signed-by={_keyring()}] {archive()} {suite} main\n"


def _keyring() -> Path:
    for path in KEYRINGS:
        if path.exists():
            return path
    install("debian-archive-keyring")
    return KEYRINGS[0]


def install(*packages: str) -> None:
    """Install from the host's own suite: only for what does not run from another place."""
    say(f"apt-get install {' '.join(packages)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    call("apt-get", "update", "-qq", env=env)
    call("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages, env=env)


def unpack(suite: str, packages: Sequence[str], destination: Path) -> None:
    """Put the files of these packages under `destination`; the machine's apt sees nothing."""
    say(f"fetching from Debian {suite}: {' '.join(packages)}")
    work = destination.parent / "apt"
    options = _private_apt(work, suite)
    debs = work / "debs"
    debs.mkdir()
    call("apt-get", *options, "update", "-qq")
    call("apt-get", *options, "download", "-qq", *packages, cwd=debs)
    fetched = megabytes(debs)
    for deb in sorted(debs.glob("*.deb")):
        call("dpkg-deb", "-x", deb, destination)
    shutil.rmtree(work)
    say(f"Debian {suite}: {fetched} fetched, {megabytes(destination)} unpacked")


def _private_apt(work: Path, suite: str) -> list[str]:
    """Options that give apt its own sources, lists and cache, and let no signature pass unseen."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    (work / "sources.list").write_text(source_line(suite))
    (work / "status").touch()
    settings = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State::Lists": work / "lists",
        "Dir::State::Status": work / "status",
        "Dir::Cache": work / "cache",
        "Acquire::Languages": "none",
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
        "Acquire::AllowInsecureRepositories": "false",
        "Acquire::Retries": "3",
        "APT::Get::AllowUnauthenticated": "false",
        "APT::Sandbox::User": "root",
        "APT::Update::Error-Mode": "any",
    }
    return [f"--option={name}={value}" for name, value in settings.items()]
