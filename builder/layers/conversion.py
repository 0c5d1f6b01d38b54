"""Turns patches and patch series that users already have into layers, and reads the files of mods.

A patch file is as git or as ``diff -u`` writes it.  A mod is a folder or zip file with ``run.sh``:
eugr's scripts and sparkrun run it in a container before the server starts.  Nothing runs it here.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import stat
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from builder.applier.files import read_regular
from builder.applier.sources import DAMAGED
from builder.applier.values import normalize, path_problem
from builder.common.diffs import MAX_DIFF, Section, read_sections
from builder.common.files import write_atomically
from builder.errors import UsageError
from builder.layers.layerfile import load_layer
from builder.layers.pulls import Layout, Project, described_projects, project_of, take_apart

if TYPE_CHECKING:
    import datetime
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from builder.layers.pulls import Parts


# -------------------------------------------------------------------------------------- a new layer


#: After layers that replace whole distributions (10 to 40), like those that edit vLLM.
ORDER = 50


@dataclass(frozen=True, kw_only=True)
class DraftOp:
    """One ``[[variant.op]]`` table; ``comments`` go above it."""

    keys: Mapping[str, str | int | Sequence[str] | Mapping[str, str]]
    comments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A new layer."""

    name: str
    package: str
    summary: str
    origin: str
    ops: tuple[DraftOp, ...]
    #: name in the layer's folder -> content
    files: Mapping[str, bytes] = field(default_factory=dict)
    #: changes of the source that do not affect an installed package, with the reason
    dropped: tuple[str, ...] = ()
    #: parts that could not be converted, with their position in the source
    unconverted: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    series: str = ""


def layer_text(draft: Draft, today: datetime.date) -> str:
    """The ``layer.toml`` of a draft."""
    lines = [f"# NOT CONVERTED, add it or leave it out: {text}" for text in draft.unconverted]
    lines += [
        f"summary = {toml_value(draft.summary)}",
        'description = """',
        "Why it exists, and what goes wrong without it.",
        '"""',
        f"order = {ORDER}",
    ]
    if draft.after:
        lines.append(f"after = {toml_value(draft.after)}")
    if draft.series:
        lines.append(f"series = {toml_value(draft.series)}")
    lines += [
        f"package = {toml_value(draft.package)}",
        "",
        "[provenance]",
        f"origin = {toml_value(draft.origin)}",
        'forwarded = "no"',
        'applied-upstream = "no"',
        f"last-update = {today.isoformat()}",
        "",
        "[[variant]]",
        'name = "every-release"',
        "# Every release in this range is searched for the text; narrow it to leave releases out.",
        f'when = {{ {toml_value(draft.package)} = ">=0" }}',
    ]
    lines += [f"# left out: {text}" for text in draft.dropped]
    for op in draft.ops:
        lines += ["", *(f"# {text}" for text in op.comments), "[[variant.op]]"]
        lines += [f"{key} = {toml_value(value)}" for key, value in op.keys.items()]
    return "\n".join(lines) + "\n"


def toml_value(value: str | int | Sequence[str] | Mapping[str, str]) -> str:
    """A TOML value; JSON's strings are TOML's basic strings, except for surrogate pairs."""
    if isinstance(value, (str, int)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items()) + " }"
        )
    return "[" + ", ".join(toml_value(item) for item in value) + "]"


# -------------------------------------------------------------------------------------- patch files


