"""Makes a layer of a mod: runs it isolated on a release's files, and takes what it changed.

Shell, sed, patch, ``git apply`` and Python are all one: only the files before and after count.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.applier.receipts import record_of
from builder.applier.values import ApplyError
from builder.common.console import console
from builder.common.diffs import MAX_DIFF
from builder.common.pypi import PackageIndex, vllm_releases
from builder.common.reference import Ref
from builder.errors import SparkBuildError, UsageError
from builder.images.bases.imagetree import preload
from builder.layers.catalog import Selection
from builder.layers.conversion import Draft, DraftOp, mod_files
from builder.layers.edited import EditedFile, EditOps, ops_of_edit
from builder.pipeline.bases import identify_base
from builder.proof.modrun import METADATA, SITE, run_mod

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.applier.trees import Tree
    from builder.proof.modrun import ModRun

#: Files that a mod may read or edit; compiled ones are laid out only if the mod names them.
_TEXTS = (".py", ".pyi", ".json", ".toml", ".jinja", ".txt", ".md", ".cfg")
#: What patch and sed leave beside a file, with the old text or with what did not apply.
_LEFT_BESIDE = (".orig", ".rej", ".bak", "~")
#: Lines of output, and files, that a message names.
_SHOWN, _NAMED = 6, 20
#: What has no op: the most that a layer lists.
_MOST_LEFT = 50
_NO_NETWORK = re.compile(
    r".*(?:Could not resolve|name resolution|Network is unreachable|Name or service not known).*"
)
#: What a program says where an isolated run ends, and what that is.
_READ_ONLY = "Read-only file system"
_ENDS = {
    r"No space left on device|File too large|File size limit exceeded": "more space",
    r"Cannot allocate memory|MemoryError": "more memory",
    r"Resource temporarily unavailable": "more processes",
    _READ_ONLY: "other folders to write to",
}
_OUT = "take that out of run.sh"
_MISSING = re.compile(
    r"(?:^|: )([\w.+-]+): (?:command )?not found|env: .?([\w.+-]+?).?: No such file"
)
_NO_MODULE = re.compile(
    r"^(?:ModuleNotFoundError: No module named '([\w.]+)'|(?:Import|Attribute)Error: )",
    re.MULTILINE,
)
_PULL = re.compile(
    r"github(?:usercontent)?\.com/(?:raw/|repos/)?([\w.-]+/[\w.-]+)/"
    r"(?:pulls?/(\d+)|commits?/([0-9a-f]{7,40}))"
)
#: ``git fetch origin pull/N/head``, and the repository that is cloned.
_FETCHED = re.compile(r"\bpull/(\d+)/")
_CLONED = re.compile(r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?(?=[\s\"']|$)")
_REVERSED = re.compile(r"\s(?:-R|--reverse)\b")
#: The folder of a package in a path of a mod, and in a patch; and folders that hold no package.
_EDITED = re.compile(
    r"-packages/(\w+)/|^--- (?!/dev/null).*\n\+\+\+ [ab]/((?!usr/)\w+/[\w./-]+)", re.MULTILINE
)
_BESIDE = ("tests", "docs", "csrc", "benchmarks", "examples", "requirements", "tools")


class ModRefused(SparkBuildError):
    """A mod that runs on no release: it needs or takes what an isolated run does not have."""


class ModFailed(SparkBuildError):
    """A mod that fails on this release, or changes nothing."""


def mod_draft(name: str, path: Path, base: str, package: str = "") -> Draft:
    """The layer of a mod, made on a base; empty: on the newest release of vLLM.

    Raises:
        UsageError: it is not a mod, or the base does not exist.
        ModRefused: it needs the network or a program that is not here, or takes too much.
        ModFailed: it fails on this base, or changes no file of an installed package.
        SandboxUnavailable: it cannot be run isolated on this machine.
    """
    files = mod_files(path)
    index = PackageIndex()
    ref = Ref(base or f"pypi:vllm=={vllm_releases(index)[-1]}")
    with closing(identify_base(ref, Selection((), ()), index, platform=None)) as subject:
        identity = subject.identity
        site = SITE if identity.is_installed else identity.site_packages
        return draft_on(name, path, files, subject.tree, str(ref), package, site)


def draft_on_newest(name: str, path: Path, subjects: Iterable[tuple[str, Tree]]) -> Draft:
    """The layer of a mod, made on the first of these releases on which it runs.

    Raises:
        UsageError: it is not a mod.
        ModRefused: it needs the network or a program that is not here, or takes too much.
        ModFailed: it fails on each of them, or changes nothing; the first reason.
        SandboxUnavailable: it cannot be run isolated on this machine.
    """
    files = mod_files(path)
    first: ModFailed | None = None
    tried = 0
    for base, tree in subjects:
        tried += 1
        try:
            return draft_on(name, path, files, tree, base)
        except ModFailed as error:
            console.detail(str(error))
            first = first or error
    if first is None:
        raise UsageError(f"no release to run {path} on", hint="--releases VERSION")
    more = f"\n  and on none of the other {tried - 1} releases" if tried > 1 else ""
    raise ModFailed(
        f"{first}{more}", hint="name a release that it was written for: --releases VERSION"
    )


def draft_on(
    name: str,
    path: Path,
    files: Mapping[str, bytes],
    tree: Tree,
    base: str,
    package: str = "",
    site: str = SITE,
) -> Draft:
    """The layer of a mod with these files, made on a tree that lies at a path.

    Raises:
        ModRefused: it needs the network or a program that is not here, or takes too much.
        ModFailed: it fails on this base, or changes no file of an installed package.
        SandboxUnavailable: it cannot be run isolated on this machine.
    """
    owners = _Owners.of(tree)
    laid = owners.to_lay_out(files)
    is_folder = path.is_dir()
    preload(tree, laid)
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
        for top, contents in (("mod", files), ("tree", {p: tree.read(p) or b"" for p in laid})):
            for relative, data in contents.items():
                target = Path(folder, top, relative)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
                if top == "mod":  # a zip says nothing of what may be executed
                    target.chmod((path / relative).stat().st_mode & 0o777 if is_folder else 0o755)
        own = path.stem if path.suffix == ".zip" else path.resolve().name
        run = run_mod(own, Path(folder, "mod"), Path(folder, "tree"), site)
    asked = _Asked(name=name, path=path, files=files, base=base, owners=owners)
    asked.check(run)
    every = run.changes()
    own_files = [p for p in every if METADATA.match(p)]
    beside = {p for p in every if p.endswith(_LEFT_BESIDE)}
    changes = {p: every[p] for p in every.keys() - beside - set(own_files)}
    made, left = _ops(changes, tree, re.sub(r"[^\w.-]+", "-", own))
    left += [f"{file} (a hunk that did not apply)" for file in every if file.endswith(".rej")]
    left += [f"{file} (metadata, which no layer changes)" for file in own_files]
    left += [f"{file} (a link, or no file)" for file in run.links]
    left += [f"{file} (too large for a layer)" for file in run.large]
    left += [f"{file} (not in site-packages)" for file in run.outside]
    left += [f"{line} (not written)" for line in run.tail if _READ_ONLY in line]
    left += asked.absent()
    if len(left) > _MOST_LEFT:
        left = [*left[:_MOST_LEFT], f"and {len(left) - _MOST_LEFT} more"]
    if not made.ops:
        raise asked.failed(
            f"ends well on {base} and changes no file of an installed package", run, left
        )
    return Draft(
        name=name,
        package=package or owners.package(changes),
        summary=f"what the mod {path.name} does",
        origin=f"vendor, mod {path.name}, run on {base}",
        ops=made.ops,
        files=made.files,
        unconverted=tuple(map(_printable, left)),
    )


@dataclass(frozen=True, kw_only=True)
class _Owners:
    """The distribution of each file, and of each top folder, that a RECORD names."""

    files: Mapping[str, str]
    tops: Mapping[str, str]

    @classmethod
    def of(cls, tree: Tree) -> _Owners:
        files: dict[str, str] = {}
        tops: dict[str, str] = {}
        for name, dist in tree.distributions().items():
            with suppress(ApplyError, ValueError):
                for row in record_of(tree, dist):
                    if not row.path.startswith(("..", "/")):
                        files[row.path] = name
                        tops.setdefault(row.path.partition("/")[0], name)
        return cls(files=files, tops=tops)

    def package(self, paths: Iterable[str]) -> str:
        """The distribution of most of these files; one of vLLM's own loads any other."""
        of = (self.files.get(p) or self.tops.get(p.partition("/")[0], "vllm") for p in paths)
        return Counter(of).most_common(1)[0][0]

    def lacks(self, module: str) -> bool:
        """Whether the package of a module is installed, without this module."""
        path = module.replace(".", "/")
        inside = (f"{path}.", f"{path}/")
        return path.partition("/")[0] in self.tops and not any(
            file.startswith(inside) for file in self.files
        )

    def to_lay_out(self, files: Mapping[str, bytes]) -> list[str]:
        """The texts of the distributions that a mod names, else of all, and other files by name."""
        texts = b"\n".join(files.values()).decode("utf-8", "replace")
        words = set(re.findall(r"[\w.+-]+", texts)) | set(re.findall(r"\w+", texts))
        named = {name for top, name in self.tops.items() if top in words or name in words}
        named = named or set(self.files.values())
        return [
            path
            for path, name in sorted(self.files.items())
            if METADATA.match(path)
            or (name in named and (path.endswith(_TEXTS) or path.rpartition("/")[2] in words))
        ]


