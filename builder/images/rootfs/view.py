"""The merged files of an image, without unpacking, as overlayfs shows them.

Layers are searched from the top, and one is read when a question reaches it: what the upper layers
answer costs nothing below.  Paths are absolute, and links in them are followed inside the image as
a container would.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, TypeVar

from builder.common.console import console
from builder.errors import RemoteError, UsageError
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import blobs
from builder.images.rootfs import limits
from builder.images.rootfs.facts import NotRecorded
from builder.images.rootfs.image import LayerCache
from builder.images.rootfs.index import IMPLICIT, OPAQUE, WHITEOUT, LayerIndex, Row, parent_of
from builder.images.rootfs.tar import DIR, FILE, HARDLINK, SYMLINK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from builder.images.registry.model import Descriptor
    from builder.images.rootfs.facts import RecordedFiles
    from builder.images.rootfs.image import Image


# --------------------------------------------------------------------------------------- one folder


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry as a container sees it, and the layer (0 is the top) with its bytes.

    The layer is -1 for recorded facts.
    """

    row: Row
    layer: int

    @property
    def kind(self) -> str:
        """``file``, ``dir``, ``symlink`` or ``other``."""
        return self.row.kind

    @property
    def executable(self) -> bool:
        """Whether it is an executable file."""
        return self.kind == FILE and bool(self.row.mode & 0o111)


def merged_below(
    start: str, layers: Iterable[tuple[int, LayerIndex | RecordedFiles]]
) -> dict[str, Entry]:
    """Everything below a folder, by path; layers are given with their numbers, top first."""
    merged: dict[str, Entry] = {}
    hidden: set[tuple[str, str]] = set()
    for number, layer in layers:
        blocked = _Blocked(start, merged, hidden)
        shown: dict[str, Entry] = {}
        cut: set[tuple[str, str]] = set(layer.hidden_below(start))
        for row in layer.below(start):
            if not blocked(row.path):
                shown[row.path] = Entry(row, number)
            elif row.kind not in (DIR, IMPLICIT):  # it took a folder's place, and was replaced
                cut.add((row.path, OPAQUE))
        merged.update(shown)
        hidden.update(cut)
        if layer.seals(start):
            break
    return merged


class _Blocked:
    """Whether an entry of a layer is covered by the layers above it, below one directory."""

    def __init__(self, start: str, merged: dict[str, Entry], hidden: set[tuple[str, str]]) -> None:
        self._merged, self._hidden = merged, hidden
        self._folders = {start: False}

    def __call__(self, path: str) -> bool:
        known = self._merged.get(path)
        if known is not None and known.kind != IMPLICIT:
            return True
        return (path, WHITEOUT) in self._hidden or self._inside(parent_of(path))

    def _inside(self, folder: str) -> bool:
        if folder not in self._folders:
            known = self._merged.get(folder)
            self._folders[folder] = (
                (folder, WHITEOUT) in self._hidden
                or (folder, OPAQUE) in self._hidden
                or (known is not None and known.kind not in (DIR, IMPLICIT))
                or self._inside(parent_of(folder))
            )
        return self._folders[folder]


# ---------------------------------------------------------------------------------------- the image


_Answer = TypeVar("_Answer")

_ROOT = Entry(Row("", DIR), 0)
#: Layers to read in parallel after several single layers had no result.
_AHEAD = 3
#: Layer number of recorded facts about the lowest layers.
_FACTS = -1


