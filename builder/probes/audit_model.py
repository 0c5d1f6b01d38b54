#!/usr/bin/env python3
"""Reports how each module of a model is quantised after vLLM has loaded it.

Runs inside vLLM's process with the interpreter, with the standard library alone.  There are two
ways::

    python3 spark_build_audit.py MODEL [FLAGS of vllm serve] > audit.json
    PYTHONPATH=FOLDER vllm serve MODEL ...        # writes FOLDER/audit.json

The first loads the model and exits.  The second is a normal server: vLLM calls `register` in every
process that it starts, through the entry point group ``vllm.general_plugins``, and the worker
writes the file once its model is loaded.  An audit that fails is logged and never stops a server.
``spark-build audit audit.json`` prints the result.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Json = dict[str, Any]

SCHEMA = 1
#: The path of the audit file; by default next to this one.
FILE_VARIABLE = "SPARK_BUILD_AUDIT"
#: The worker class of every vLLM from 0.17.0 to 0.33.0 on CUDA.
WORKER = ("vllm.v1.worker.gpu_worker", "Worker")
#: The attributes in which vLLM's two model runners store the draft model.
DRAFTERS = ("drafter", "speculator")
#: The tables of vLLM's weight mapper, by kind of match.
RENAMES = ("prefix", "substr")
logger = logging.getLogger("vllm.spark_build_audit")


class AuditError(Exception):
    """The model cannot be audited."""


class Loaded(BaseException):
    """Stops vLLM after the model is loaded and audited.

    It is not an `Exception`, so that vLLM does not report a failed start.
    """


# --- the walk ------------------------------------------------------------------------------------


def audit(model: Any, draft: Any = None) -> Json:
    """All modules with tensors of their own, of a model and of its draft model."""
    owners: dict[object, str] = {}
    modules = [*_modules(model, "", owners)]
    if draft is not None:
        modules += _modules(draft, "draft.", owners)
    if not modules:
        raise AuditError(f"{type(model).__name__} has no module with tensors")
    packed = getattr(model, "packed_modules_mapping", None)
    return {
        "schema": SCHEMA,
        "architecture": type(model).__name__,
        "packed": {str(k): [str(v) for v in vs] for k, vs in dict(packed or {}).items()},
        "renamed": _renamed(getattr(model, "hf_to_vllm_mapper", None)),
        "modules": modules,
    }


def _modules(model: Any, prefix: str, owners: dict[object, str]) -> Iterator[Json]:
    named = [(prefix + name, module) for name, module in model.named_modules()]
    rows = [_registered(name, module, owners) for name, module in named]
    for (name, module), row in zip(named, rows, strict=True):
        # after the registered ones, so that each tensor belongs to its registered module
        for tensor in _attributes(module):
            _add(tensor, name, owners, row)
        if row["bytes"] or row.keys() & {"shares", "buffers"}:
            yield row


def _registered(name: str, module: Any, owners: dict[object, str]) -> Json:
    """A module with its own parameters and buffers."""
    row: Json = {"name": name, "class": type(module).__name__, "bytes": {}, **_method(module)}
    for tensor in module.parameters(recurse=False):
        _add(tensor, name, owners, row)
    buffers = [b for b in module.buffers(recurse=False) if _owner(b, name, owners) is None]
    if buffers:
        row["buffers"] = sum(map(_size, buffers))
    if experts := _experts(module):
        row["experts"] = experts
    return row


def _attributes(module: Any) -> Iterator[Any]:
    """Weights that a method stores without registering them, such as Triton's MXFP4 experts."""
    method = getattr(module, "quant_method", None)
    if method is None:
        return
    for value in (*vars(module).values(), *getattr(method, "__dict__", {}).values()):
        # a tensor of triton_kernels wraps the real one
        inner = getattr(getattr(value, "storage", None), "data", None)
        for tensor in (value, inner):
            if not isinstance(tensor, type) and hasattr(tensor, "untyped_storage"):
                yield tensor


def _add(tensor: Any, name: str, owners: dict[object, str], row: Json) -> None:
    """Count a tensor's bytes, if its memory has not been counted."""
    owner = _owner(tensor, name, owners)
    if owner is None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        row["bytes"][dtype] = row["bytes"].get(dtype, 0) + _size(tensor)
    elif owner and owner != name:
        row["shares"] = owner


def _renamed(mapper: Any) -> Json:
    """How vLLM renames the checkpoint's tensors: by prefix or by substring."""
    renames = {part: getattr(mapper, f"orig_to_new_{part}", None) or {} for part in RENAMES}
    return {
        part: {old: new for old, new in names.items() if isinstance(new, str)}
        for part, names in renames.items()
    }


def _owner(tensor: Any, name: str, owners: dict[object, str]) -> str | None:
    """The first module with the same memory; None if this is the first one."""
    place = _storage(tensor)
    if place in owners:
        return owners[place]
    owners[place] = name
    return None


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _storage(tensor: Any) -> object:
    """A key that is equal for tensors that share memory; tensors without memory share none."""
    try:
        place = tensor.untyped_storage().data_ptr()
    except (AttributeError, NotImplementedError, RuntimeError):
        return id(tensor)
    return (place, tensor.storage_offset()) if place else id(tensor)


