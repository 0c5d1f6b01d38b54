"""The BuildKit engine: a rendered Dockerfile and a context of ready files, built by the CLI.

The context has one folder for each layer with its final files.  Scripts run in containers by the
same way: each run is one build of ``dockerfiles/compile.Dockerfile.j2``, so it runs where builds
run (the local Docker Engine, or a remote builder), and the result of a successful script comes from
the builder's cache if its inputs are unchanged.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder import settings
from builder.common.console import console, counted, megabytes
from builder.common.diskspace import Need
from builder.common.hints import TEMPORARY, os_hint, reason
from builder.common.paths import data_dir
from builder.common.reference import Ref
from builder.errors import BuildFailed, EngineError, RemoteError, UsageError, did_you_mean
from builder.images.engines import docker, metadata
from builder.images.engines.docker import engine_root
from builder.images.engines.metadata import added_bytes, content_bytes, image_layers
from builder.images.engines.model import BuildRequest, BuiltImage, refuses_base
from builder.images.engines.oci import base_bytes, in_layout, layout_digest, load_needs, new_layout
from builder.images.registry.reference import parse_reference
from builder.images.rootfs.image import OtherPlatform, open_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from builder.applier.trees import Content
    from builder.common.plan import BuildPlan


# -------------------------------------------------------------- the docker client and its builders
#
# A builder is one that ``docker buildx ls`` lists (drivers docker-container, kubernetes, remote),
# or the address of a BuildKit daemon.  An address becomes a builder in a temporary configuration,
# so that nothing remains after a run.
#
# ``--progress=rawjson`` (buildx 0.13) is a stream of documents with ``vertexes`` and ``logs``; it
# alone shows that a layer above a new one came from the cache.  Older clients print lines in which
# such a layer looks new.

# --------------------------------------------------------------------------------------- the client


#: First engine whose built-in BuildKit supports ``COPY --link`` (BuildKit 0.11); older clients
#: include their own BuildKit.
LINK_SINCE = 23


@dataclass(frozen=True)
class Cli:
    """A docker client that can drive BuildKit, and its command."""

    binary: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    #: version of buildx; None for an older client that does not use it
    buildx: tuple[int, int] | None = None


def find_cli() -> Cli | None:
    """The first ``docker`` on PATH that can build with BuildKit.

    Several clients may be installed, and the first may lack buildx, so each is tried.
    """
    named = settings.DOCKER.value
    places = os.environ.get("PATH", "").split(os.pathsep)
    binaries = [named] if named else [str(Path(p) / "docker") for p in places if p]
    for binary in binaries:
        if not os.access(binary, os.X_OK):
            continue
        version_output = _output([binary, "buildx", "version"])
        if version_output is not None:
            version = re.search(r"\bv?(\d+)\.(\d+)\.", version_output)
            known = (int(version[1]), int(version[2])) if version else (0, 0)
            command = (binary, "buildx", "build", "--provenance=false")
            return Cli(binary, command, {}, known)
        major = (_output([binary, "version", "--format", "{{.Client.Version}}"]) or "").split(".")[
            0
        ]
        if major.isdigit() and 18 <= int(major) < LINK_SINCE:  # BuildKit is inside these
            return Cli(binary, (binary, "build"), {"DOCKER_BUILDKIT": "1"})
    return None


def _output(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode and command[-1] == "version" else done.stdout


# -------------------------------------------------------------------------------------- Dockerfiles


def render(template: str, **values: object) -> str:
    """Render a template in ``dockerfiles/``; a missing value is an error."""
    import jinja2

    from builder.images.engines.metadata import quoted

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_dir("dockerfiles")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - a Dockerfile, not HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = quoted
    return environment.get_template(template).render(**values)


# ----------------------------------------------------------------------------------------- builders


#: Addresses that buildx's remote driver dials (its documentation, "Remote driver", and the
#: connection helpers of BuildKit's client).
SCHEMES = ("tcp", "unix", "docker-container", "podman-container", "kube-pod", "ssh")
#: The builder of the Docker Engine in use.
ENGINE = "default"
#: First BuildKit whose Dockerfile frontend supports ``COPY --link``.
_LINK_SINCE = (0, 11)
#: Seconds; buildx itself gives up after 20.
_PATIENCE = 120
_DIALLING = 10
#: Cache types of BuildKit, and the attributes that they need (its documentation,
#: "Export cache").
_CACHES = {
    "registry": "ref",
    "local": "",
    "inline": "",
    "gha": "",
    "s3": "bucket",
    "azblob": "account_url",
}
_LOCAL = {"from": "src", "to": "dest"}


@dataclass(frozen=True)
class Builder:
    """A builder that responded."""

    name: str
    #: the name that the user gave
    given: str
    driver: str
    links: bool
    env: Mapping[str, str] = field(default_factory=dict)


def engine_environment() -> dict[str, str]:
    """Environment in which buildx uses the same Docker Engine as the SDK, whatever the context."""
    return {} if settings.DOCKER_HOST.value else {"DOCKER_CONTEXT": ENGINE}


def check_name(text: str) -> str:
    """Check the value of ``--builder`` and return it.

    Raises:
        UsageError: it is neither a name nor an address that buildx can dial.
    """
    scheme, colon, rest = text.partition("://")
    if not colon and re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9._-]*", text):
        return text
    if colon and scheme in SCHEMES and rest and not re.search(r"[\s,]", rest):
        return text
    meant = did_you_mean(scheme, SCHEMES) if colon else ""
    raise UsageError(
        f"--builder {text!r} is neither the name of a builder nor an address{meant}",
        hint=f"docker buildx ls shows names; addresses begin with {', '.join(SCHEMES)} and ://",
    )


@contextlib.contextmanager
def reached(docker: str, address: str) -> Iterator[Builder]:
    """The builder with that name or address, after it responded.

    Raises:
        EngineError: it does not exist, does not respond, or is another Docker Engine.
        UsageError: it is not a valid name or address.
    """
    check_name(address)
    if "://" not in address:
        yield _ask_builder(docker, address, address, {})
        return
    _dial(address)
    with tempfile.TemporaryDirectory(prefix="spark-build-builder-") as folder:
        env = {"BUILDX_CONFIG": folder}
        words = ("create", "--name", "spark-build", "--driver", "remote", address)
        done = _buildx(docker, words, env)
        if done.returncode:
            raise _no_answer(address, done.stderr)
        yield _ask_builder(docker, "spark-build", address, env)


def _dial(address: str) -> None:
    """Check for a listener first: buildx would retry for 20 seconds without a reason."""
    scheme, _, rest = address.partition("://")
    try:
        if scheme == "unix":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_DIALLING)
                probe.connect(rest)
        elif scheme == "tcp":
            host, _, port = rest.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _DIALLING).close()
    except (OSError, ValueError) as error:
        raise _no_answer(address, f"no answer: {reason(error)}") from None


def _ask_builder(docker: str, name: str, address: str, env: Mapping[str, str]) -> Builder:
    console.detail(f"asking builder {address}")
    done = _buildx(docker, ("inspect", "--bootstrap", name), env)
    facts = dict(re.findall(r"^([A-Z][\w ]*?):\s+(.*?)\s*$", done.stdout, re.MULTILINE))
    if done.returncode or facts.get("Status", "running") != "running":
        raise _no_answer(address, done.stderr or facts.get("Error", "") or done.stdout)
    driver = facts.get("Driver", "")
    if driver == "docker" and name != ENGINE:
        where = f"$(docker context inspect {name} -f '{{{{.Endpoints.docker.Host}}}}')"
        raise EngineError(
            f"builder {address} is a Docker Engine (driver docker, endpoint "
            f"{facts.get('Endpoint', '')}), but not the one that spark-build uses",
            hint=f"use that engine without --builder: DOCKER_HOST={where}",
        )
    told = facts.get("BuildKit version") or facts.get("Buildkit") or ""
    version = re.match(r"v?(\d+)\.(\d+)", told)
    known = (int(version[1]), int(version[2])) if version else (0, 0)
    links = known == (0, 0) or known >= _LINK_SINCE  # distributions build it without its version
    return Builder(name=name, given=address, driver=driver, links=links, env=dict(env))


def _no_answer(builder: str, words: str) -> EngineError:
    lines = [line for line in words.strip().splitlines() if line.strip(" -")]
    shown = "\n  ".join(line.removeprefix("ERROR: ") for line in lines[-4:]) or "no output"
    return EngineError(f"builder {builder} cannot be used:\n  {shown}", hint="docker buildx ls")


def _buildx(
    docker: str, words: Sequence[str], env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [docker, "buildx", *words]
    console.detail(f"+ {' '.join(command)}")
    try:
        return subprocess.run(
            command,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer in {_PATIENCE} s")


def cache_words(options: Sequence[str], direction: str) -> list[str]:
    """The arguments of buildx for ``--cache-from`` and ``--cache-to``.

    A plain image name is a cache in a registry, written with ``mode=max``.

    Raises:
        UsageError: it is neither an image name nor a BuildKit cache.
    """
    words = []
    for text in options:
        words += [f"--cache-{direction}", _cache(text, direction)]
    return words


def _cache(text: str, direction: str) -> str:
    if "=" not in text:
        try:
            parse_reference(text)
        except UsageError as error:
            raise UsageError(f"--cache-{direction} {text!r}: {error}") from None
        return f"type=registry,ref={text}" + (",mode=max" if direction == "to" else "")
    pairs = dict(part.partition("=")[::2] for part in text.split(","))
    kind = pairs.get("type", "")
    if kind not in _CACHES:
        raise UsageError(
            f"--cache-{direction} {text!r}: type is {kind!r}{did_you_mean(kind, _CACHES)}",
            hint=f"HOST/NAME:TAG, or type=...: {', '.join(_CACHES)}",
        )
    wanted = _LOCAL[direction] if kind == "local" else _CACHES[kind]
    if wanted and not pairs.get(wanted):
        raise UsageError(f"--cache-{direction} {text!r} lacks {wanted}=")
    if kind == "registry":
        parse_reference(pairs["ref"])
    return text


# ---------------------------------------------------------------------------- the output of a build


#: ``[3/9] COPY --link FOLDER/ /``; BuildKit calls the step that adds a linked layer LINK COPY.
_COPY = re.compile(r"\[(?:\S+ +)?\d+/\d+\] COPY (?:--link )?(\S+)/ /")
_LINE = re.compile(r"#(\d+) (.*)")
#: ``#7 0.412 what a command printed``
_PRINTED = re.compile(r"\d+\.\d+ (.*)")


@dataclass
class Progress:
    """The outcome of a build."""

    #: folder of a layer -> whether it came from the cache
    cached: dict[str, bool] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    #: the output of the steps' commands
    logs: list[str] = field(default_factory=list)

    @property
    def tail(self) -> str:
        """The last lines of output, for an error message."""
        return "\n  ".join(self.lines[-40:])


def read_progress(text: str) -> Progress:
    """Parse the output in either form; text between the documents is kept."""
    progress = Progress()
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at] == "{" and (at == 0 or text[at - 1] in "\n}"):
            try:
                value, at = decoder.raw_decode(text, at)
            except ValueError:
                pass
            else:
                _document(value, progress)
                continue
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        if text[at:end].strip():
            progress.lines.append(text[at:end])
        at = end + 1
    _plain(progress)
    return progress


def _document(value: dict[str, Any], progress: Progress) -> None:
    for vertex in value.get("vertexes") or ():
        name = str(vertex.get("name", ""))
        folder = _folder(name)
        done = vertex.get("completed") or vertex.get("cached")
        if folder and done:
            progress.cached[folder] = bool(vertex.get("cached")) or progress.cached.get(
                folder, False
            )
        if vertex.get("completed"):
            progress.lines.append(f"{name}{' (cached)' if vertex.get('cached') else ''}")
        if vertex.get("error"):
            progress.lines.append(f"{name}: {vertex['error']}")
    for log in value.get("logs") or ():
        data = base64.b64decode(log.get("data") or "")
        lines = data.decode("utf-8", "replace").splitlines()
        progress.lines += lines
        progress.logs += lines
    for warning in value.get("warnings") or ():
        data = base64.b64decode(warning.get("short") or "")
        progress.lines.append(data.decode("utf-8", "replace"))


def _folder(name: str) -> str:
    match = _COPY.fullmatch(name)
    return match[1] if match else ""


def _plain(progress: Progress) -> None:
    folders: dict[str, str] = {}
    for line in progress.lines:
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        if printed := _PRINTED.fullmatch(match[2]):
            progress.logs.append(printed[1])
        if folder := _folder(match[2]):
            folders[match[1]] = folder
            progress.cached.setdefault(folder, False)
        elif match[2] == "CACHED" and match[1] in folders:
            progress.cached[folders[match[1]]] = True


# ------------------------------------------------------------------------------------------ a build


#: First buildx that can print its progress as JSON.
_DOCUMENTS_SINCE = (0, 13)


@dataclass(frozen=True)
class BuildOutput:
    """A finished build."""

    status: int
    progress: Progress
    output: str


def run_build(cli: Cli, words: Sequence[str], env: Mapping[str, str]) -> BuildOutput:
    """Run one build without network; the last of ``words`` is its context."""
    documents = (cli.buildx or (0, 0)) >= _DOCUMENTS_SINCE
    command = [*cli.command, f"--progress={'rawjson' if documents else 'plain'}"]
    command += ["--network=none", *words]
    console.detail(f"+ {' '.join(command)}")
    process = subprocess.run(
        command,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    progress = read_progress(process.stdout)
    for line in progress.lines:
        console.detail(line)
    return BuildOutput(process.returncode, progress, process.stdout)


# -------------------------------------------------------------------------------------- the engine

# -------------------------------------------------------------------------------------- the context


def folder_of(name: str) -> str:
    """A layer's folder; it has no number, so that adding a layer keeps the others cached."""
    return f"layer-{name}"