class Rootfs:
    """A read-only file system over the layers of an image, which are given bottom first.

    ``facts`` answer in place of the lowest layers, until a question comes that they have no answer
    to.  ``notes`` are given all that is asked.
    """

    def __init__(
        self,
        layers: Sequence[Descriptor],
        cache: LayerCache,
        facts: RecordedFiles | None = None,
        notes: RecordedFiles | None = None,
    ) -> None:
        if len(layers) > limits.LAYERS:
            raise RemoteError(f"{cache.source.name}: an image of {len(layers)} layers")
        self._descriptors = list(reversed(layers))
        self._facts, self.notes = facts, notes
        self._contents = facts
        self._above = len(layers) - len(facts.layers) if facts is not None else 0
        self._cache = cache
        self._open: list[LayerIndex] = []
        #: folders without an entry in an open layer, not yet looked up below it
        self._unsettled: deque[tuple[int, str, str]] = deque()
        self._nowhere: set[tuple[int, str]] = set()
        self._folders: dict[str, Entry] = {}
        self._new = 0

    def close(self) -> None:
        """Let go of the cache's files."""
        for index in self._open:
            index.close()
        self._open.clear()
        self._cache.close()

    @property
    def layers_read(self) -> int:
        """How many layers, from the top, were needed so far."""
        return len(self._open)

    @property
    def above(self) -> int | None:
        """How many layers lie above those that facts answer for; None without facts."""
        return None if self._facts is None else self._above

    def _layers(self, first: int = 0) -> Iterator[tuple[int, LayerIndex | RecordedFiles]]:
        for number in range(first, len(self._descriptors)):
            if self._facts is not None and number == self._above:
                yield _FACTS, self._facts
                return
            if number == len(self._open):
                self._open.append(self._index(number))
                implied = self._open[number].implied()
                self._unsettled.extend((number, path, kind) for path, kind in implied)
            yield number, self._open[number]

    def _index(self, number: int) -> LayerIndex:
        """A layer's index.  A question that one new layer did not answer takes the rest, mostly."""
        if not self._cache.knows(self._descriptors[number]):
            self._new += 1
            if self._new > 1:
                end = number + _AHEAD if self._facts is None else self._above
                self._cache.read_ahead(self._descriptors[number : min(end, number + _AHEAD)])
        return self._cache.index(self._descriptors[number])

    def _forget(self, path: str) -> None:
        """Go by the layers from now on."""
        if self._facts is not None:
            console.say(f"  the lock has no facts about /{path} of this base; reading its layers")
        self._facts = None
        self._folders.clear()

    @property
    def facts(self) -> RecordedFiles | None:
        """The facts that still answer for the lowest layers."""
        return self._facts

    # -- one path

    def _asked(self, question: Callable[[], _Answer]) -> _Answer:
        """An answer from the facts as far as they go, else from the layers."""
        try:
            answer = question()
            self._settle()
        except NotRecorded as missing:
            self._forget(str(missing))
            answer = question()
            self._settle()
        return answer

    def _settle(self) -> None:
        """See that what the layers write into without an entry are directories below them.

        Of a link there, one runtime follows it, and another puts a directory in its place.
        """
        while self._unsettled:
            number, path, kind = self._unsettled[0]
            if self._is_cut(number, path):
                raise self._unclear(number, path, "below what another layer takes away")
            hidden = (number, parent_of(path)) in self._nowhere or self._open[number].hides(path)
            below = None if hidden else self._search(path, number + 1)
            if below is not None and below.kind != DIR:
                raise self._unclear(number, path, f"a {below.kind} in the layers below it")
            if below is None:
                own = self._open[number].row(path)
                if kind == WHITEOUT and own is not None and own.kind == IMPLICIT:
                    raise self._unclear(number, path, "nowhere in the layers below it")
                self._nowhere.add((number, path))
            self._unsettled.popleft()

    def _is_cut(self, number: int, path: str) -> bool:
        """Whether containerd fails at a folder, whose owner and mode it looks for below a layer."""
        for _, layer in self._layers(number + 1):
            if layer is self._facts or layer.row(path) is not None:
                return False
            if isinstance(layer, LayerIndex) and layer.cuts(path):
                return True
        return False

    def _find(self, path: str) -> Entry | None:
        """The entry at a relative path none of whose directories is a link."""
        entry = self._asked(partial(self._search, path))
        if self.notes is not None:
            self.notes.note(path, None if entry is None else entry.row)
        return entry

    def _search(self, path: str, first: int = 0) -> Entry | None:
        implicit: int | None = None
        for number, layer in self._layers(first):
            row = layer.row(path)
            if row is not None and row.kind != IMPLICIT:
                if implicit is not None and row.kind != DIR:
                    raise self._unclear(implicit, path, f"a {row.kind} in the layers below it")
                entry = Entry(row, number)
                return self._resolved(entry) if row.kind == HARDLINK else entry
            if row is not None and implicit is None:
                implicit = number
            if layer.hides(path):
                break
        if not path:
            return _ROOT
        return None if implicit is None else Entry(Row(path, DIR), implicit)

    def _unclear(self, number: int, path: str, what: str) -> RemoteError:
        digest = self._descriptors[number].digest
        return RemoteError(
            f"{self._cache.source.name}: layer {digest[:19]} writes into /{path}, which is {what}, "
            "and has no entry for it; runtimes handle this differently"
        )

    def _resolved(self, entry: Entry) -> Entry:
        """What a hard link shares its bytes with: a file of its own layer."""
        row = self._open[entry.layer].row(entry.row.link)
        if row is None or row.kind not in (FILE, SYMLINK):
            raise RemoteError(
                f"{self._cache.source.name}: /{entry.row.path} is a hard link to "
                f"/{entry.row.link}, which is not a file of this image"
            )
        return Entry(row, entry.layer)

    def _follow(self, path: str) -> tuple[str, Entry] | None:
        """Where a path leads, links followed: the real path (relative) and what is there."""
        pending = path.split("/")[::-1]
        current, entry, links = "", _ROOT, 0
        while pending:
            name = pending.pop()
            if name in ("", "."):
                continue
            if entry.kind != DIR:
                return None
            if name == "..":
                current = parent_of(current)
                entry = self._known(current) or _ROOT
                continue
            target = f"{current}/{name}" if current else name
            known = self._known(target)
            if known is None:
                return None
            if known.kind == SYMLINK:
                links += 1
                if links > limits.LINKS:
                    return None
                link = known.row.link
                if link.startswith("/"):
                    current, entry = "", _ROOT
                pending.extend(link.split("/")[::-1])
            else:
                current, entry = target, known
        return current, entry

    def _known(self, path: str) -> Entry | None:
        """:meth:`_find`; answers that many paths share, directories and links, are kept."""
        entry = self._folders.get(path) or self._find(path)
        if entry is not None and entry.kind in (DIR, SYMLINK):
            self._folders[path] = entry
        return entry

    def realpath(self, path: str) -> str | None:
        """An absolute path with every link followed, or None when nothing is there."""
        target = self._follow(path)
        return None if target is None else f"/{target[0]}"

    def stat(self, path: str) -> Entry | None:
        """What an absolute path leads to, links followed."""
        target = self._follow(path)
        return None if target is None else target[1]

    def lstat(self, path: str) -> Entry | None:
        """What is at an absolute path itself; links in its directories are followed."""
        parent, _, name = path.rstrip("/").rpartition("/")
        folder = self._follow(parent)
        if folder is None or folder[1].kind != DIR:
            return None
        return self._known(f"{folder[0]}/{name}".strip("/"))

    def lowest(self, paths: Iterable[str]) -> int | None:
        """The number of the lowest layer with an entry at one of some absolute paths.

        Upper layers may have copies.  Layers that facts stand for are not looked at.
        """
        lowest = None
        for path in paths:
            folder, _, name = path.rpartition("/")
            real = f"{self.realpath(folder) or folder}/{name}".strip("/")
            for number, layer in self._layers():
                if isinstance(layer, LayerIndex) and layer.row(real) is not None:
                    lowest = max(number, lowest or 0)
        return lowest

    # -- many

    def names(self, directory: str) -> list[str]:
        """Names in a directory, sorted; empty if it is not a directory."""
        real = self._follow(directory)
        if real is None or real[1].kind != DIR:
            return []
        relative = real[0]
        names = self._asked(partial(self._names, relative))
        if self.notes is not None:
            self.notes.names[relative] = names
        return names

    def _names(self, relative: str) -> list[str]:
        names: set[str] = set()
        gone: set[str] = set()
        for _, layer in self._layers():
            names.update(set(layer.children(relative)) - gone)
            gone.update(layer.whiteouts(relative))
            if layer.seals(relative):
                break
        return sorted(names)

    def below(self, directory: str) -> dict[str, Entry]:
        """Everything below a real directory, by its path from there; links are not followed."""
        start = directory.strip("/")
        entries = self._asked(partial(self._below, start))
        if self.notes is not None:
            self.notes.note_below(start, {path: entry.row for path, entry in entries.items()})
        return entries

    def _below(self, start: str) -> dict[str, Entry]:
        result = {}
        for path, entry in sorted(merged_below(start, self._layers()).items()):
            target = self._find(path) if entry.kind in (IMPLICIT, HARDLINK) else entry
            if target is not None:
                result[path[len(start) :].lstrip("/")] = target
        return result

    # -- bytes

    def read(self, path: str) -> bytes | None:
        """The bytes of a file, links followed; None if it does not exist.

        Raises:
            RemoteError: its layer can no longer be read.
        """
        entry = self.stat(path)
        if entry is None or entry.kind != FILE:
            return None
        data = self.cached(entry)
        if data is None:
            self.fetch([path])
            data = self.cached(entry)
        if data is not None:
            self.noted(data)
        return data

    def read_known(self, path: str) -> bytes | None:
        """:meth:`read`, without a look into layers that facts stand for."""
        entry = self.stat(path)
        if entry is not None and entry.layer == _FACTS:
            return self.cached(entry) if entry.kind == FILE else None
        return self.read(path)

    def noted(self, data: bytes) -> None:
        """Record the bytes of a file that was read."""
        if self.notes is not None:
            self.notes.note_content(data)

    def cached(self, entry: Entry) -> bytes | None:
        """The bytes of a file, if known or in the cache."""
        if entry.layer == _FACTS:
            return self.content(entry.row.sha256)
        return self._open[entry.layer].content(entry.row.sha256)

    def _is_cached(self, entry: Entry) -> bool:
        """Whether :meth:`cached` has the bytes."""
        if entry.layer == _FACTS:
            return self.cached(entry) is not None
        return self._open[entry.layer].has_content(entry.row.sha256)

    def content(self, sha256: str) -> bytes | None:
        """The bytes with this sha256, if known or in the cache."""
        data = self._contents.content(sha256) if self._contents is not None else None
        for descriptor in self._descriptors:
            if data is not None:
                break
            data = self._cache.content(descriptor, sha256)
        return data

    def _in_layer(self, path: str, entry: Entry) -> Entry:
        """The file's entry, with the layer that has its bytes.

        Raises:
            RemoteError: the layers do not match the recorded facts.
        """
        if entry.layer != _FACTS:
            return entry
        self._forget(path.strip("/"))
        real = self.stat(path)
        if real is None or real.row.sha256 != entry.row.sha256:
            raise RemoteError(
                f"{self._cache.source.name}: {path} does not match the lock's facts about this "
                f"base",
                hint="spark-build lock --upgrade",
            )
        return real

    def fetch(self, paths: Iterable[str], beside: Iterable[str] = ()) -> None:
        """Cache the bytes of some files, in one pass for each layer.

        ``beside`` are files to cache as well if their layers are read anyway.

        Raises:
            RemoteError: a layer can no longer be read.
        """
        wanted: dict[int, list[Row]] = {}
        for path in paths:
            entry = self.stat(path)
            if entry is None or entry.kind != FILE:
                continue
            if not self._is_cached(entry):
                entry = self._in_layer(path, entry)
            if not self._is_cached(entry):
                wanted.setdefault(entry.layer, []).append(entry.row)
        for path in beside if wanted else ():
            entry = self.stat(path)
            if entry is not None and entry.layer in wanted and entry.row.sha256:
                wanted[entry.layer].append(entry.row)
        for number, rows in sorted(wanted.items()):
            self._cache.fetch(self._descriptors[number], rows)

    def copy(self, path: str, out: IO[bytes]) -> bool:
        """Stream a file to ``out``, links followed; returns whether it exists.

        Raises:
            RemoteError: its layer can no longer be read.
        """
        entry = self.stat(path)
        if entry is None or entry.kind != FILE:
            return False
        data = self.cached(entry)
        if data is None:
            entry = self._in_layer(path, entry)
            data = self.cached(entry)
        if data is None:
            self._cache.copy(self._descriptors[entry.layer], entry.row, out)
        else:
            out.write(data)
        return True


