"""The modules of a model by quantisation method: from headers, a model's file, or vLLM itself."""

from __future__ import annotations

import shlex
import stat
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from builder.common.hints import reason
from builder.common.paths import package_file
from builder.common.pypi.index import write_atomically
from builder.errors import UsageError
from builder.serving.auditcompare import compare
from builder.serving.auditdocuments import Audit, InsideFiles, KeptLayers, LoadedModel, Method
from builder.serving.auditmodules import Module, checkpoint_modules, loaded_modules, ranges
from builder.serving.checkpoint import EXPERTS, HEAD, checkpoint_tensors, means_a_path
from builder.serving.modelconfig import Unknown, read_config
from builder.serving.models import Models
from builder.serving.weights import bytes_read, ceiling, expert_share, total, weights_of_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from builder.serving.models import Model

#: The name of the script that runs inside vLLM, and the distribution by which vLLM finds it.
SCRIPT = "spark_build_audit.py"
_INFO = "spark_build_audit-1.dist-info"
_METADATA = "Metadata-Version: 2.1\nName: spark-build-audit\nVersion: 1\n"
_ENTRY_POINTS = "[vllm.general_plugins]\nspark_build_audit = spark_build_audit:register\n"
#: The most bytes of a file: a thousand times that of a large model.
_LONGEST = 500_000_000


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """What to audit."""

    subject: str
    #: the checkpoint that a loaded model is compared with
    against: Path | None = None
    models: Sequence[Path] = ()


def audit_request(
    subject: str | None, inside: Path | None, against: Path | None, models: Sequence[Path]
) -> AuditRequest:
    """The request that the options describe.

    Raises:
        UsageError: there is nothing to audit, or ``--inside`` has another argument.
    """
    if subject is None:
        raise UsageError(
            "nothing to audit: name a checkpoint's folder, or a model of 'models list'",
            hint="spark-build audit DIR",
        )
    if inside is not None:
        raise UsageError(
            f"--inside only writes files, so {subject} would not be audited",
            hint=f"spark-build audit --inside {shlex.quote(str(inside))}",
        )
    return AuditRequest(subject=subject, against=against, models=models)


def audit(request: AuditRequest) -> Audit:
    """Audit a checkpoint, a loaded model or a known model.

    Raises:
        SparkBuildError: the checkpoint, the file or the model cannot be read.
    """
    place = Path(request.subject)
    if place.is_file():
        return _from_file(place, request.against)
    if request.against is not None:
        raise UsageError(
            f"--against compares a loaded model with a checkpoint; {request.subject} is not a file "
            f"that {SCRIPT} wrote",
            hint="spark-build audit --inside DIR",
        )
    if place.is_dir():
        return _from_folder(place)
    if means_a_path(request.subject):
        raise UsageError(
            f"{request.subject} does not exist: name a checkpoint's folder, a file that {SCRIPT} "
            "wrote, or a model",
            hint="spark-build models list",
        )
    return _from_model(Models.discover(request.models).model(request.subject, or_folder=True))


