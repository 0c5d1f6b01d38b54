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
from builder.proof.modrun import METADATA, run_mod

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
_NO_NETWORK = re.compile(
    r"Could not resolve|name resolution|Network is unreachable|Name or service not known"
)
_MISSING = re.compile(
    r"(?:^|: )([\w.+-]+): (?:command )?not found|env: .?([\w.+-]+?).?: No such file"
)
_NO_MODULE = re.compile(r"^ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)
_PULL = re.compile(
    r"[/.]github(?:usercontent)?\.com/(?:raw/)?([\w.-]+/[\w.-]+)/pull/(\d+)\.(?:diff|patch)"
)


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
        return draft_on(name, path, files, subject.tree, str(ref), package)


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
    more = f"\n  and on none of {tried - 1} older releases" if tried > 1 else ""
    raise ModFailed(f"{first}{more}", hint=first.hint)


def draft_on(
    name: str, path: Path, files: Mapping[str, bytes], tree: Tree, base: str, package: str = ""
) -> Draft:
    """The layer of a mod with these files, made on a tree.

    Raises:
        ModRefused: it needs the network or a program that is not here, or takes too much.
        ModFailed: it fails on this base, or changes no file of an installed package.
        SandboxUnavailable: it cannot be run isolated on this machine.
    """
    owners = _Owners.of(tree)
    laid = owners.to_lay_out(files)
    preload(tree, laid)
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
        for top, contents in (("mod", files), ("tree", {p: tree.read(p) or b"" for p in laid})):
            for relative, data in contents.items():
                target = Path(folder, top, relative)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
        own = path.stem if path.suffix == ".zip" else path.resolve().name
        run = run_mod(own, Path(folder, "mod"), Path(folder, "tree"))
    _check(run, path, base)
    every = run.changes()
    changes = {p: data for p, data in every.items() if not p.endswith(_LEFT_BESIDE)}
    made, left = _ops(changes, tree, re.sub(r"[^\w.-]+", "-", own))
    left += [f"{file} (a hunk that did not apply)" for file in every if file.endswith(".rej")]
    left += [f"{file} (a link)" for file in run.links]
    left += [f"{file} (too large for a layer)" for file in run.large]
    left += [f"{file} (not in site-packages)" for file in run.outside]
    if not made.ops:
        raise ModFailed(
            f"{path} ends well on {base} and changes no file of an installed package"
            + _listed([*left, *_tail(run)]),
            hint="name the release that it was written for: --base pypi:vllm==VERSION",
        )
    return Draft(
        name=name,
        package=package or owners.package(changes),
        summary=f"what the mod {path.name} does",
        origin=f"vendor, mod {path.name}, run on {base}",
        ops=made.ops,
        files=made.files,
        unconverted=tuple(left),
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


def _check(run: ModRun, path: Path, base: str) -> None:
    """Raise if the mod did not do here what it does in a container."""
    said = "\n".join(run.tail)
    pulls = [match for line in run.needed if (match := _PULL.search(line))]
    if run.needed or _NO_NETWORK.search(said):
        hint = "put what it downloads into its folder, and run the same command again"
        if pulls:
            hint = f"spark-build layers new NAME --from-pr {pulls[0][1]}#{pulls[0][2]}"
        elif any(re.match(r"pip|uv|conda|apt", line) for line in run.needed):
            hint = "take the line out of run.sh, and write an op wheel (docs/layers.md)"
        needs = run.needed[: _NAMED // 2] or tuple(_tail(run)[-1:])
        raise ModRefused(
            f"{path} needs the network, which an isolated run does not have{_listed(needs)}",
            hint=hint,
        )
    if run.over:
        raise ModRefused(
            f"{path} was ended: {run.over}{_listed(_tail(run))}", hint=f"shorten {path}/run.sh"
        )
    if not run.status:
        return
    if match := _MISSING.search(said):
        program = match[1] or match[2]
        raise ModRefused(
            f"{path} needs the program {program}, which is not on this machine"
            + _listed(_tail(run)),
            hint=f"install {program}, and run the same command again",
        )
    if match := _NO_MODULE.search(said):
        raise ModRefused(
            f"{path} needs the module {match[1]}, which an isolated run does not have"
            + _listed(_tail(run)),
            hint="edit the files as text in run.sh, without importing the package",
        )
    raise ModFailed(
        f"{path} fails on {base}: run.sh ended with exit status {run.status}{_listed(_tail(run))}",
        hint="name the release that it was written for: --base pypi:vllm==VERSION",
    )


def _tail(run: ModRun) -> list[str]:
    return [line[:200] for line in run.tail if line.strip()][-_SHOWN:]


def _listed(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else []
    return "".join(f"\n  {line}" for line in (*lines[:_NAMED], *more))


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
