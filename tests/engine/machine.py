"""A real Docker Engine, registry and base image, on a bare Debian machine, by themselves.

    with Engine() as engine, Registry(engine.tools) as registry:
        image = base_image(engine)
        subprocess.run([engine.docker, "run", "--rm", image, ...], env=engine.env)

Nothing is installed into the system unless it cannot run from elsewhere, and an engine that the
machine already runs is never touched: this one has its own data, socket and pidfile.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from . import base, cache, debs, ocilayout, toolkit
from .cache import MachineError, call, megabytes, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

#: Images that stay in the engine from one run to the next, by how their names begin.
KEPT = (f"{base.REPOSITORY}:", f"{toolkit.REPOSITORY}:", "spark-build-empty:")
ENGINE_SUITE = "trixie"
ENGINE_PACKAGES = ("docker.io", "docker-cli", "docker-buildx", "containerd", "tini")
# runc of newer suites wants a newer C library than Debian 12 has.
TOOL_SUITE = "bookworm"
TOOL_PACKAGES = ("runc", "docker-registry", "mmdebstrap", "skopeo")
TOOL_LIBRARIES = ("libseccomp2", "libgpgme11", "libassuan0", "libdevmapper1.02.1")
ENGINE_PROGRAMS = ("dockerd", "containerd", "containerd-shim-runc-v2", "docker", "runc")
OPTIONAL_PROGRAMS = ("docker-proxy", "docker-init")
OLDEST_ENGINE = 26
PLUGIN_FOLDERS = tuple(
    Path(folder) / "docker" / "cli-plugins"
    for folder in ("/usr/libexec", "/usr/lib", "/usr/local/libexec", "/usr/local/lib")
)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Bump when the code below unpacks or links something else.
RECIPE = "1"
START_TIMEOUT = 60.0
STOP_TIMEOUT = 30.0


def why_not() -> str | None:
    """The reason why this machine cannot run an engine, if there is one."""
    if os.uname().sysname != "Linux":
        return f"a Docker Engine of our own needs Linux, and this is {os.uname().sysname}"
    if os.geteuid() != 0:
        return "a Docker Engine of our own needs root"
    missing = [name for name in ("apt-get", "dpkg-deb", "unshare", "setpriv") if not _which(name)]
    if missing:
        return f"not a Debian-like machine: it has no {', '.join(missing)}"
    return None


# --- programs -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EngineTools:
    """The programs of one engine, all in one folder that can lead a PATH."""

    origin: str
    bin: Path
    buildx: Path

    @property
    def docker(self) -> Path:
        """The client that belongs to this engine; another may come first on PATH."""
        return self.bin / "docker"

    @property
    def path(self) -> str:
        """A PATH on which plain names mean these programs."""
        return f"{self.bin}:{os.environ.get('PATH', SYSTEM_PATH)}:{SYSTEM_PATH}"

    def program(self, name: str) -> Path:
        """One more program: `docker-registry`, `mmdebstrap`, `skopeo`."""
        path = self.bin / name
        if not path.exists():
            raise MachineError(f"this machine has no {name} and none could be unpacked")
        return path


def ensure_engine() -> EngineTools:
    """The host's engine where it is a modern one, else Debian's, unpacked into the cache."""
    reason = why_not()
    if reason:
        raise MachineError(reason)
    host = _host_engine()
    parts = [RECIPE, ENGINE_SUITE, TOOL_SUITE, *ENGINE_PACKAGES, *TOOL_PACKAGES, *TOOL_LIBRARIES]
    parts += [f"{name}={path}" for name, path in host.items()]
    folder = cache.entry(f"tools/{cache.key(parts)}", partial(_make_tools, host))
    return EngineTools(
        origin="host" if host else f"Debian {ENGINE_SUITE}",
        bin=folder / "bin",
        buildx=folder / "cli-plugins" / "docker-buildx",
    )


def engine_of(suite: str) -> EngineTools:
    """Debian's engine of another suite: what a newer or an older one does."""
    parts = [RECIPE, suite, TOOL_SUITE, *ENGINE_PACKAGES, *TOOL_PACKAGES, *TOOL_LIBRARIES]
    make = partial(_make_tools, {}, suite=suite)
    folder = cache.entry(f"tools/{cache.key(parts)}-{suite}", make)
    return EngineTools(
        origin=f"Debian {suite}",
        bin=folder / "bin",
        buildx=folder / "cli-plugins" / "docker-buildx",
    )


