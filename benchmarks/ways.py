"""Every way to change one file of an image in a registry, each as somebody would really do it."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bases import LAYER, NEW_CONTENT, PATCHED, patched_tar
from benchmarks.meter import CommandFailed
from builder.images.registry.model import OCI_CONFIG, OCI_LAYER_GZIP, OCI_MANIFEST, sha256_digest
from tests.engine import cache, debs, machine
from tests.registry.servers import CranePrograms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from benchmarks.meter import Meter, Run

COMMANDS = {"spark-build": str(Path(sys.executable).with_name("spark-build"))}
#: The suite whose BuildKit can push without pulling (``unpack=false,store=false``).
ENGINE_SUITE = "forky"
#: What a machine without a tool raises.
MISSING = (cache.MachineError, CommandFailed, OSError)


@dataclass
class Way:
    """A way to patch.  ``heavy`` ones move the whole base, so they need no run to warm up."""

    name: str
    act: Callable[[Bench, str, str], None]
    heavy: bool = False
    daemon: bool = False
    runs: dict[int, list[Run]] = field(default_factory=dict)
    #: Why it could not be run: for all sizes, or for one.
    problem: str = ""


@dataclass
class Bench:
    """What the ways work with: a folder of their own, tools, and an engine where there is one."""

    meter: Meter
    folder: Path
    tools: machine.EngineTools
    #: Each spark-build that is measured, by its name in a table; the first is ours.
    commands: Mapping[str, str]
    engine: machine.Engine | None = None

    def __post_init__(self) -> None:
        layer = self.folder / "patches" / "change"
        layer.mkdir(parents=True)
        (layer / "layer.toml").write_text(LAYER)
        self.context = self.folder / "context"
        self.context.mkdir()
        (self.context / "core.py").write_bytes(NEW_CONTENT)
        self.tar = patched_tar(self.folder / "layer.tar")

    @property
    def address(self) -> str:
        """The registry, as the ways see it."""
        return self.meter.proxy.address

    def docker(self, *words: str | Path) -> None:
        """Run the docker client against the engine."""
        assert self.engine is not None
        self.meter.call(self.engine.docker, *words, env=self.engine.env)

    def daemons(self) -> list[int]:
        """The processes of the engine."""
        return [] if self.engine is None else machine.family_of(self.engine)

    def empty(self) -> None:
        """Remove what a way has left in the engine, so that the next finds nothing of the base."""
        if self.engine is None:
            return
        names = self.engine.run("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()
        left = [name for name in names if name.startswith(self.address)]
        if left:
            self.engine.run("image", "rm", "--force", *left)
        self.engine.run("builder", "prune", "--all", "--force")


# ------------------------------------------------------------------------------------------- ours


def cache_of(bench: Bench, tool: str, name: str = "cache") -> Path:
    """A cache that only this benchmark and this spark-build have."""
    return bench.folder / tool / name


def lock_of(bench: Bench, tool: str, tag: str) -> Path:
    """The lock that :func:`benchmarks.known.know_base` leaves for a base."""
    return bench.folder / tool / f"project-{tag}" / "spark-build.lock"


def spark_build(
    bench: Bench, tool: str, *words: str, cache_name: str = "cache", lock: Path | None = None
) -> str:
    """Run a spark-build, with a cache of its own, and a lock where one is named."""
    env = {"SPARK_BUILD_PATCHES": str(bench.folder / "patches")}
    env |= {"SPARK_BUILD_CACHE": str(cache_of(bench, tool, cache_name))}
    env |= {"SPARK_BUILD_LOCK": str(lock)} if lock else {}
    return bench.meter.call(bench.commands[tool], *words, env=env)


def _push_of(bench: Bench, tool: str, base: str, target: str, cache: str = "cache") -> None:
    words = ["image", "-l", "change", "-b", f"docker://{base}", "--engine", "oci"]
    words += ["--push", "-t", target, "--no-verify"]
    lock = lock_of(bench, tool, base.rpartition(":")[2]) if cache == "locked" else None
    spark_build(bench, tool, *words, *(["--locked"] if lock else []), cache_name=cache, lock=lock)


def known(tool: str, bench: Bench, base: str, target: str) -> None:
    """The whole command: identify, plan, build, push."""
    _push_of(bench, tool, base, target)


def never_seen(tool: str, bench: Bench, base: str, target: str) -> None:
    """The same for a base that nobody here has seen: its layers are read once."""
    shutil.rmtree(cache_of(bench, tool, "first"), ignore_errors=True)
    _push_of(bench, tool, base, target, "first")


def locked(tool: str, bench: Bench, base: str, target: str) -> None:
    """The same with a lock, as CI has it: its layers are not read."""
    shutil.rmtree(cache_of(bench, tool, "locked"), ignore_errors=True)
    _push_of(bench, tool, base, target, "locked")


# ------------------------------------------------------------------------------- given a layer tar


def crane_append(crane: Path, bench: Bench, base: str, target: str) -> None:
    """A layer tar that somebody has made beforehand, appended by name."""
    bench.meter.call(crane, "append", "-b", base, "-f", bench.tar, "-t", target)


def oras_by_hand(oras: Path, bench: Bench, base: str, target: str) -> None:
    """Copy in the registry, then push a layer, a configuration and a manifest edited by hand."""
    call, plain = bench.meter.call, "--plain-http"
    call(oras, "copy", "--from-plain-http", "--to-plain-http", base, target)
    manifest = json.loads(call(oras, "manifest", "fetch", plain, target))
    name = target.rpartition(":")[0]
    config = json.loads(
        call(oras, "blob", "fetch", plain, "-o-", f"{name}@{manifest['config']['digest']}")
    )
    tar = bench.tar.read_bytes()
    config["rootfs"]["diff_ids"].append(sha256_digest(tar))
    work = bench.folder / "oras"
    work.mkdir(exist_ok=True)

    def push(file: str, data: bytes, media_type: str) -> dict[str, object]:
        (work / file).write_bytes(data)
        blob = {"mediaType": media_type, "digest": sha256_digest(data), "size": len(data)}
        call(oras, "blob", "push", plain, f"{name}@{blob['digest']}", work / file)
        return blob

    layer = push("layer", gzip.compress(tar, mtime=0), OCI_LAYER_GZIP)
    manifest["layers"].append(layer)
    manifest["config"] = push("config", json.dumps(config).encode(), OCI_CONFIG)
    (work / "manifest").write_text(json.dumps(manifest))
    call(oras, "manifest", "push", plain, "--media-type", OCI_MANIFEST, target, work / "manifest")


def skopeo_umoci(umoci: Path, bench: Bench, base: str, target: str) -> None:
    """Copy down, insert a layer, copy up; no daemon and no root."""
    layout = bench.folder / "umoci"
    shutil.rmtree(layout, ignore_errors=True)
    skopeo = bench.tools.program("skopeo")
    call = bench.meter.call
    call(skopeo, "copy", "-q", "--src-tls-verify=false", f"docker://{base}", f"oci:{layout}:x")
    source = bench.context / "core.py"
    call(umoci, "insert", "--rootless", "--image", f"{layout}:x", source, PATCHED)
    call(skopeo, "copy", "-q", "--dest-tls-verify=false", f"oci:{layout}:x", f"docker://{target}")
    shutil.rmtree(layout)


class Buildah:
    """Debian's buildah with storage of its own; no daemon, but here as root."""

    def __init__(self, bench: Bench) -> None:
        make = partial(debs.unpack, machine.TOOL_SUITE, ("buildah",))
        folder = cache.entry("buildah/1", lambda work: make(work / "tree"))
        self.program = folder / "tree" / "usr" / "bin" / "buildah"
        tree = Path(os.path.realpath(bench.tools.bin)).parent / "tools" / "usr" / "lib"
        self.env = {"LD_LIBRARY_PATH": ":".join(map(str, tree.glob("*-linux-gnu")))}
        self.policy = bench.tools.bin / "policy.json"

    def call(self, bench: Bench, *words: str | Path) -> str:
        """Run it with storage of this benchmark's own."""
        store = bench.folder / "buildah"
        own = ("--root", store / "root", "--runroot", store / "run", "--storage-driver", "overlay")
        return bench.meter.call(self.program, *own, *words, env=self.env)

    def act(self, bench: Bench, base: str, target: str) -> None:
        """From, copy, commit straight to the registry."""
        policy = f"--signature-policy={self.policy}"
        words = ("from", policy, "--tls-verify=false", "-q", f"docker://{base}")
        name = self.call(bench, *words).strip()
        self.call(bench, "copy", "-q", name, bench.context / "core.py", PATCHED)
        self.call(bench, "commit", policy, "--tls-verify=false", "-q", name, f"docker://{target}")
        self.call(bench, "rm", "--all")
        self.call(bench, "rmi", "--all", "--force")


