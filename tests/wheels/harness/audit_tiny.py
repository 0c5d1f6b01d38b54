"""A released vLLM finds the audit as its plugin, and audits a model when its worker has loaded it.

    python audit_tiny.py RUNTIME REQUEST.json PLUGIN FOLDER...

PLUGIN is the folder that ``spark-build audit --inside`` wrote.  Prints the audit of each model.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import arguments  # type: ignore[import-not-found]
import load_tiny  # type: ignore[import-not-found]


def audit(folder: str, probe: Any) -> dict[str, Any]:
    """What the worker of a server writes of a model, all of it by vLLM's own way."""
    worker_type = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    importlib.import_module("vllm.plugins").load_general_plugins()
    made, whole = load_tiny.make(folder, probe)
    worker = object.__new__(worker_type)
    runner = types.SimpleNamespace(load_model=lambda **_: None, get_model=lambda: made)
    worker.__dict__.update(model_runner=runner, vllm_config=whole, rank=0)
    # it sets the allocator of a GPU
    worker._scoped_allocator_max_split = lambda **_: contextlib.nullcontext()
    out = Path(folder) / "audit.json"
    os.environ["SPARK_BUILD_AUDIT"] = str(out)
    worker.load_model()
    by_itself(folder, worker)
    written: dict[str, Any] = json.loads(out.read_text())
    return written


def by_itself(folder: str, worker: Any) -> None:
    """The other way, but for the GPU: the release parses the words, and its LLM gets them."""
    program = importlib.import_module("spark_build_audit")
    worker_type = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    worker_type.load_model = worker_type.load_model.__wrapped__
    engine = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    given = []

    def llm(**options: Any) -> None:
        given.append(engine(**options))
        worker.load_model()
        raise AssertionError("the model was loaded, and nothing was told")

    importlib.import_module("vllm").__dict__["LLM"] = llm
    words = [folder, "--gpu-memory-utilization", "0.5", "--reasoning-parser", "x", "--port", "1"]
    made = program.load(words)
    assert (given[0].model, given[0].gpu_memory_utilization) == (folder, 0.5)
    assert len(made["modules"]) > 9
    # the next model is a server's again
    worker_type.load_model = worker_type.load_model.__wrapped__
    program.register()


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[3])
    sys.meta_path.append(arguments.Rest())
    load_tiny.with_each(audit, sys.argv[4:])