def _host_engine() -> dict[str, Path]:
    """Name and place of the programs of the host's own engine; empty if it is of no use."""
    found = {name: path for name in ENGINE_PROGRAMS if (path := _which(name))}
    plugins = [folder / "docker-buildx" for folder in PLUGIN_FOLDERS]
    buildx = next((path for path in plugins if path.exists()), None)
    if len(found) < len(ENGINE_PROGRAMS) or buildx is None:
        return {}
    version = re.search(r"version (\d+)", call(found["dockerd"], "--version"))
    if version is None or int(version[1]) < OLDEST_ENGINE:
        return {}
    optional = {name: path for name in OPTIONAL_PROGRAMS if (path := _which(name))}
    return {**found, **optional, "docker-buildx": buildx}


def _which(name: str) -> Path | None:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")
    return Path(found) if found else None


def _make_tools(host: dict[str, Path], folder: Path, suite: str = ENGINE_SUITE) -> None:
    """Fill `folder`: its `bin/` and `cli-plugins/` lead to what is unpacked beside them."""
    (folder / "bin").mkdir()
    (folder / "cli-plugins").mkdir()
    if not host:
        debs.unpack(suite, ENGINE_PACKAGES, folder / "engine")
        host = {name: path for name in (*ENGINE_PROGRAMS[:-1], *OPTIONAL_PROGRAMS)
                if (path := _unpacked(folder / "engine", name))}  # fmt: skip
        host["docker-buildx"] = folder / "engine/usr/libexec/docker/cli-plugins/docker-buildx"
    _link(folder / "cli-plugins" / "docker-buildx", host.pop("docker-buildx"))
    for name, path in host.items():
        _link(folder / "bin" / name, path)
    _make_other_tools(folder)
    call(folder / "bin" / "dockerd", "--version")


def _make_other_tools(folder: Path) -> None:
    debs.unpack(TOOL_SUITE, (*TOOL_PACKAGES, *TOOL_LIBRARIES), folder / "tools")
    for name in TOOL_PACKAGES:
        target = _unpacked(folder / "tools", name)
        if target is None:
            raise MachineError(f"Debian {TOOL_SUITE} has no program {name} in its package")
        if not (folder / "bin" / name).exists():
            _launcher(folder, name, target)


def _unpacked(tree: Path, name: str) -> Path | None:
    places = (tree / "usr" / kind / name for kind in ("sbin", "bin", "libexec"))
    return next((path for path in places if path.exists()), None)


def _link(link: Path, target: Path) -> None:
    """Relative inside the cache, because the entry is renamed when it is whole."""
    inside = target.is_relative_to(link.parent.parent)
    link.symlink_to(os.path.relpath(target, link.parent) if inside else target)