# ------------------------------------------------------------------------------------ with a daemon


def _dockerfile(bench: Bench, base: str, flags: str) -> Path:
    (bench.context / "Dockerfile").write_text(f"FROM {base}\nCOPY {flags}core.py {PATCHED}\n")
    return bench.context


def buildkit_lazy(bench: Bench, base: str, target: str) -> None:
    """``COPY --link`` and an output that neither unpacks nor stores: nothing of the base moves."""
    output = f"type=registry,name={target},unpack=false,store=false"
    words = ("buildx", "build", "--provenance=false", "--no-cache", "--output", output)
    bench.docker(*words, _dockerfile(bench, base, "--link "))


def buildkit_push(bench: Bench, base: str, target: str) -> None:
    """``COPY --link`` and ``--push``."""
    words = ("buildx", "build", "--provenance=false", "--no-cache", "--push", "-t", target)
    bench.docker(*words, _dockerfile(bench, base, "--link "))


def pull_build_push(bench: Bench, base: str, target: str) -> None:
    """What most people do."""
    context = _dockerfile(bench, base, "")
    bench.docker("pull", "-q", base)
    bench.docker("buildx", "build", "--load", "-q", "-t", target, context)
    bench.docker("push", "-q", target)


# -------------------------------------------------------------------------------------- all of them