# --------------------------------------------------------------------------------- its interpreter
#
# It follows CPython's start-up (``Modules/getpath.py`` and ``site.py``, and Debian's version of the
# latter), with the image's environment.  Nothing is assumed about a version or a path.

#: PATH that a runtime sets if the image has none (default of containerd and Docker).
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAME = re.compile(r"python(3\.\d+)t?")


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """One interpreter: its command, its version (``3.12``), and its ``sys.path``."""

    command: str
    version: str
    path: tuple[str, ...]
    #: the folders of the standard library, which come after ``PYTHONPATH``; the first is an archive
    stdlib: tuple[str, ...] = ()
    #: the root of its virtual environment, or ``""``
    environment: str = ""


def interpreters(
    view: Rootfs, env: Mapping[str, str], working_dir: str = "/"
) -> Iterator[Interpreter]:
    """Interpreters in the same order as in ``bases/image.py``."""
    seen = set()
    for command in _commands(view, env):
        interpreter = None if command in seen else _interpreter(view, command, env, working_dir)
        seen.add(command)
        if interpreter is not None:
            yield interpreter


def _commands(view: Rootfs, env: Mapping[str, str]) -> Iterator[str]:
    if env.get("VIRTUAL_ENV"):
        yield f"{env['VIRTUAL_ENV'].rstrip('/')}/bin/python"
    for name in ("python3", "python"):
        for folder in env.get("PATH", DEFAULT_PATH).split(":"):
            entry = view.stat(f"{folder}/{name}") if folder.startswith("/") else None
            if entry is not None and entry.executable:
                yield f"{folder.rstrip('/')}/{name}"
                break
    yield from ("/opt/venv/bin/python3", "/usr/local/bin/python3", "/usr/bin/python3")


