"""Makes layer folders out of patch files, a patch series or a mod."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from builder.conversion.draft import Draft, DraftOp, layer_text
from builder.conversion.mod import mod_files, read_mod
from builder.conversion.patchfile import patch_ops, read_patch
from builder.errors import UsageError
from builder.layers.layerfile import load_layer
from builder.pypi.index import write_atomically

if TYPE_CHECKING:
    import datetime
    from collections.abc import Sequence
    from pathlib import Path

    from builder.conversion.patchfile import Patch


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
        """Whether there are files to convert."""
        return bool(self.patches or self.series or self.mod)

    def drafts(self, name: str, reading: Reading) -> list[Draft]:
        """The layers, in the order in which they apply.

        Raises:
            UsageError: it cannot be read or converted.
        """
        if self.series is not None:
            return from_series(name, self.series, reading)
        if self.mod is not None:
            return [from_mod(name, self.mod, reading)]
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
        stem = re.sub(r"[^a-z0-9.]+", "-", PurePosixPath(one).stem.lower()).strip("-.")
        draft = from_patches(f"{name}-{stem}", [folder / one], reading)
        after = (drafts[-1].name,) if drafts else ()
        drafts.append(replace(draft, after=after, series=name))
    return drafts


def from_mod(name: str, path: Path, reading: Reading) -> Draft:
    """A layer with the changes of a mod's ``run.sh`` to installed packages, as far as readable.

    Raises:
        UsageError: it is not a mod, or nothing can be converted.
    """
    found = read_mod(path.stem if path.suffix == ".zip" else path.name, mod_files(path))
    tops = [str(op.keys.get("file") or op.keys.get("to") or "") for op in found.ops]
    if not found.ops:
        raise UsageError(
            f"nothing in {path} can be converted; start from an example instead:\n  "
            + "\n  ".join(found.unconverted),
            hint="spark-build layers new NAME",
        )
    guess = "vllm" if not any(t.startswith("flashinfer/") for t in tops) else "flashinfer-python"
    return Draft(
        name=name,
        package=reading.package or (found.packages or [guess])[0],
        summary=f"what the mod {path.name} does",
        origin=f"vendor, mod {path.name}",
        ops=tuple(found.ops),
        files=found.files,
        dropped=tuple(found.dropped),
        unconverted=tuple(found.unconverted),
    )


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
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
