"""Reads a patch file, as git or as ``diff -u`` writes it, and finds the package that it changes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from builder.applier.versions import normalize
from builder.errors import UsageError
from builder.forge.normalize import Section, read_sections
from builder.pulls.parts import take_apart
from builder.pulls.projects import Layout, Project, described_projects, project_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.pulls.parts import Parts

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
        found = [p for p in described_projects() if any(map(p.owns, paths))]
        if len(found) > 1:
            names = " and ".join(project.package for project in found)
            raise UsageError(
                f"{name} changes {names}", hint="split it: a layer changes one package"
            )
        if found:
            return found[0], moved
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