#: A file of an installed package in any environment.
_INSTALLED = re.compile(r"^.*?/?(?:site|dist)-packages/")
#: The keys of an op, as TOML has them.
OpKeys = dict[str, "str | int | Sequence[str] | Mapping[str, str]"]
#: Maximum number of leading folders to strip, as with ``patch -p``.
_STRIPPED = 3


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One patch file, taken apart: which of its files are installed, compiled or neither."""

    name: str
    parts: Parts

    @property
    def package(self) -> str:
        """The distribution that it changes."""
        return self.parts.project.package


def read_patch(
    name: str,
    data: bytes,
    *,
    repository: str = "",
    package: str = "",
    exclude: Sequence[str] = (),
) -> Patch:
    """Parse a patch file.

    Args:
        name: its name in messages.
        data: the unified diff, with or without a mail header.
        repository: the ``OWNER/REPO`` of its paths; by default the paths decide.
        package: the distribution of an unknown repository; by default the paths decide.
        exclude: ``fnmatch`` patterns of paths to leave out.

    Raises:
        UsageError: it is not a diff, changes one file twice, changes several packages, or changes
            an installed file in a way that a text diff cannot express.
    """
    try:
        sections = read_sections(_as_git(data))
    except UsageError as error:
        raise UsageError(
            f"{name}: {error}",
            hint="one patch per file: git format-patch writes a folder of them, "
            "and --from-series reads it",
        ) from None
    sections = [_installed(section) for section in sections]
    stripped = _stripped(name, sections, repository, package)
    if stripped is None:
        paths = ", ".join(section.path for section in sections[:3])
        raise UsageError(
            f"{name}: cannot tell which package has these files: {paths}",
            hint="give --project OWNER/REPO or --package DISTRIBUTION",
        )
    project, sections = stripped
    return Patch(name=name, parts=take_apart(name, sections, project, exclude=exclude))


def _as_git(data: bytes) -> bytes:
    """The diff with a ``diff --git`` line for each file."""
    if re.search(rb"^diff --git ", data, re.MULTILINE):
        return data
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    out: list[bytes] = []
    at = 0
    while at < len(lines):
        three = [line[:4] for line in lines[at : at + 3]]
        if three == [b"--- ", b"+++ ", b"@@ -"]:
            out += _git_header(lines[at][4:], lines[at + 1][4:])
            at += 2
            continue
        out += lines[at : at + 1] if out else []
        at += 1
    if not out:
        raise UsageError("it is not a unified diff")
    return b"\n".join(out)


def _git_header(old: bytes, new: bytes) -> list[bytes]:
    before, after = (side.split(b"\t")[0].strip() for side in (old, new))
    path = _plain(before if after == b"/dev/null" else after)
    lines = [b"diff --git a/%s b/%s" % (path, path)]
    if before == b"/dev/null":
        lines += [b"new file mode 100644", b"--- /dev/null"]
    else:
        lines.append(b"--- a/" + path)
    if after == b"/dev/null":
        lines.insert(1, b"deleted file mode 100644")
    return [*lines, b"+++ /dev/null" if after == b"/dev/null" else b"+++ b/" + path]


def _plain(path: bytes) -> bytes:
    """A path without ``a/`` or ``b/``, and below site-packages if it is in one."""
    text = re.sub(rb"^[ab]/", b"", path)
    return re.sub(rb"^.*?(?:site|dist)-packages/", b"", text).lstrip(b"/")


def _installed(section: Section) -> Section:
    old, new = (_INSTALLED.sub("", path) if path else path for path in (section.old, section.new))
    return section.moved(old, new)


def _stripped(
    name: str, sections: Sequence[Section], repository: str, package: str
) -> tuple[Project, list[Section]] | None:
    """The project that matches the paths, and the sections with its paths."""
    for level in range(_STRIPPED + 1):
        moved = [s.moved(_strip(s.old, level), _strip(s.new, level)) for s in sections]
        paths = [section.path for section in moved]
        if repository:
            project = project_of(repository, paths)
            if project and any(
                project.compiled(path) or any(layout.target(path) for layout in project.layouts)
                for path in paths
            ):
                return project, moved
            continue
        owners = [p for p in described_projects() if any(map(p.owns, paths))]
        if len(owners) > 1:
            names = " and ".join(project.package for project in owners)
            raise UsageError(
                f"{name} changes {names}", hint="split it: a layer changes one package"
            )
        if owners:
            return owners[0], moved
    if package:
        module = sections[0].path.partition("/")[0]
        roots = ((f"{module}/", f"{module}/"),)
        layouts = (Layout(when={}, roots=roots),)
        return Project(
            repository="", package=normalize(package), layouts=layouts, described=False
        ), list(sections)
    return None


def _strip(path: str | None, level: int) -> str | None:
    """``patch -p``: the path without its first ``level`` folders, if it has so many."""
    if path is None or not level:
        return path
    parts = path.split("/", level)
    return parts[-1] if len(parts) > level else path


def patch_ops(patch: Patch) -> list[tuple[OpKeys, bytes]]:
    """The ops of a patch, and the text of each op's file."""
    ops: list[tuple[OpKeys, bytes]] = []
    stem = PurePosixPath(patch.name).stem
    several = sum(1 for _, sections in patch.parts.installed if sections) > 1
    for number, (layout, sections) in enumerate(patch.parts.installed, 1):
        if not sections:
            continue
        file = f"{stem}-{number}.patch" if several else f"{stem}.patch"
        op: OpKeys = {"op": "diff", "file": file}
        if layout.when:
            op["if"] = dict(layout.when)
        ops.append((op, b"".join(section.render() for section in sections)))
    if patch.parts.compiled:
        file = f"{stem}-compiled.patch"
        op = {"op": "compile", "source": "vllm", "file": file, "arch": "12.1a"}
        ops.append((op, b"".join(s.render() for s in patch.parts.compiled)))
    return ops


# --------------------------------------------------------------------------------------------- mods


