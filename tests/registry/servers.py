"""Real registries on the loopback interface: Debian's, in all its moods, and a second one.

They need no root and no Docker Engine where their programs are on PATH; else the programs come from
Debian's packages, like those of the engine tests.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engine import cache, debs, machine

if TYPE_CHECKING:
    import trustme

    from .tokens import TokenServer

PROGRAMS = ("docker-registry", "skopeo")
#: Debian's testing suite has go-containerregistry's `crane`, which can also serve a registry.
SECOND_SUITE = "forky"
USER, PASSWORD = "tester", "correct-horse-battery-staple"
#: bcrypt of PASSWORD, which is the only hash that docker-registry takes.
HTPASSWD = "tester:$2b$04$CibbFBulGKMvuH1PyH0rEO8BHmj.Nivui73CXluILn18.u/8fEVIe"


def _store(work: Path) -> Path:
    """Where a registry keeps blobs: in memory where there is room, for thousands of small files."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < 512 << 20:
        return work / "data"
    for left in memory.glob("spark-build-registry-*"):  # by a run that was killed
        if time.time() - left.stat().st_mtime > 6 * 3600:
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix="spark-build-registry-", dir=memory))


class OnPath:
    """Programs that this machine has."""

    def program(self, name: str) -> Path:
        found = shutil.which(name)
        if found is None:
            raise cache.MachineError(f"this machine has no {name}")
        return Path(found)


def why_not() -> str | None:
    """The reason why no registry can run here, if there is one."""
    if all(shutil.which(name) for name in PROGRAMS):
        return None
    reason = machine.why_not()
    return f"no {' and '.join(PROGRAMS)} on PATH, and {reason}" if reason else None


def programs() -> machine.Programs:
    """Where the programs come from."""
    if all(shutil.which(name) for name in PROGRAMS):
        return OnPath()
    return machine.ensure_engine()


@dataclass
class DockerRegistry(machine.Registry):
    """Debian's docker-registry, with what the tests ask for switched on."""

    htpasswd: bool = False
    authority: trustme.CA | None = None
    clients: trustme.CA | None = None
    tokens: TokenServer | None = None
    _data: Path | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.authority else 'http'}://{self.address}"

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        if self._data is not None:
            shutil.rmtree(self._data, ignore_errors=True)

    def _config(self, work: Path) -> dict[str, Any]:
        config: dict[str, Any] = super()._config(work)
        self._data = _store(work)
        config["storage"]["filesystem"]["rootdirectory"] = str(self._data)
        if self.htpasswd:
            (work / "htpasswd").write_text(HTPASSWD + "\n")
            config["auth"] = {"htpasswd": {"realm": "test", "path": str(work / "htpasswd")}}
        if self.tokens is not None:
            config["auth"] = {"token": self.tokens.registry_settings(work)}
        if self.authority is not None:
            certificate = self.authority.issue_cert("127.0.0.1")
            certificate.private_key_pem.write_to_path(str(work / "key.pem"))
            for pem in certificate.cert_chain_pems:
                pem.write_to_path(str(work / "cert.pem"), append=True)
            config["http"]["tls"] = {
                "certificate": str(work / "cert.pem"), "key": str(work / "key.pem")
            }  # fmt: skip
        if self.clients is not None:
            self.clients.cert_pem.write_to_path(str(work / "clients.pem"))
            config["http"]["tls"]["clientcas"] = [str(work / "clients.pem")]
        return config


@dataclass
class Crane(machine.Registry):
    """go-containerregistry's registry: it mounts nothing, but knows referrers."""

    def _command(self, work: Path) -> list[str]:
        (work / "data").mkdir()
        program = self.tools.program("crane")
        words = ["registry", "serve", "--address", self.address, "--disk", str(work / "data")]
        return [str(program), *words]


class CranePrograms:
    """crane, from PATH or from Debian's testing suite; a MachineError where neither has it."""

    def program(self, name: str) -> Path:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
        make = partial(debs.unpack, SECOND_SUITE, (name,))
        folder = cache.entry(f"{name}/{cache.key(SECOND_SUITE)}", lambda work: make(work / "tree"))
        return folder / "tree" / "usr" / "bin" / name


def skopeo(tools: machine.Programs, *words: str | Path, env: dict[str, str] | None = None) -> Any:
    """What skopeo prints, as JSON where it is; a MachineError carries its complaint."""
    said = cache.call(
        tools.program("skopeo"), "--insecure-policy", *words, env={**os.environ, **(env or {})}
    )
    return json.loads(said) if said.startswith("{") else said