def _launcher(folder: Path, name: str, target: Path) -> None:
    """A link where the program runs as it is, else a script that gives it what it lacks."""
    extra = '--policy "$here/policy.json"' if name == "skopeo" else ""
    libraries = _missing_libraries(target)
    if not extra and not libraries:
        _link(folder / "bin" / name, target)
        return
    (folder / "bin" / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    multiarch = call("dpkg-architecture", "-qDEB_HOST_MULTIARCH").strip() if _which(
        "dpkg-architecture") else f"{os.uname().machine}-linux-gnu"  # fmt: skip
    script = folder / "bin" / name
    script.write_text(
        "#!/bin/sh\n"
        'here=$(dirname "$(readlink -f "$0")")\n'
        f'export LD_LIBRARY_PATH="$here/../tools/usr/lib/{multiarch}:'
        f'$here/../tools/lib/{multiarch}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\n'
        f'exec "$here/{os.path.relpath(target, folder / "bin")}" {extra} "$@"\n'
    )
    script.chmod(0o755)


def _missing_libraries(program: Path) -> bool:
    shown = subprocess.run(
        ["ldd", str(program)], text=True, capture_output=True, check=False
    ).stdout
    return "not found" in shown


def working_mmdebstrap(tools: EngineTools) -> Path:
    """mmdebstrap is a Perl program: on a machine without Perl's modules, install those."""
    program = tools.program("mmdebstrap")
    try:
        call(program, "--version")
    except MachineError:
        debs.install("perl")
        call(program, "--version")
    return program


# --- processes ------------------------------------------------------------------------------


def _processes() -> Iterator[tuple[int, int, bytes]]:
    """Pid, parent and command line of every process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text()
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            yield int(folder.name), int(status.rpartition(")")[2].split()[1]), words


def _family(marker: str) -> list[int]:
    """The processes that carry `marker` in their command line, and all that descend from them.

    The marker is the path of one engine's own run directory, so this finds the daemons and shims
    of that engine, the containers below them, and nothing else.
    """
    table = list(_processes())
    mine = {pid for pid, _, words in table if marker.encode() in words} - {os.getpid()}
    size = 0
    while size != len(mine):
        size = len(mine)
        mine |= {pid for pid, parent, _ in table if parent in mine}
    return sorted(mine - {os.getpid()})


def _end_family(marker: str, patience: float) -> None:
    """Ask these processes to end, wait, then make them."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        family = _family(marker)
        for pid in family:
            _send(pid, number)
        if _until(lambda: not _family(marker), seconds):
            return


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _until(happened: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _start(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a daemon that ends with us even when we are killed, but not at Ctrl-C: we stop it."""
    with log.open("ab") as output:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


# --- engine ---------------------------------------------------------------------------------


@dataclass
class Engine:
    """A private dockerd. Its images stay in the cache for the next run; containers do not live on.

    One process at a time can use it: a second run waits for the first.
    """

    #: whether containerd stores its images
    containerd: ClassVar[bool] = True

    tools: EngineTools = field(default_factory=ensure_engine)
    _work: Path = field(init=False, repr=False)
    _stack: ExitStack = field(init=False, repr=False)

    @property
    def host(self) -> str:
        """The address for `docker -H` and the SDK."""
        return f"unix://{self._work}/docker.sock"

    @property
    def docker(self) -> str:
        """The client, as an absolute path: PATH may hold others."""
        return str(self.tools.docker)

    @property
    def env(self) -> dict[str, str]:
        """The environment in which `docker` and the SDK find this engine and no other."""
        rest = {k: v for k, v in os.environ.items() if not k.startswith(("DOCKER_", "BUILDX_"))}
        return {
            **rest,
            "DOCKER_HOST": self.host,
            "DOCKER_CONFIG": str(self._work / "config"),
            "PATH": self.tools.path,
        }

    @property
    def log(self) -> str:
        """The end of what dockerd has said so far."""
        return _tail(self._work / "dockerd.log")

    def run(self, *arguments: str | Path) -> str:
        """Run the client, give what it printed; an error carries its complaint."""
        return call(self.docker, *arguments, env=self.env)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            data = stack.enter_context(self._data())
            self._work = stack.enter_context(_run_directory(data))
            self._prepare()
            process = self._launch(data)
            stack.callback(_end_family, str(self._work), 5.0)
            stack.callback(_stop, process, STOP_TIMEOUT)
            self._await(process)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @contextmanager
    def _data(self) -> Iterator[Path]:
        """Where its images are: one place for all runs, so that one of them has it at a time."""
        with cache.locked("engine"):
            data = cache.root() / "engine" / cache.key(self.tools.origin)
            data.mkdir(parents=True, exist_ok=True)
            _end_leftover(data)
            yield data

    def _prepare(self) -> None:
        plugins = self._work / "config" / "cli-plugins"
        plugins.mkdir(parents=True)
        (plugins / "docker-buildx").symlink_to(self.tools.buildx)
        (self._work / "config" / "config.json").write_text("{}")
        settings = {"features": {"containerd-snapshotter": self.containerd}}
        (self._work / "daemon.json").write_text(json.dumps(settings))

    def _launch(self, data: Path) -> subprocess.Popen[bytes]:
        """In a mount namespace of its own, so that no mount of its can outlive it or be deleted
        through; `slave`, so that it sees what the host mounts later."""
        words = [
            "unshare", "--mount", "--propagation", "slave", str(self.tools.bin / "dockerd"),
            "--config-file", f"{self._work}/daemon.json",
            "--data-root", str(data / "data"),
            "--exec-root", f"{self._work}/exec",
            "--pidfile", f"{self._work}/docker.pid",
            "--host", self.host,
            "--bridge=none", "--iptables=false", "--ip6tables=false",
        ]  # fmt: skip
        return _start(words, self._work / "dockerd.log", self.env)

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        began = time.monotonic()
        if not _until(lambda: process.poll() is not None or self._answers(), START_TIMEOUT):
            raise MachineError(f"dockerd did not answer in {START_TIMEOUT:.0f} s\n{self.log}")
        if process.poll() is not None:
            raise MachineError(f"dockerd ended by itself\n{self.log}")
        version = self.run("version", "--format", "{{.Server.Version}}").strip()
        say(f"engine {version} ({self.tools.origin}) up in {time.monotonic() - began:.1f} s")

    def _answers(self) -> bool:
        try:
            self.run("version", "--format", "{{.Server.Version}}")
        except MachineError:
            return False
        return True


class FreshEngine(Engine):
    """One more engine, with nothing in it at the start, gone at the end."""

    @contextmanager
    def _data(self) -> Iterator[Path]:
        with cache.scratch("fresh-engine") as data:
            yield data


class ClassicEngine(FreshEngine):
    """One whose images are in Docker's own store, not in containerd's."""

    containerd: ClassVar[bool] = False


def family_of(engine: Engine) -> list[int]:
    """The processes of a running engine, containers included."""
    return _family(str(engine._work))


@contextmanager
def _run_directory(data: Path) -> Iterator[Path]:
    """A short path (sockets may have 107 bytes), known to the next run should we be killed."""
    work = Path(tempfile.mkdtemp(prefix="spark-build-engine-", dir="/tmp"))
    (data / "run-directory").write_text(str(work))
    try:
        yield work
    finally:
        cache.remove_tree(work)
        (data / "run-directory").unlink(missing_ok=True)


def _end_leftover(data: Path) -> None:
    """End what an earlier run of ours, killed before it could clean up, has left running."""
    note = data / "run-directory"
    if not note.exists():
        return
    work = Path(note.read_text())
    if _family(str(work)):
        say("ending the engine that a killed run has left behind")
        _end_family(str(work), STOP_TIMEOUT)
    cache.remove_tree(work)
    note.unlink()


# --- registry -------------------------------------------------------------------------------


class Programs(Protocol):
    """Where programs come from: `EngineTools`, or whatever else has them."""

    def program(self, name: str) -> Path:
        """Its path, or a MachineError."""


@dataclass
class Registry:
    """A plain-http registry on the loopback interface, empty at the start, gone at the end."""

    tools: Programs = field(default_factory=ensure_engine)
    _port: int = field(init=False, repr=False, default=0)
    _stack: ExitStack = field(init=False, repr=False)

    @property
    def address(self) -> str:
        """Host and port, as image references begin with."""
        return f"127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        """The address for HTTP requests."""
        return f"http://{self.address}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            work = stack.enter_context(cache.scratch("registry"))
            self._port = _free_port()
            process = _start(self._command(work), work / "log", dict(os.environ))
            stack.callback(_stop, process, 5.0)
            if not _until(lambda: process.poll() is not None or self._answers(), START_TIMEOUT):
                raise MachineError(f"the registry did not answer\n{_tail(work / 'log')}")
            if process.poll() is not None:
                raise MachineError(f"the registry ended by itself\n{_tail(work / 'log')}")
            say(f"registry at {self.address}")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _command(self, work: Path) -> list[str]:
        (work / "config.json").write_text(json.dumps(self._config(work)))
        program = self.tools.program("docker-registry")
        return [str(program), "serve", str(work / "config.json")]

    def _config(self, work: Path) -> dict[str, Any]:
        return {
            "version": "0.1",
            "log": {"level": "warn", "accesslog": {"disabled": True}},
            "storage": {
                "filesystem": {"rootdirectory": str(work / "data")},
                "delete": {"enabled": True},
            },
            "http": {"addr": self.address},
        }

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=2):
                return True
        except OSError:
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- base image -----------------------------------------------------------------------------


def base_layout(tools: EngineTools) -> Path:
    """The base image as an OCI layout: for tests that need no engine."""
    return base.base_layout(working_mmdebstrap(tools))


def base_image(engine: Engine) -> str:
    """The reference of the base image in this engine, loaded there once and kept."""
    return _loaded(engine, base.reference(), base_layout)


def toolkit_image(engine: Engine) -> str:
    """The same of the image that has compilers."""
    return _loaded(
        engine,
        toolkit.reference(),
        lambda tools: toolkit.toolkit_layout(working_mmdebstrap(tools)),
    )


def _loaded(engine: Engine, image: str, layout_of: Callable[[EngineTools], Path]) -> str:
    if engine.run("image", "ls", "--quiet", image).strip():
        return image
    layout = layout_of(engine.tools)
    began = time.monotonic()
    say(f"loading {image} ({megabytes(layout)}) into the engine")
    _load(engine, layout)
    engine.run("image", "inspect", image)
    say(f"loaded in {time.monotonic() - began:.0f} s: {image}")
    return image


def _load(engine: Engine, layout: Path) -> None:
    command = [engine.docker, "load", "--quiet"]
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(
            command, env=engine.env, stdin=subprocess.PIPE, stdout=said, stderr=said
        ) as process:
            assert process.stdin is not None
            with tarfile.open(fileobj=process.stdin, mode="w|", bufsize=1 << 20) as tar:
                for path in ocilayout.archive_members(layout):
                    tar.add(path, arcname=str(path.relative_to(layout)))
            process.stdin.close()
        if process.returncode:
            said.seek(0)
            raise MachineError(f"docker load failed: {said.read().decode(errors='replace')}")