@contextlib.contextmanager
def context_of(plan: BuildPlan) -> Iterator[tuple[Path, int]]:
    """A build context with every layer's files, and their size in bytes."""
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
        yield Path(folder), fill_context(Path(folder), plan)


def fill_context(folder: Path, plan: BuildPlan) -> int:
    """Write every layer's files into a build context; returns their size in bytes."""
    added = 0
    for name, files in image_layers(plan):
        target = folder / folder_of(name)
        with console.progress(f"writing {name}", content_bytes(files), leaves_line=False) as bar:
            size = write_context(target, files, plan.epoch, bar.advance)
        console.say(f"  {name:<28}{counted(len(files), 'file'):>11} {megabytes(size):>10}")
        added += size
    return added


def write_context(
    root: Path,
    files: Mapping[str, Content | None],
    epoch: int,
    moved: Callable[[int], object] = lambda _size: None,
) -> int:
    """Write a layer's files below ``root`` with fixed times and modes; returns their size in bytes.

    Raises:
        BuildFailed: the disk is full or not writable.
    """
    size = 0
    try:
        root.mkdir()
        for path, content in sorted(files.items()):
            if content is None:
                continue
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())
            target.chmod(content.mode)
            os.utime(target, (epoch, epoch))
            size += content.size
            moved(content.size)
        for folder, _, _ in os.walk(root, topdown=False):
            Path(folder).chmod(0o755)
            os.utime(folder, (epoch, epoch))
    except OSError as error:
        shutil.rmtree(root, ignore_errors=True)
        raise BuildFailed(
            f"cannot write the build context below {root.parent}: {error.strerror}",
            hint=os_hint(error, TEMPORARY),
        ) from error
    return size