def _interpreter(
    view: Rootfs, command: str, env: Mapping[str, str], working_dir: str
) -> Interpreter | None:
    entry, real = view.stat(command), view.realpath(command)
    if entry is None or real is None or not entry.executable:
        return None
    named = _NAME.fullmatch(real.rpartition("/")[2])
    home = _home(view, real, named[1] if named else None)
    if home is None:
        return None
    prefix, version, lib = home
    stdlib = (
        f"{prefix}/lib/python{version.replace('.', '')}.zip",
        f"{prefix}/{lib}/python{version}",
        f"{prefix}/{lib}/python{version}/lib-dynload",
    )
    system = _site_packages(view, prefix, version)
    venv = _venv(view, command)
    first = [working_dir or "/", *_listed(env.get("PYTHONPATH", ""), working_dir)]
    if venv is None:
        user = f"{env.get('HOME', '/root')}/.local/lib/python{version}/site-packages"
        own = [] if env.get("PYTHONNOUSERSITE") else [user]
        path = (*first, *own, *system)
        return Interpreter(command=real, version=version, path=path, stdlib=stdlib)
    root, shares = venv
    own = [f"{root}/{lib}/python{version}/site-packages" for lib in ("lib", "lib64")]
    path = (*first, *own, *(system if shares else ()))
    return Interpreter(command=command, version=version, path=path, stdlib=stdlib, environment=root)