def write_inside(folder: Path) -> InsideFiles:
    """Write the script that audits a model inside vLLM, and the files by which vLLM finds it.

    Raises:
        UsageError: the folder cannot be written.
    """
    script = package_file("probes", "audit_model.py").read_text("utf-8")
    files = {
        SCRIPT: script, f"{_INFO}/METADATA": _METADATA, f"{_INFO}/entry_points.txt": _ENTRY_POINTS
    }  # fmt: skip
    written = []
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode())
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
        written.append(str(path))
    script_path = folder / SCRIPT
    script_path.chmod(script_path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return InsideFiles(written=tuple(written))


# -- three sources


def _from_folder(folder: Path) -> Audit:
    modules, share, why = _checkpoint(folder)
    return _audit(str(folder), "headers", modules, share, "by the headers", why)


def _checkpoint(folder: Path) -> tuple[list[Module], tuple[int, int] | None, list[str]]:
    """Its modules, the share of experts that a token uses, and why that is unknown."""
    tensors = checkpoint_tensors(folder)
    config = read_config(folder)
    modules = checkpoint_modules(tensors, config.text.num_hidden_layers if config else None)
    try:
        return modules, expert_share(config, {module.group for module in modules}), []
    except Unknown as why:
        return modules, None, [f"ceiling: {why}"]


def _from_file(path: Path, against: Path | None) -> Audit:
    loaded = read_loaded(path)
    modules = loaded_modules(loaded)
    unknown = []
    if any(module.group == EXPERTS and module.experts is None for module in modules):
        unknown.append(f"ceiling: {path} does not give the number of experts per token")
    compared = None
    if against is not None:
        if not against.is_dir():
            raise UsageError(f"--against {against} is not a folder", hint="--against DIR")
        stored, _share, _why = _checkpoint(against)
        compared = compare(str(against), stored, modules, loaded.packed, loaded.renamed)
    made = _audit(
        loaded.model or loaded.architecture, "vllm", modules, None, "as vLLM loaded them", unknown
    )
    return msgspec.structs.replace(
        made, vllm=loaded.vllm, rank=loaded.rank, world_size=loaded.world_size, compared=compared
    )


def read_loaded(path: Path) -> LoadedModel:
    """Read the file that `spark_build_audit.py` wrote.

    Raises:
        UsageError: it is another kind of file.
    """
    hint = "spark-build audit --inside DIR"
    other = f"{path} is not a file that {SCRIPT} wrote"
    try:
        if path.stat().st_size > _LONGEST:
            raise UsageError(f"{other}: it is too long", hint=hint)
        return msgspec.json.decode(path.read_bytes(), type=LoadedModel)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{other}: {reason(error)}", hint=hint) from None


def _from_model(model: Model) -> Audit:
    weights, made, unknown = weights_of_model(model)
    methods = tuple(
        Method(name=layers.kind, modules=None, bytes=None, read=None, source=layers.source)
        for layers in model.holds
    )
    if not methods:
        unknown.append("kinds of layers: no source lists them")
    unknown.append(
        "modules and layers in 16 bits: the model's file does not list them; a checkpoint does"
    )
    return Audit(
        model=model.name, source="model", bytes=weights.bytes if weights else None,
        at_least=weights is not None and weights.at_least, methods=methods, kept=(),
        ceiling=made, unknown=tuple(unknown),
    )  # fmt: skip


# -- sums


@dataclass(frozen=True)
class _Read:
    """A module, and the bytes of it that a token reads."""

    module: Module
    bytes: int | None


def _audit(
    name: str,
    source: Literal["headers", "vllm"],
    modules: Sequence[Module],
    share: tuple[int, int] | None,
    words: str,
    unknown: Iterable[str],
) -> Audit:
    shared = {module.shares for module in modules}
    headless = not any(module.group == HEAD and not module.shares for module in modules)
    read = [
        _Read(
            m, bytes_read(m.group, m.bytes, m.experts or share, tied=headless or m.name in shared)
        )
        for m in modules
    ]
    limit = ceiling((one.bytes for one in read), words)
    return Audit(
        model=name, source=source, bytes=sum(module.bytes for module in modules),
        buffers=sum(module.buffers for module in modules), methods=_methods(read),
        kept=_kept(read, limit.bytes_per_token if limit else 0), ceiling=limit,
        unknown=tuple(unknown),
    )  # fmt: skip


def _methods(read: Iterable[_Read]) -> tuple[Method, ...]:
    sums: dict[tuple[str, str], list[_Read]] = defaultdict(list)
    for one in read:
        if one.module.bytes or one.module.shares:
            sums[one.module.method, one.module.kernel].append(one)
    made = []
    for (name, kernel), own in sums.items():
        dtypes: dict[str, int] = defaultdict(int)
        for one in own:
            for dtype, size in one.module.dtypes.items():
                dtypes[dtype] += size
        made.append(
            Method(
                name=name, kernel=kernel, modules=len(own),
                bytes=sum(one.module.bytes for one in own), read=total(one.bytes for one in own),
                dtypes=dict(sorted(dtypes.items(), key=lambda row: -row[1])),
            )
        )  # fmt: skip
    return tuple(sorted(made, key=lambda row: (-(row.bytes or 0), row.name)))


def _kept(read: Iterable[_Read], per_token: int) -> tuple[KeptLayers, ...]:
    """Modules that are not quantised, by name; the most read first."""
    sums: dict[tuple[str, str], list[_Read]] = defaultdict(list)
    for one in read:
        if one.module.plain:
            sums[one.module.pattern, one.module.group].append(one)
    made = []
    for (name, group), own in sums.items():
        needed = total(one.bytes for one in own)
        share = None if needed is None or not per_token else round(needed / per_token, 4)
        made.append(
            KeptLayers(
                name=name, group=group, layers=ranges(one.module.layer for one in own),
                modules=len(own), bytes=sum(one.module.bytes for one in own), read=needed,
                share=share,
            )
        )  # fmt: skip
    return tuple(sorted(made, key=lambda row: (-(row.read or 0), -row.bytes, row.name)))
