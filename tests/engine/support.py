"""What several of these tests share: the command line as a user runs it, and trees of files."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import ssl
import subprocess
import sys
import tarfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from tests.documents import document_of, validated

from . import base, cache

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from .machine import Engine

PROFILE = "b12x-full"
SHARE = "/usr/share/spark-build"
#: The released wheels that the base image is made of, as a base that needs no engine.
WHEELS = "pypi:" + ",".join(f"{name}=={base.requirements()[name]}" for name in base.UNDER_TEST)
LINEAR = "Using FlashInferB12xNvFp4LinearKernel for NVFP4 GEMM"
MOE = "Using 'FLASHINFER_B12X' NvFp4 MoE backend"
#: Settings of whoever runs the tests must not decide what they see.
FOREIGN = ("SPARK_BUILD_PATCHES", "SOURCE_DATE_EPOCH", "CUTE_DSL_ARCH", "SPARK_BUILD_DOCKER")

#: Path -> (kind, permission bits, sha256 or link target): a tree of files, whatever holds it.
Tree = dict[str, tuple[str, int, str]]


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str
    words: tuple[str, ...] = ()

    @property
    def last(self) -> str:
        """The last line of stdout, which is what `$(...)` is used for."""
        return self.out.strip().splitlines()[-1]

    @property
    def json(self) -> dict[str, Any]:
        """Stdout as the one JSON document that it must be, as its schema has it."""
        document = json.loads(self.out)
        checked = validated(document_of(self.words), document) if self.words else document
        return cast("dict[str, Any]", checked)

    def checks(self, status: str) -> set[str]:
        """Level and name of the checks of `verify --json` that ended so."""
        return {f"{c['level']} {c['name']}" for c in self.json["checks"] if c["status"] == status}

    def ok(self) -> Done:
        """This, or a failure that shows what the command said."""
        assert self.code == 0, f"exit status {self.code}\n{self.out[-2000:]}\n{self.err[-6000:]}"
        return self


@dataclass(frozen=True)
class Cli:
    """`spark-build` in a process of its own, in the environment in which it finds the engine."""

    env: Mapping[str, str]
    cwd: Path

    def __call__(self, *words: str | Path, env: Mapping[str, str | None] | None = None) -> Done:
        done = subprocess.run(
            command(*words), env=self.environment(env), cwd=self.cwd, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, check=False,
        )  # fmt: skip
        named = tuple(str(word) for word in words)
        return Done(done.returncode, done.stdout, done.stderr, named)

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        """Start it in a process group of its own, as a shell does."""
        return subprocess.Popen(
            command(*words), env=self.environment(), cwd=self.cwd, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def environment(self, more: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """The environment of a user, with changes; None takes a variable away."""
        merged = {**self.env, "NO_COLOR": "1", **(more or {})}
        wanted = {k: v for k, v in merged.items() if k not in FOREIGN or k in (more or {})}
        return {k: v for k, v in wanted.items() if v is not None}


def command(*words: str | Path) -> list[str]:
    """The installed console script where there is one beside this interpreter."""
    script = Path(sys.executable).with_name("spark-build")
    program = [str(script)] if script.exists() else [sys.executable, "-m", "builder"]
    return [*program, *(str(word) for word in words)]


# --- images and containers ------------------------------------------------------------------


def tags(engine: Engine) -> dict[str, str]:
    """Every name that an image has in this engine, and the image that it stands for."""
    listed = engine.run("image", "ls", "--no-trunc", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}")
    return dict(line.split() for line in listed.splitlines())


def containers(engine: Engine) -> set[str]:
    """Every container that there is, running or not."""
    return set(engine.run("ps", "--all", "--quiet", "--no-trunc").split())


def inspect(engine: Engine, image: str) -> dict[str, Any]:
    """What the engine knows of an image."""
    return cast("dict[str, Any]", json.loads(engine.run("image", "inspect", image))[0])


def script(engine: Engine, image: str, text: str, *, user: str = "", options: str = "") -> str:
    """Run a shell script in a new container without network; give its stdout."""
    words = ["run", "--rm", "--network=none", "--entrypoint", "sh", *options.split()]
    return engine.run(*words, *(["--user", user] if user else []), image, "-c", text)


@contextmanager
def container(engine: Engine, image: str, *options: str, run: bool = True) -> Iterator[str]:
    """A container that sleeps, or one that is never started; gone at the end."""
    words = ["run", "--detach", "--init"] if run else ["create"]
    identity = engine.run(
        *words, *(options or ("--network=none",)), "--entrypoint", "sleep", image, "infinity"
    ).strip()
    try:
        yield identity
    finally:
        engine.run("rm", "--force", "--volumes", identity)


@dataclass
class Built:
    """Builds images from Dockerfile text, and removes them again."""

    engine: Engine
    made: list[str] = field(default_factory=list)

    def __call__(self, name: str, dockerfile: str, *options: str) -> str:
        output = f"type=docker,name={name},compression=uncompressed"
        words = [self.engine.docker, "buildx", "build", "--output", output, "--network=none"]
        done = subprocess.run(
            [*words, "--quiet", *options, "-"], input=dockerfile, env=self.engine.env,
            text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.made.append(name)
        return name

    def remove(self) -> None:
        """Remove what was built."""
        there = tags(self.engine)
        names = [name for name in self.made if name in there]
        if names:
            self.engine.run("image", "rm", *names)


# --- trees ----------------------------------------------------------------------------------

#: Run inside a container: one line of JSON with the tree below the folder that it is given.
#: Large files that no layer touches are known by size and time: every image has them from the
#: same layer, and hashing them takes longer than all the rest.
WALK = """\
import hashlib, json, os, stat, sys
root, hashes, tree = sys.argv[1], sys.argv[2] == "hashes", {}
for folder, names, files in os.walk(root):
    for name in [*names, *files]:
        path = os.path.join(folder, name)
        info = os.lstat(path)
        key, bits = os.path.relpath(path, root), stat.S_IMODE(info.st_mode)
        large = info.st_size > 8_000_000 and "nvidia_cutlass_dsl" not in path
        if stat.S_ISLNK(info.st_mode):
            tree[key] = ("link", 0, os.readlink(path))
        elif stat.S_ISDIR(info.st_mode):
            tree[key] = ("dir", bits, "" if hashes else f"{info.st_mtime_ns} {info.st_ino}")
        elif large or not hashes:
            tree[key] = ("file", bits, f"{info.st_size} {info.st_mtime_ns}")
        else:
            with open(path, "rb") as stream:
                tree[key] = ("file", bits, hashlib.sha256(stream.read()).hexdigest())