def _listed(text: str, working_dir: str) -> list[str]:
    """The directories of a ``PYTHONPATH``."""
    folders = [folder for folder in text.split(":") if folder]
    return [f if f.startswith("/") else f"{working_dir.rstrip('/')}/{f}" for f in folders]


def _home(view: Rootfs, real: str, version: str | None) -> tuple[str, str, str] | None:
    """Prefix, version, and ``lib`` or ``lib64``: the prefix holds ``lib/python3.X/os.py``."""
    folder = real.rpartition("/")[0]
    while folder:
        folder = folder.rpartition("/")[0]
        for lib in ("lib", "lib64"):
            names = [f"python{version}"] if version else view.names(f"{folder}/{lib}")
            for name in names:
                match = _NAME.fullmatch(name)
                if match and view.stat(f"{folder}/{lib}/{name}/os.py") is not None:
                    return folder, match[1], lib
    return None


def _site_packages(view: Rootfs, prefix: str, version: str) -> list[str]:
    """Package directories of an interpreter outside a virtual environment; Debian's differ."""
    for lib in ("lib", "lib64"):
        site = view.read(f"{prefix}/{lib}/python{version}/site.py")
        if site is not None and b"dist-packages" in site:
            return [
                f"{prefix}/local/lib/python{version}/dist-packages",
                f"{prefix}/lib/python3/dist-packages",
                f"{prefix}/lib/python{version}/dist-packages",
            ]
    return [f"{prefix}/{lib}/python{version}/site-packages" for lib in ("lib", "lib64")]


def _venv(view: Rootfs, command: str) -> tuple[str, bool] | None:
    """A virtual environment's root, and whether it also sees the system's packages."""
    folder = command.rpartition("/")[0]
    for root in (folder, folder.rpartition("/")[0]):
        data = view.read(f"{root}/pyvenv.cfg")
        if data is not None:
            lines = data.decode("utf-8", "replace").splitlines()
            pairs = {k.strip().lower(): v.strip() for k, _, v in (x.partition("=") for x in lines)}
            return root, pairs.get("include-system-site-packages", "").lower() == "true"
    return None