# --------------------------------------------------------------------------------------- the engine


#: buildx's message if a builder's driver does not support cache export.
_NO_CACHE = re.compile(r"cache export (feature )?is (currently )?not supported", re.IGNORECASE)


class BuildkitEngine:
    """Builds with a Docker Engine, or on a builder."""

    name = "buildkit"

    def __init__(self, builder: str = "") -> None:
        self.builder = builder

    @cached_property
    def _cli(self) -> Cli | None:
        return find_cli()

    def missing(self) -> str | None:
        if self._cli is None:
            return "no docker client with buildx is on PATH"
        if self.builder:
            return None if self._cli.buildx else f"{self._cli.binary} has no buildx"
        try:
            docker.connect().close()
        except EngineError as error:
            return str(error)
        return None

    def refuses(self, plan: BuildPlan) -> str | None:
        if self.builder and plan.base.in_layout:
            return (
                f"{plan.base.ref} is a directory on this machine, but builder {self.builder} takes "
                "its base from a registry"
            )
        return refuses_base(plan)

    @cached_property
    def _links(self) -> bool:
        if self.builder:
            return True
        client = docker.connect()
        version = str(client.version().get("Version", "0"))
        client.close()
        return int(version.split(".", 1)[0]) >= LINK_SINCE

    def render(self, plan: BuildPlan) -> str:
        return _dockerfile(plan, self._base_name(plan), links=self._links)

    def _base_name(self, plan: BuildPlan) -> str:
        if plan.base.is_wheels:
            return "scratch"
        name = plan.base.ref.split("@")[0]
        return _pinned_name(plan) if "/" in name or self.builder else name

    def needs(self, request: BuildRequest) -> list[Need]:
        added = added_bytes(request.plan)
        needs = [Need.temporary(added, "the build context")]
        if self.builder and request.output is not None:
            size = added + base_bytes(request)
            return [*needs, Need.output(request.output, size, "the base's and the new layers")]
        if self.builder and request.push:
            return needs
        return needs + load_needs(added + (base_bytes(request) if self.builder else 0))

    def build(self, request: BuildRequest) -> BuiltImage:
        return self._on_builder(request) if self.builder else self._on_engine(request)

    def _on_engine(self, request: BuildRequest) -> BuiltImage:
        """Build in the local Docker Engine, on its copy of the base."""
        assert self._cli is not None
        plan = request.plan
        words = ["--builder", ENGINE, "--load"] if self._cli.buildx else []
        # without it BuildKit looks for the base of this machine's platform
        words += ["--platform", plan.base.platform.oci]
        with context_of(plan) as (context, added), self._pinned_base(plan) as base:
            _write_dockerfile(context, plan, base, links=self._links)
            words += ["-t", request.tag]
            cached = self._run(context, request, words, {**self._cli.env, **engine_environment()})
        client = docker.connect()
        try:
            digest = str(client.images.get(request.tag).id)
            if request.push:
                digest = docker.push(client, request.tag) or digest
        finally:
            client.close()
        return BuiltImage(
            ref=Ref(request.tag), digest=digest, added_bytes=added, engine=self.name, cached=cached
        )

    def _on_builder(self, request: BuildRequest) -> BuiltImage:
        """Build on a builder, with the base from its registry; deliver the image."""
        assert self._cli is not None
        plan, output = request.plan, request.output
        here = not (request.push or output)
        if here:
            docker.connect().close()  # before anything is built that it could not take
        with (
            reached(self._cli.binary, self.builder) as builder,
            context_of(plan) as (context, added),
        ):
            console.say(f"  on builder {builder.given} (driver {builder.driver})")
            _write_dockerfile(context, plan, self._base_name(plan), links=builder.links)
            with contextlib.ExitStack() as stack:
                layout: Path | None = None
                if output is not None:
                    layout = stack.enter_context(new_layout(output, request.tag))
                    to = ["--output", f"type=oci,tar=false,name={request.tag},dest={layout}"]
                else:
                    to = ["--push" if request.push else "--load", "-t", request.tag]
                cached, digest = self._there(context, request, builder, to)
                if layout is not None:
                    digest = layout_digest(layout)
        if here:
            client = docker.connect()
            try:
                digest = str(client.images.get(request.tag).id)
            finally:
                client.close()
        built = BuiltImage(
            ref=Ref(request.tag),
            digest=digest,
            added_bytes=added,
            engine=self.name,
            target=Ref(f"docker://{request.tag}@{digest}") if request.push else None,
            cached=cached,
        )
        return built if output is None else in_layout(built, output)

    def _there(
        self, context: Path, request: BuildRequest, builder: Builder, to: Sequence[str]
    ) -> tuple[dict[tuple[str, str], bool], str]:
        """Run the build on a builder; returns which layers were cached, and the image's digest."""
        with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
            told = Path(folder) / "metadata.json"
            words = ["--builder", builder.name, "--platform", request.plan.base.platform.oci, *to]
            words += ["--metadata-file", str(told)]
            env = {**engine_environment(), **builder.env}
            cached = self._run(context, request, words, env)
            digest = json.loads(told.read_bytes()).get("containerimage.digest", "")
        return cached, str(digest)

    @staticmethod
    def _pinned_base(plan: BuildPlan) -> contextlib.AbstractContextManager[str]:
        if plan.base.is_wheels:
            return contextlib.nullcontext("scratch")
        return docker.pinned(plan.base.ref, plan.base.digest)

    def _run(
        self,
        context: Path,
        request: BuildRequest,
        words: Sequence[str],
        env: Mapping[str, str],
    ) -> dict[tuple[str, str], bool]:
        """Run the build; returns for each patch layer whether it was cached."""
        assert self._cli is not None
        epoch, platform = str(request.plan.epoch), request.plan.base.platform.oci
        words = [*words, *cache_words(request.cache_from, "from")]
        words += [*cache_words(request.cache_to, "to"), str(context)]
        ran = run_build(self._cli, words, {**env, "SOURCE_DATE_EPOCH": epoch})
        if ran.status != 0:
            raise self._failure(ran.status, ran.progress.tail, ran.output, platform)
        return {
            (platform, d.name): ran.progress.cached[folder_of(d.name)]
            for d in request.plan.needed
            if folder_of(d.name) in ran.progress.cached
        }

    @property
    def _where(self) -> str:
        return f"builder {self.builder}" if self.builder else "the Docker Engine"

    def _failure(self, status: int, tail: str, output: str, platform: str) -> Exception:
        where = f" on builder {self.builder}" if self.builder else ""
        if _NO_CACHE.search(output):
            return EngineError(
                f"this builder cannot export its cache{where}; builders of other drivers and "
                f"Docker Engines with the containerd image store can:\n  {tail}",
                hint="--builder NAME",
            )
        if "exec format error" in output:
            return EngineError(
                f"{self._where} cannot run programs of {platform}:\n  {tail}",
                hint="--engine oci",
            )
        if re.search(r"failed to push|error writing (manifest|layer) blob", output):
            return RemoteError(f"pushing failed{where}:\n  {tail}", hint="docker login")
        if self.builder and "failed to resolve source metadata" in output:
            return RemoteError(
                f"builder {self.builder} cannot reach the base in its registry:\n  {tail}",
                hint="push the base to a registry that the builder can reach, then use --base "
                "docker://HOST/NAME:TAG",
            )
        return BuildFailed(f"docker build exited {status}{where}:\n  {tail}")