#: Bytes of a file of a mod, of all of them, and of its zip; patches and Python files are far
#: smaller.  Larger files are left out, because no op holds one.
_LARGEST, _MOST_BYTES = 16 << 20, 64 << 20
#: Files of a mod, and bytes of its script; real ones have some kilobytes.
_MOST_FILES, _MOST_SCRIPT = 2000, 256 << 10
#: A file of a zip of more than this many bytes must not shrink to less than a hundredth.
_LARGE, _MOST_RATIO = 1 << 20, 100
#: How a file begins in the list of a zip.
_LISTED = b"PK\1\2"


def mod_files(path: Path) -> dict[str, bytes]:
    """The files of a mod, by their path in it; large ones, which no op holds, are left out.

    Raises:
        UsageError: it is neither a folder nor a zip file with ``run.sh``, a link in it leads out
            of it, or it is damaged, encrypted or too large.
    """
    files = _in_folder(path) if path.is_dir() else _in_zip(path)
    if "run.sh" not in files:
        raise UsageError(f"{path} is not a mod: it has no run.sh")
    if len(files["run.sh"]) > _MOST_SCRIPT:
        raise UsageError(f"{path}: run.sh has more than {_MOST_SCRIPT >> 10} KiB")
    return files


def _in_folder(folder: Path) -> dict[str, bytes]:
    """The files of a folder; a link out of it would copy the user's own files into the layer."""
    top = os.path.realpath(folder)
    files: dict[str, bytes] = {}
    total = 0
    for number, file in enumerate(sorted(folder.rglob("*"))):
        name = file.relative_to(folder).as_posix()
        real = os.path.realpath(file)
        if os.path.commonpath([top, real]) != top:
            raise UsageError(
                f"{file} is a link out of the mod, to {real}", hint="remove it, or copy the file"
            )
        if number >= _MOST_FILES:
            raise UsageError(f"{folder} is not a mod: it has more than {_MOST_FILES} files")
        try:
            info = file.stat()
            if not stat.S_ISREG(info.st_mode) or info.st_size > _LARGEST:
                continue
            files[name] = read_regular(real, _LARGEST, links=False)
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from None
        total = _counted(folder, total + len(files[name]))
    return files


def _counted(path: Path, total: int) -> int:
    if total > _MOST_BYTES:
        raise UsageError(
            f"{path} has more than {_MOST_BYTES >> 20} MiB, so it is not read as a mod"
        )
    return total


def _in_zip(path: Path) -> dict[str, bytes]:
    many = UsageError(f"{path} is not a mod: it has more than {_MOST_FILES} files")
    try:
        data = read_regular(path, _MOST_BYTES)
        if data.count(_LISTED) > 2 * _MOST_FILES:  # a file may be another zip
            raise many
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [info for info in archive.infolist() if not info.filename.endswith("/")]
            if len(members) > _MOST_FILES:
                raise many
            members = [info for info in members if info.file_size <= _LARGEST]
            _counted(path, sum(info.file_size for info in members))
            return {info.filename: _member(archive, info, path) for info in members}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (*DAMAGED, NotImplementedError) as error:
        raise UsageError(
            f"{path} is not a mod: neither a folder nor a whole zip: {error}"
        ) from None


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> bytes:
    """A file of a mod's zip."""
    name = info.filename
    if problem := path_problem(name):
        raise UsageError(f"{path}: the path {name!r:.100} {problem}")
    if info.flag_bits & 1:
        raise UsageError(f"{path}: {name} is encrypted", hint="unpack it, and name the folder")
    if info.file_size > max(_LARGE, info.compress_size * _MOST_RATIO):
        raise UsageError(
            f"{path}: {name} has {info.file_size} bytes, packed to {info.compress_size}, which is "
            "no file of a mod"
        )
    try:
        return archive.read(info)
    except (*DAMAGED, NotImplementedError, OSError) as error:
        raise UsageError(f"{path}: {name} is damaged: {error or type(error).__name__}") from None