# ------------------------------------------------------------------------------------ an open image


#: Folders of spark-build's files (``engines/metadata.py``), whose links identification looks up.
_KNOWN = ("/usr/local/bin", "/usr/share")


@dataclass(frozen=True)
class InLayers:
    """An open image in a registry or a layout: its files are read from its layers."""

    image: Image
    view: Rootfs

    in_engine = False
    brought = ()

    @property
    def in_layers(self) -> InLayers:
        return self

    @property
    def runs_as(self) -> str:
        source = self.image.source
        return source.name_of(self.image.top.digest) if isinstance(source, LayoutDirectory) else ""

    @property
    def labels(self) -> Mapping[str, str]:
        return self.image.config.labels

    @property
    def env(self) -> Mapping[str, str]:
        return self.image.config.env

    @property
    def digests(self) -> tuple[str, ...]:
        """Those of its manifest and configuration."""
        return (self.image.manifest.digest, blobs(self.image.manifest)[0].digest)

    def read(self, path: str) -> bytes | None:
        return self.view.read(path)

    def has(self, path: str) -> bool:
        """Reads no layer."""
        return self.view.stat(path) is not None

    def above(self, count: int | None = None) -> Rootfs:
        """The files of the uppermost layers alone: by default, of those above a locked base."""
        count = self.view.above if count is None else count
        layers = self.image.layers
        cache = LayerCache(self.image.source, diff_ids=self.image.diff_ids)
        return Rootfs(layers[len(layers) - (count or 0) :], cache)

    def known(self) -> Rootfs:
        """All files; of a locked base only those that its facts have, and no layer of it."""
        facts = self.view.facts
        layers = self.image.layers
        cache = LayerCache(self.image.source, diff_ids=self.image.diff_ids)
        return Rootfs(layers, cache, None if facts is None else facts.closed())

    def below(self, count: int) -> Rootfs:
        """The files without those of some uppermost layers."""
        layers = self.image.layers
        cache = LayerCache(self.image.source, diff_ids=self.image.diff_ids)
        return Rootfs(layers[: len(layers) - count], cache)

    @contextlib.contextmanager
    def _entry(self, path: str) -> Iterator[tuple[Rootfs, str, Entry | None]]:
        """Where a path is.  Of an image on a locked base, only the layers above it are read."""
        view, folder = self.view, path.rpartition("/")[0]
        locked = view.above is not None
        with contextlib.closing(self.above()) if locked else contextlib.nullcontext(view) as files:
            known = folder if not locked or folder not in _KNOWN else view.realpath(folder)
            real = f"{known or folder}/{path.rpartition('/')[2]}"
            yield files, real, files.stat(real)

    def digest(self, path: str) -> str | None:
        """Reads no layer."""
        with self._entry(path) as (_, _, entry):
            return None if entry is None or entry.kind == DIR else entry.row.sha256

    def files_at(self, path: str) -> dict[str, bytes]:
        with self._entry(path) as (files, real, entry):
            if entry is None:
                return {}
            if entry.kind != DIR:
                return {path: files.read(real) or b""}
            real = files.realpath(real) or real
            below = {f"{path}/{name}": f"{real}/{name}" for name, one in files.below(real).items()
                     if one.kind != DIR}  # fmt: skip
            files.fetch(below.values())
            return {name: files.read(place) or b"" for name, place in below.items()}

    def all_files(self, name: str) -> dict[str, bytes]:
        """See `OpenImage`.

        Raises:
            UsageError: it has something other than files and folders, which no overlay has.
            RemoteError: a layer is malformed.
        """
        entries = {f"/{path}": entry.kind for path, entry in self.view.below("/").items()}
        odd = next((path for path, kind in entries.items() if kind not in (FILE, DIR)), None)
        if odd is not None:
            raise UsageError(
                f"{name} is not an overlay of spark-build: {odd} is a {entries[odd]}, and overlays "
                "have only files and folders",
                hint="build it again with spark-build image",
            )
        paths = [path for path, kind in entries.items() if kind == FILE]
        self.view.fetch(paths)
        return {path: self.view.read(path) or b"" for path in paths}

    def close(self) -> None:
        self.view.close()
        self.image.close()