def write_pinned_context(folder: Path, plan: BuildPlan) -> int:
    """Write a build context for any buildx builder; returns the layers' size in bytes.

    The base is named by its digest in its registry.
    """
    added = fill_context(folder, plan)
    _write_dockerfile(folder, plan, _pinned_name(plan), links=True)
    return added


def _write_dockerfile(context: Path, plan: BuildPlan, base: str, *, links: bool) -> None:
    (context / "Dockerfile").write_text(_dockerfile(plan, base, links=links))


def _pinned_name(plan: BuildPlan) -> str:
    return f"{plan.base.ref.split('@')[0]}@{plan.base.digest}"


def _dockerfile(plan: BuildPlan, base: str, *, links: bool) -> str:
    folders = [{"title": name, "folder": folder_of(name)} for name, _ in image_layers(plan)]
    finish = None
    gone = any(content is None for content in plan.changes.values())
    owners = ["--owners", metadata.OWNERS] if metadata.restored(plan) else []
    if (gone or owners) and plan.base.is_image:
        finish = metadata.finish_command(plan.base.interpreter, plan.base.site_packages, *owners)
    return render(
        "image.Dockerfile.j2",
        base=base,
        user=plan.base.user,
        copy_flags="--link " if links else "",
        run_flags="--network=none " if links else "",
        layers=folders,
        finish=finish,
        env=sorted(plan.env.items()),
        labels=sorted(metadata.labels(plan).items()),
    )