def _method(module: Any) -> Json:
    """How vLLM computes a module: classes of its quantisation method, its scheme and its kernel."""
    method = getattr(module, "quant_method", None)
    if method is None:
        return {}
    method = getattr(method, "old_quant_method", method)  # a wrapper around experts' own
    scheme = getattr(module, "scheme", None)
    parts = {"method": method, "scheme": scheme}
    parts["kernel"] = getattr(method, "kernel", None) or getattr(scheme, "kernel", None)
    classes = {k: type(v).__name__ for k, v in parts.items() if v is not None}
    experts = getattr(method, "experts_cls", None)
    return classes | ({"kernel": experts.__name__} if isinstance(experts, type) else {})


def _experts(module: Any) -> list[int] | None:
    """The number of experts that a token uses, and of all experts on all ranks."""
    used, total = getattr(module, "top_k", None), getattr(module, "global_num_experts", None)
    if isinstance(used, int) and isinstance(total, int) and 0 < used <= total:
        return [used, total]
    return None


# --- in a worker of vLLM -------------------------------------------------------------------------


def audit_of_worker(worker: Any) -> Json:
    """The audit of a worker's model, with the release and the worker's rank."""
    runner = getattr(worker, "model_runner", None)
    drafter = next((d for name in DRAFTERS if (d := getattr(runner, name, None))), None)
    draft = getattr(drafter, "model", None)
    modules = audit(worker.get_model(), draft if hasattr(draft, "named_modules") else None)
    config = getattr(worker, "vllm_config", None)
    parallel = getattr(config, "parallel_config", None)
    return {
        **modules,
        "vllm": importlib.metadata.version("vllm"),
        "model": str(getattr(getattr(config, "model_config", None), "model", "")),
        "rank": int(getattr(worker, "rank", 0) or 0),
        "world_size": int(getattr(parallel, "world_size", 1) or 1),
    }


def place_of(audit: Json) -> Path:
    """The file for an audit; ranks other than the first have files of their own."""
    path = Path(os.environ.get(FILE_VARIABLE) or Path(__file__).with_name("audit.json"))
    rank = audit["rank"]
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def keep(audit: Json) -> None:
    """Write the file atomically."""
    path = place_of(audit)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text_of(audit), encoding="utf-8")
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    logger.info("spark-build audit of %d modules: %s", len(audit["modules"]), path)


def text_of(audit: Json) -> str:
    """One line for each module."""
    rows = ",\n".join(json.dumps(row) for row in audit["modules"])
    head = json.dumps({name: value for name, value in audit.items() if name != "modules"})
    return f'{head[:-1]}, "modules": [\n{rows}\n]}}\n'


def follow(worker: type, tell: Callable[[Any], None]) -> None:
    """Call ``tell`` with each worker of a class after it has loaded its model."""
    original = worker.load_model  # type: ignore[attr-defined]
    if getattr(original, "spark_build_audit", False):
        return

    @functools.wraps(original)
    def load_model(self: Any, *words: Any, **options: Any) -> Any:
        result = original(self, *words, **options)
        tell(self)
        return result

    load_model.spark_build_audit = True  # type: ignore[attr-defined]
    worker.load_model = load_model  # type: ignore[attr-defined]


def keep_quietly(worker: Any) -> None:
    """Write the audit of a server's worker; log the reason if that fails."""
    try:
        keep(audit_of_worker(worker))
    except Exception as error:
        logger.warning("spark-build audit: none: %s: %s", type(error).__name__, error)


def register() -> None:
    """Called by vLLM in each of its processes."""
    try:
        follow(getattr(importlib.import_module(WORKER[0]), WORKER[1]), keep_quietly)
    except Exception as error:
        logger.warning("spark-build audit: none: %s: %s", type(error).__name__, error)


# --- by itself -----------------------------------------------------------------------------------


def load(words: Sequence[str]) -> Json:
    """Load a model like ``vllm serve``, and return its audit.

    Raises:
        AuditError: vLLM is missing, or it ended before the model was loaded.
    """
    try:
        arguments = importlib.import_module("vllm.engine.arg_utils")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise AuditError(f"{sys.executable} has no vLLM: run this where vLLM runs") from None
    # In one process: the loaded model is accessible, and nothing is left running.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    known, others = arguments.EngineArgs.add_cli_args(parser()).parse_known_args(
        ["--model", *words]
    )
    if others:
        print(f"not needed to load the model: {' '.join(others)}", file=sys.stderr)
    audits: list[Json] = []

    def tell(worker: Any) -> None:
        audits.append(audit_of_worker(worker))
        raise Loaded

    follow(getattr(importlib.import_module(WORKER[0]), WORKER[1]), tell)
    engine = arguments.EngineArgs.from_cli_args(known)
    with contextlib.suppress(Loaded):
        importlib.import_module("vllm").LLM(**vars(engine))
    if not audits:
        raise AuditError(
            "vLLM did not load the model in this process: more than one GPU or node needs a "
            "server with this folder on PYTHONPATH"
        )
    return audits[0]


def claim_stdout() -> TextIO:
    """Reserve stdout for the result: vLLM's log goes to stderr instead."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return ours


def main(words: Sequence[str]) -> int:
    """Audit the model named on the command line."""
    if not words or words[0].startswith("-"):
        print("usage: spark_build_audit.py MODEL [FLAGS of vllm serve] > audit.json")
        return 0 if {"-h", "--help"} & set(words) else 2
    out = claim_stdout()
    try:
        audit = load(words)
    except AuditError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with out:
        out.write(text_of(audit))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # what vLLM left half-started must not be waited for