# -------------------------------------------------------------------------------------- the result


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A mod that was run on a base."""

    name: str
    path: Path
    files: Mapping[str, bytes]
    base: str
    owners: _Owners

    def check(self, run: ModRun) -> None:
        """Raise if the mod did not do here what it does in a container."""
        said = "\n".join(run.tail)
        offline = _NO_NETWORK.findall(said)
        if run.needed or offline:
            raise self._offline([*run.needed, *offline])
        if run.over:
            raise self._refused(f"was ended: {run.over}", run, _OUT)
        for text, what in _ENDS.items():
            if re.search(text, said) and (run.status or text != _READ_ONLY):
                raise self._refused(f"needs {what} than an isolated run has", run, _OUT)
        if not run.status:
            return
        if match := _MISSING.search(said):
            program = match[1] or match[2]
            what = f"needs the program {program}, which is not in /usr/bin of this machine"
            raise self._refused(what, run, f"install {program} there")
        if match := _NO_MODULE.search(said):
            module = match[1] or next(iter(run.lacked[-1:]), "")
            if module and not self.owners.lacks(module):
                what = f"needs the module {module}, which an isolated run does not execute"
                raise self._refused(what, run, "edit files as text in run.sh")
        raise self.failed(f"fails on {self.base}: run.sh ended with exit status {run.status}", run)

    def failed(self, what: str, run: ModRun, more: Sequence[str] = ()) -> ModFailed:
        """What it did on the base, and what may be the reason."""
        absent = self.absent()
        lines = dict.fromkeys((*more, *absent))
        for name in run.lacked:
            lines[f"it asked for {name}, which an isolated run does not execute"] = None
        hint = "name the release that it was written for: --base pypi:vllm==VERSION"
        if absent:
            hint = "name an image or an environment that has it: --base docker://IMAGE"
        return ModFailed(f"{self.path} {what}{_listed([*lines, *_tail(run)])}", hint=hint)

    def absent(self) -> list[str]:
        """Packages that it edits and that the base does not have."""
        texts = b"\n".join(self.files.values()).decode("utf-8", "replace")
        edited = _EDITED.findall(texts)
        tops = {top for top, _ in edited if top}
        for patched in {path for _, path in edited if path}:  # it may be below a package's folder
            if not any(file.endswith(f"/{patched}") for file in self.owners.files):
                tops.add(patched.partition("/")[0])
        known = {*self.owners.tops, *_BESIDE}
        return [f"{top} (a package that {self.base} does not have)" for top in sorted(tops - known)]

    def _refused(self, what: str, run: ModRun, hint: str) -> ModRefused:
        hint = f"{hint}, and run the same command again"
        return ModRefused(f"{self.path} {what}{_listed(_tail(run))}", hint=hint)

    def _offline(self, needs: Sequence[str]) -> ModRefused:
        hint = f"put what it downloads into {self.path}, and have run.sh read it there"
        if pull := self._pull(needs):
            hint = f"spark-build layers new {self.name} --from-pr {pull}"
        elif any(re.match(r"pip|uv|conda|apt", line) for line in needs):
            hint = "take the line out of run.sh, and write an op wheel (docs/layers.md)"
        return ModRefused(
            f"{self.path} needs the network or an installer, which an isolated run does not have"
            + _listed(needs[: _NAMED // 2]),
            hint=hint,
        )

    def _pull(self, needs: Sequence[str]) -> str:
        """The pull request or commit that it downloads to apply it, or ""."""
        scripts = [data for name, data in self.files.items() if name.endswith((".sh", ".py"))]
        own = [
            line
            for line in b"\n".join(scripts).decode("utf-8", "replace").splitlines()
            if not line.lstrip().startswith("#")
        ]
        for match in filter(None, map(_PULL.search, [*needs, *own])):
            which = match[2] or match[3]
            if not any(which in line and _REVERSED.search(line) for line in own):
                return f"{match[1]}{'#' if match[2] else '@'}{which}"
        text = "\n".join([*needs, *own])
        number, repository = _FETCHED.search(text), _CLONED.search(text)
        return f"{repository[1]}#{number[1]}" if number and repository else ""


def _tail(run: ModRun) -> list[str]:
    return [line[:200] for line in run.tail if line.strip()][-_SHOWN:]


def _listed(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else []
    return "".join(f"\n  {_printable(line)}" for line in (*lines[:_NAMED], *more))


def _printable(text: str) -> str:
    """Text of a mod as one line: a name of a file may have any character."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _ops(changes: Mapping[str, bytes | None], tree: Tree, stem: str) -> tuple[EditOps, list[str]]:
    """The ops that make these changes, and what has none."""
    ops: list[DraftOp] = []
    files: dict[str, bytes] = {}
    left: list[str] = []
    for number, (path, after) in enumerate(sorted(changes.items())):
        before = tree.read(path)
        if after is not None and before is not None and not _is_text(before, after):
            left.append(f"{path} (a binary file)")
            continue
        if before is None and after is not None:
            name = f"{number}-{path.rpartition('/')[2]}"
            ops.append(DraftOp(keys={"op": "copy", "from": name, "to": path}))
            files[name] = after
            continue
        try:
            made = _edit(path, before, after, f"{stem}-{number}")
        except (UsageError, UnicodeDecodeError) as error:
            left.append(f"{path} ({error})")
            continue
        ops += made.ops
        files |= made.files
    return EditOps(ops=tuple(ops), files=files), left


def _edit(path: str, before: bytes | None, after: bytes | None, stem: str) -> EditOps:
    texts = [None if data is None else data.decode() for data in (before, after)]
    edit = EditedFile(path=path, before=texts[0], after=texts[1])
    return ops_of_edit([edit], stem, _no_donors, "vllm")


def _no_donors(_path: str) -> Iterable[tuple[str, str]]:
    return ()


def _is_text(*sides: bytes) -> bool:
    try:
        return all(len(side) <= MAX_DIFF and side.decode() is not None for side in sides)
    except UnicodeDecodeError:
        return False