# --------------------------------------------------------------------------- scripts in containers


#: The folder of mounts and results in a container.
ROOT = Path("/spark-build")
_TEMPLATE = "compile.Dockerfile.j2"
#: BuildKit's message for a failed script, with its exit status.
_STATUS = re.compile(r"did not complete successfully: exit code: (\d+)")
#: Messages of runc for a missing program, and of BuildKit for an empty image.
_NO_SHELL = re.compile(r"/bin/sh\S*: (stat .*)?no such file|`/bin/sh` not found in|find user 0")


@dataclass(frozen=True, kw_only=True)
class PinnedImage:
    """An image for one platform (``linux/arm64``): its reference and its digest."""

    ref: str
    digest: str
    platform: str

    @property
    def name(self) -> str:
        """The name without a digest."""
        return self.ref.partition("@")[0]

    @property
    def exact(self) -> str:
        """The reference by digest."""
        return f"{self.name}@{self.digest}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A script for ``/bin/sh``; its results are the files in ``/spark-build/out/NAME``.

    It starts after the task ``after``, with that task's results.
    """

    name: str
    script: str
    after: str = ""


class TaskFailed(Exception):
    """A script exited non-zero; ``output`` is what the scripts printed."""

    def __init__(self, status: int, output: str) -> None:
        super().__init__(f"exit code {status}")
        self.status = status
        self.output = output


class Containers:
    """Containers on the local Docker Engine, or on a builder."""

    def __init__(self, builder: str = "") -> None:
        self.builder = builder

    @property
    def where(self) -> str:
        """The name of the place in messages."""
        return f"builder {self.builder}" if self.builder else "the Docker Engine"

    @cached_property
    def elsewhere(self) -> bool:
        """Whether they run on another machine, as far as is known."""
        if self.builder:
            return True
        with contextlib.closing(docker.connect()) as client:
            return engine_root(client) is None

    @cached_property
    def _cli(self) -> Cli:
        cli = find_cli()
        if cli is None or cli.buildx is None:
            what = "no docker client is on PATH" if cli is None else f"{cli.binary} has no buildx"
            raise EngineError(
                f"{what}, and compiling in a container needs BuildKit",
                hint="install docker-buildx, or leave --toolkit out where this machine has nvcc",
            )
        return cli

    def resolve(self, ref: str, platform: str) -> PinnedImage:
        """Resolve a reference; the Docker Engine pulls the image if it lacks it.

        Raises:
            EngineError: no engine or client is available, or the image is for another platform.
            RemoteError: the image is not available.
            UsageError: the reference is malformed.
        """
        named = Ref(ref)
        if not named.has_name:
            raise UsageError(
                f"--toolkit {ref}: a builder needs it in a registry or a Docker Engine",
                hint="--toolkit HOST/NAME:TAG",
            )
        _ = self._cli
        ref, digest, has = (self._in_registry if self.builder else self._here)(
            named.place, platform
        )
        image = PinnedImage(ref=ref, digest=digest, platform=platform)
        if has != platform:
            raise EngineError(
                f"{image.name} is for {has}, but the target platform is {platform}",
                hint=f"name an image for {platform} with --toolkit",
            )
        return image

    @staticmethod
    def _here(ref: str, platform: str) -> tuple[str, str, str]:
        """Find a local image; one with a digest may have only a tag and no repository digest."""
        tag, _, digest = ref.partition("@")
        try:
            client = docker.connect()
        except EngineError as error:
            hint = "start Docker, or name a BuildKit with --builder"
            raise EngineError(str(error), hint=hint) from None
        with contextlib.closing(client):
            if digest:
                with contextlib.suppress(RemoteError):
                    image = docker.find_image(client, tag, platform, pull=False)
                    if digest in docker.digests_of(image):
                        return tag, digest, f"linux/{image.attrs.get('Architecture')}"
            image = docker.find_image(client, ref, platform)
            digest = digest or docker.digest_of(image.attrs, ref)
            return ref, digest, f"linux/{image.attrs.get('Architecture')}"

    @staticmethod
    def _in_registry(ref: str, platform: str) -> tuple[str, str, str]:
        try:
            image = open_image(Ref(ref), platform)
        except OtherPlatform as error:
            raise EngineError(str(error), hint="name another image with --toolkit") from None
        with contextlib.closing(image):
            return ref, image.top.digest, f"linux/{image.config.architecture}"

    def render(self, image: str, tasks: Sequence[Task], mounts: Sequence[str]) -> str:
        """The Dockerfile of a run."""
        targets = [{"name": mount, "target": ROOT / mount} for mount in mounts]
        return render(_TEMPLATE, image=image, tasks=tasks, mounts=targets, root=ROOT)

    def run(
        self, image: PinnedImage, tasks: Sequence[Task], mounts: Mapping[str, Path], out: Path
    ) -> None:
        """Run scripts, in parallel unless one must follow another.

        Args:
            image: the image to run them in.
            tasks: the scripts.
            mounts: local folders, by their names below ``/spark-build``.
            out: the folder for results, with a subfolder for each task.

        Raises:
            TaskFailed: a script failed.
            EngineError: the engine or builder cannot run the image.
            RemoteError: the image is not available to it.
            BuildFailed: it failed for another reason.
        """
        with self._reached(image) as (name, words, env), _context() as context:
            (context / "Dockerfile").write_text(self.render(name, tasks, list(mounts)))
            for task in tasks:
                (context / f"{task.name}.sh").write_text(task.script)
            words = [*words, "--platform", image.platform, "--output", f"type=local,dest={out}"]
            for mount, folder in mounts.items():
                words += ["--build-context", f"{mount}={folder}"]
            ran = run_build(self._cli, [*words, str(context)], env)
        if ran.status != 0:
            raise self._failure(image, ran.output, ran.progress.tail, "\n".join(ran.progress.logs))

    @contextlib.contextmanager
    def _reached(self, image: PinnedImage) -> Iterator[tuple[str, list[str], dict[str, str]]]:
        """The image's name on the engine or builder, and the client's arguments to select it."""
        if self.builder:
            with reached(self._cli.binary, self.builder) as builder:
                words = ["--builder", builder.name]
                yield image.exact, words, {**engine_environment(), **builder.env}
            return
        with docker.pinned(image.ref, image.digest) as name:
            yield name, ["--builder", ENGINE], {**self._cli.env, **engine_environment()}

    def _failure(self, image: PinnedImage, output: str, tail: str, logs: str) -> Exception:
        if "exec format error" in output:
            return EngineError(
                f"{self.where} cannot run {image.name}, which is for {image.platform}",
                hint=f"name a builder on a {image.platform} machine with --builder",
            )
        if _NO_SHELL.search(output):
            return EngineError(
                f"{image.name} has no /bin/sh, which is needed",
                hint="name an image with nvcc and g++ with --toolkit",
            )
        if "failed to resolve source metadata" in output or "failed to do request" in output:
            return RemoteError(
                f"{self.where} cannot pull {image.exact}:\n  {tail}",
                hint="name an image in a registry that it can reach with --toolkit HOST/NAME:TAG",
            )
        if status := _STATUS.search(output):
            return TaskFailed(int(status[1]), logs)
        return BuildFailed(f"the build in {image.name} failed on {self.where}:\n  {tail}")


@contextlib.contextmanager
def _context() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
        yield Path(folder)