# ------------------------------------------------------------------------------------ layer folders


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to map the paths of a patch; empty means from the paths themselves."""

    #: ``OWNER/REPO`` that the paths belong to
    repository: str = ""
    #: the distribution that changes
    package: str = ""
    #: ``fnmatch`` patterns of paths to leave out
    exclude: tuple[str, ...] = ()

    def patch(self, file: Path) -> Patch:
        """One patch file.

        Raises:
            UsageError: it cannot be read, or is not a diff of one package.
        """
        return read_patch(
            file.name,
            _read(file),
            repository=self.repository,
            package=self.package,
            exclude=self.exclude,
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source of new layers: a pull request, patch files, a series' folder, or a mod.

    Raises:
        UsageError: several sources are given.
    """

    pull: str = ""
    patches: tuple[Path, ...] = ()
    series: Path | None = None
    mod: Path | None = None

    def __post_init__(self) -> None:
        options = {
            "--from-pr": self.pull,
            "--from-patch": self.patches,
            "--from-series": self.series,
            "--from-mod": self.mod,
        }
        given = [option for option, value in options.items() if value]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} cannot be combined", hint="use one of them")

    @property
    def converts(self) -> bool:
        """Whether there are patch files to convert."""
        return bool(self.patches or self.series)

    def drafts(self, name: str, reading: Reading) -> list[Draft]:
        """The layers, in the order in which they apply.

        Raises:
            UsageError: it cannot be read or converted.
        """
        if self.series is not None:
            return from_series(name, self.series, reading)
        return [from_patches(name, self.patches, reading)]


def from_patches(name: str, files: Sequence[Path], reading: Reading) -> Draft:
    """One layer with the changes of patch files, in their order.

    Raises:
        UsageError: a file is not a diff, the files change several packages, or none of them
            changes an installed package.
    """
    patches = [reading.patch(file) for file in files]
    packages = sorted({patch.package for patch in patches})
    if len(packages) > 1:
        raise UsageError(
            f"the patches change {' and '.join(packages)}, but a layer changes one package",
            hint="create one layer for each package",
        )
    ops, contents = [], {}
    for patch in patches:
        for op, text in patch_ops(patch):
            if str(op["file"]) in contents:
                raise UsageError(f"two patches are called {op['file']}", hint="rename one")
            contents[str(op["file"])] = text
            ops.append(DraftOp(keys=op))
    return _checked(
        Draft(
            name=name,
            package=packages[0],
            summary=_subject(files[0]) or ", ".join(file.name for file in files),
            origin=f"vendor, {', '.join(file.name for file in files)}",
            ops=tuple(ops),
            files=contents,
            dropped=tuple(f"{path} ({why})" for p in patches for path, why in p.parts.dropped),
        ),
        ", ".join(file.name for file in files),
    )


def from_series(name: str, folder: Path, reading: Reading) -> list[Draft]:
    """A layer for each patch of a quilt series, each after the one before it.

    Raises:
        UsageError: ``folder`` has no ``series`` file, or a patch of it cannot be read.
    """
    file = folder / "series"
    lines = _read(file).decode("utf-8", "replace").splitlines()
    names = [line.split("#")[0].split()[0] for line in lines if line.split("#")[0].strip()]
    if not names:
        raise UsageError(f"{file} lists no patch")
    drafts: list[Draft] = []
    for one in names:
        inside = os.path.realpath(folder / one).startswith(f"{os.path.realpath(folder)}{os.sep}")
        if path_problem(one) or not inside:
            raise UsageError(f"{file}: {one!r:.100} is no patch of this folder")
        stem = re.sub(r"[^a-z0-9.]+", "-", PurePosixPath(one).stem.lower()).strip("-.")
        draft = from_patches(f"{name}-{stem}", [folder / one], reading)
        after = (drafts[-1].name,) if drafts else ()
        drafts.append(replace(draft, after=after, series=name))
    return drafts


def write_drafts(drafts: Sequence[Draft], directory: Path, today: datetime.date) -> list[Path]:
    """Write each draft as a folder below ``directory`` and load it, as ``layers check`` does.

    All folders are written, or none.

    Raises:
        UsageError: a folder exists, or a layer would not be valid.
    """
    folders = [directory / draft.name for draft in drafts]
    for folder in folders:
        if folder.exists():
            raise UsageError(f"{folder} already exists", hint="--in DIR")
    try:
        for folder, draft in zip(folders, drafts, strict=True):
            folder.mkdir(parents=True)
            for name, content in draft.files.items():
                write_atomically(folder / name, content)
            write_atomically(folder / "layer.toml", layer_text(draft, today).encode())
            load_layer(folder)
    except BaseException:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return folders


def _checked(draft: Draft, subject: str) -> Draft:
    if not draft.ops:
        dropped = ", ".join(draft.dropped) or "nothing"
        raise UsageError(f"{subject} changes no file of an installed package: {dropped}")
    return draft


def _subject(file: Path) -> str:
    """The subject of a mail, as ``git format-patch`` writes it."""
    head = _read(file)[:4096].decode("utf-8", "replace")
    match = re.search(r"^Subject: (?:\[PATCH[^\]]*\] )?(.+)$", head, re.MULTILINE)
    return match[1].strip() if match else ""


def _read(file: Path) -> bytes:
    try:
        return read_regular(file, MAX_DIFF)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