print(json.dumps(tree))
"""


def _tree(text: str) -> Tree:
    return {path: (kind, mode, what) for path, (kind, mode, what) in json.loads(text).items()}


def tree_in_image(engine: Engine, image: str, root: str = base.SITE) -> Tree:
    """The tree below a folder of an image, seen by the image's own Python."""
    words = ("run", "--rm", "--network=none", "--log-driver=none", "--entrypoint", "python3", image)
    return _tree(engine.run(*words, "-B", "-c", WALK, root, "hashes"))


def tree_in_container(engine: Engine, held: str, root: str = base.SITE) -> Tree:
    """The same of a running container."""
    return _tree(engine.run("exec", held, "python3", "-B", "-c", WALK, root, "hashes"))


def stamps(engine: Engine, held: str, root: str = base.SITE) -> Tree:
    """Sizes and times in place of hashes: whether anything at all was written."""
    return _tree(engine.run("exec", held, "python3", "-B", "-c", WALK, root, "stamps"))


def tree_of_directory(root: Path) -> Tree:
    """The same of a folder of this machine."""
    return _tree(cache.call(sys.executable, "-B", "-c", WALK, root, "hashes"))


def tree_of_tar(stream: IO[bytes], mode: str = "r|*") -> Tree:
    """The same of a tar, as it says."""
    tree: Tree = {}
    with tarfile.open(fileobj=stream, mode=cast("Any", mode)) as tar:
        for member in tar:
            name = member.name.removeprefix("./").strip("/")
            if member.isdir():
                tree[name] = ("dir", member.mode, "")
            elif member.isreg():
                held = tar.extractfile(member)
                assert held is not None
                tree[name] = ("file", member.mode, hashlib.sha256(held.read()).hexdigest())
            else:
                tree[name] = ("link", 0, member.linkname)
    return tree