def all_ways(bench: Bench) -> list[Way]:
    """Each way, ours first; one whose tool is not to be had says so instead of vanishing."""
    ways = [
        way
        for tool in bench.commands
        for way in (
            Way(f"{tool}, base known", partial(known, tool)),
            Way(f"{tool}, base never seen", partial(never_seen, tool), heavy=True),
            Way(f"{tool}, base never seen, locked", partial(locked, tool)),
        )
    ]
    programs = CranePrograms()

    def add(name: str, make: Callable[[], Callable[[Bench, str, str], None]], heavy: bool) -> None:
        way = Way(name, partial(known, next(iter(bench.commands))), heavy=heavy)
        with told(way):
            way.act = make()
        ways.append(way)

    def tried(name: str, word: str) -> Path:
        program = programs.program(name)
        bench.meter.call(program, word)
        return program

    add("crane append (given the layer)",
        lambda: partial(crane_append, tried("crane", "version")), heavy=False)  # fmt: skip
    add("oras copy, manifest by hand (given the layer)",
        lambda: partial(oras_by_hand, tried("oras", "version")), heavy=False)  # fmt: skip
    add("skopeo + umoci insert",
        lambda: partial(skopeo_umoci, tried("umoci", "--version")), heavy=True)  # fmt: skip

    def buildah() -> Callable[[Bench, str, str], None]:
        made = Buildah(bench)
        made.call(bench, "--version")
        return made.act

    add("buildah from, copy, commit", buildah, heavy=True)
    with_daemon = [
        Way("BuildKit COPY --link, lazy output", buildkit_lazy, daemon=True),
        Way("BuildKit COPY --link --push", buildkit_push, heavy=True, daemon=True),
        Way("docker pull, build, push", pull_build_push, heavy=True, daemon=True),
    ]
    if bench.engine is None:
        for way in with_daemon:
            way.problem = "no Docker Engine"
    return ways + with_daemon


@contextlib.contextmanager
def told(way: Way) -> Iterator[None]:
    """Note why a way cannot be run here, say it, and go on."""
    try:
        yield
    except MISSING as error:
        way.problem = str(error).strip().splitlines()[0][:200] or type(error).__name__
        print(f"  not run: {way.name}: {error}", file=sys.stderr, flush=True)