def tree_of_export(engine: Engine, image: str, *options: str) -> Tree:
    """The whole tree of an image that has nothing to run in it, as `docker export` gives it."""
    held = engine.run("create", *options, image, "true").strip()
    try:
        with subprocess.Popen(
            [engine.docker, "export", held], env=engine.env, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            tree = tree_of_tar(process.stdout)
        assert process.returncode == 0
    finally:
        engine.run("rm", held)
    return tree


def layout_json(layout: Path, descriptor: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON blob of an OCI layout, checked against its digest."""
    data = layout_blob(layout, str(descriptor["digest"])).read_bytes()
    assert f"sha256:{hashlib.sha256(data).hexdigest()}" == descriptor["digest"]
    return cast("dict[str, Any]", json.loads(data))


def layout_blob(layout: Path, digest: str) -> Path:
    """The file of a blob."""
    return layout / "blobs" / "sha256" / digest.removeprefix("sha256:")


def layout_manifest(layout: Path) -> tuple[str, dict[str, Any]]:
    """Digest and manifest of the one image of a layout."""
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    return str(entry["digest"]), layout_json(layout, entry)


def tree_of_layout(layout: Path) -> Tree:
    """What the layers of a layout come to, read by nothing of ours; whiteouts stay visible."""
    tree: Tree = {}
    for descriptor in layout_manifest(layout)[1]["layers"]:
        # gzip of many members is good gzip, but a stream of tarfile's ends after the first
        with gzip.open(layout_blob(layout, descriptor["digest"])) as stream:
            tree.update(tree_of_tar(cast("IO[bytes]", stream), "r|"))
    return tree


def files_of(tree: Tree) -> Tree:
    """Without the folders."""
    return {path: entry for path, entry in tree.items() if entry[0] != "dir"}


def differences(one: Tree, other: Tree) -> dict[str, tuple[object, object]]:
    """Where two trees differ; small enough to be read in a failure."""
    paths = sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))
    return {path: (one.get(path), other.get(path)) for path in paths[:20]}


def without(tree: Tree, *prefixes: str) -> Tree:
    """Without what lies at or below some paths."""
    return {
        path: entry
        for path, entry in tree.items()
        if not any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)
    }


def below(tree: Tree, folder: str) -> Tree:
    """What lies below a folder, named from there."""
    prefix = folder.strip("/") + "/"
    return {p.removeprefix(prefix): entry for p, entry in tree.items() if p.startswith(prefix)}


def environment_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The variables of an image's configuration."""
    pairs: Iterable[str] = config.get("Env") or []
    return dict(pair.split("=", 1) for pair in pairs)


# --- mods ---------------------------------------------------------------------------------------

MOD = "sm121-b12x-full-enable"
MODS = Path(__file__).parents[2] / "mods"


@dataclass
class Modded:
    """A container in which mods run; what they download is kept beside the base image."""

    engine: Engine
    held: str
    first: Done = field(init=False)

    def copy(self, folder: Path) -> None:
        """Bring a mod in: `docker cp mod/.` keeps names that begin with a dot."""
        target = f"/workspace/mods/{folder.name}"
        self.engine.run("exec", self.held, "mkdir", "-p", target)
        self.engine.run("cp", f"{folder}/.", f"{self.held}:{target}")

    def run(self, name: str, env: Mapping[str, str] | None = None) -> Done:
        """Run a mod, word for word as spark-vllm-docker and sparkrun do it."""
        line = (
            f"export WORKSPACE_DIR=$PWD && cd /workspace/mods/{name} && chmod +x run.sh && ./run.sh"
        )
        more = [f"--env={key}={value}" for key, value in (env or {}).items()]
        done = subprocess.run(
            [self.engine.docker, "exec", *more, self.held, "bash", "-c", line],
            env=self.engine.env, text=True, capture_output=True, check=False,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)


@contextmanager
def mod_container(engine: Engine, image: str) -> Iterator[Modded]:
    """A container of an image with our mod in it, and with this machine's way to the index."""
    wheels = cache.root() / "mod-wheels"
    wheels.mkdir(exist_ok=True)
    options = ["--network=host", f"--volume={wheels}:/var/cache/wheels"]
    options += ["--env=SPARK_BUILD_CACHE=/var/cache/wheels"]
    authorities = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    if authorities:
        inside = "/run/authorities.pem"
        options += [f"--volume={authorities}:{inside}:ro", f"--env=SSL_CERT_FILE={inside}"]
    options += [f"--env={key}={value}" for key, value in host_index().items()]
    with container(engine, image, *options) as held:
        made = Modded(engine, held)
        made.copy(MODS / MOD)
        yield made


def host_index() -> dict[str, str]:
    """The package index that this machine's pip uses, where it is not pip's own default."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    index = os.environ.get("PIP_INDEX_URL") or asked.stdout.strip()
    return {"PIP_INDEX_URL": index} if index else {}
