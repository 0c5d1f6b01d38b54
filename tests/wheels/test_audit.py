"""The audit beside real releases: vLLM finds it as a plugin, and its worker calls it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from builder.bases.identify import identify
from builder.bases.model import BaseRequest
from builder.dispatch.record import read_records
from builder.plan.sources import preload
from builder.serving.audit import AuditRequest, audit, write_inside
from builder.util.paths import data_dir

from ..unit.inimage import load
from .sandboxed import release_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from builder.pypi.index import PackageIndex
    from builder.serving.auditdocuments import Audit

    from .support import Planner

    Audited = Callable[[str], dict[str, tuple[Path, Audit]]]

#: One release of each form of vLLM's layers; those before 0.24.0 choose kernels by variable.
RELEASES = ("0.17.1", "0.20.1", "0.24.0", "0.28.0", "0.33.0")
PLAIN = "UnquantizedLinearMethod"
#: What the audit rests on, by file, in every release.
RESTS_ON = {
    "vllm/v1/worker/worker_base.py": ("load_general_plugins()",),
    "vllm/plugins/__init__.py": ('DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"',),
    "vllm/v1/worker/gpu_worker.py": (
        "class Worker(", "    def load_model(self", "    def get_model(self)"
    ),
    "vllm/v1/worker/gpu_model_runner.py": ("    def get_model(self)", "self.drafter"),
    "vllm/v1/worker/gpu/model_runner.py": ("    def get_model(self)", "self.speculator"),
    # the model is loaded in the process of the engine, and that in the caller's
    "vllm/v1/executor/uniproc_executor.py": ("self.driver_worker.load_model()",),
    "vllm/envs.py": ('"VLLM_ENABLE_V1_MULTIPROCESSING"', '"VLLM_PLUGINS"'),
    "vllm/engine/arg_utils.py": ("    def add_cli_args(", "    def from_cli_args("),
    "vllm/utils/argparse_utils.py": ("class FlexibleArgumentParser(",),
}  # fmt: skip
ALL = [record.vllm for record in read_records(data_dir("docs") / "evidence")]


@pytest.fixture(scope="module")
def audited(planned: Planner, tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """Files and audits of the tiny models by name, as a release's own worker makes them; once."""
    made: dict[str, dict[str, tuple[Path, Audit]]] = {}
    tiny = load("tiny_model")

    def get(version: str) -> dict[str, tuple[Path, Audit]]:
        if version not in made:
            root = tmp_path_factory.mktemp("audit")
            release = release_of(planned(f"pypi:vllm=={version}", "marlin"))
            folders = {name: tiny.write(root / name, name) for name in ("moe", "dense")}
            folders["ignored"] = _ignored(tiny.write(root / "ignored", "dense"))
            write_inside(root / "plugin")
            request = root / "request.json"
            # 0.17.1 makes a stream of the GPU for shared experts unless it is told not to
            request.write_text(
                json.dumps(release.simulation(VLLM_DISABLE_SHARED_EXPERTS_STREAM="1"))
            )
            words = map(str, (request, root / "plugin", *folders.values()))
            release.run("audit_tiny.py", *words)
            made[version] = {name: (folder, _audit(folder)) for name, folder in folders.items()}
        return made[version]

    return get


def _ignored(folder: Path) -> Path:
    """The same checkpoint, whose config says that a part of it is not quantised."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "model.layers.1.mlp*"]
    path.write_text(json.dumps(config))
    return folder


def _audit(folder: Path) -> Audit:
    return audit(AuditRequest(subject=str(folder / "audit.json"), against=folder))


@pytest.mark.parametrize("version", RELEASES)
def test_a_worker_of_a_release_audits_what_it_loaded(audited: Audited, version: str) -> None:
    """Every module is there with vLLM's own names, and all bytes of the checkpoint."""
    for name, (folder, made) in audited(version).items():
        if name == "ignored":
            continue
        assert (made.vllm, made.rank, made.unknown) == (version, 0, ())
        methods = {method.name for method in made.methods}
        linear = {"ModelOptLinearMethod", "ModelOptNvFp4LinearMethod"} & methods
        assert len(linear) == 1
        assert ("ModelOptNvFp4FusedMoE" in methods) == (name == "moe")
        assert made.compared is not None
        assert made.compared.differences == ()
        assert made.compared.same == 19
        assert made.compared.only_checkpoint == ()
        assert [one.name for one in made.compared.only_loaded] == [
            "model.layers.*.self_attn.attn"  # scales of the KV cache
        ]
        headers = audit(AuditRequest(subject=str(folder)))
        assert made.ceiling is not None
        assert headers.ceiling is not None
        assert made.ceiling.tokens_per_second == pytest.approx(
            headers.ceiling.tokens_per_second, rel=1e-4
        )
        assert made.kept[0].name == "lm_head"


@pytest.mark.parametrize("version", RELEASES)
def test_layers_that_a_release_does_not_quantise_are_named(audited: Audited, version: str) -> None:
    _folder, made = audited(version)["ignored"]
    assert made.compared is not None
    assert [(o.name, o.layers, o.loaded, o.what) for o in made.compared.lost] == [
        ("model.layers.*.mlp.gate_up_proj", "1", PLAIN, "not quantised in vLLM"),
        ("model.layers.*.mlp.down_proj", "1", PLAIN, "not quantised in vLLM"),
    ]
    assert {one.checkpoint for one in made.compared.lost} == {"nvfp4-linear"}


@pytest.mark.parametrize("version", ALL)
def test_every_release_has_what_the_audit_rests_on(index: PackageIndex, version: str) -> None:
    base = identify(
        BaseRequest(ref=f"pypi:vllm=={version}", pins={}, tracked=("vllm",), index=index)
    )
    try:
        preload(base.tree, list(RESTS_ON))
        for path, texts in RESTS_ON.items():
            source = (base.tree.read(path) or b"").decode()
            assert [text for text in texts if text not in source] == [], path
        initial = (base.tree.read("vllm/v1/worker/worker_base.py") or b"").decode()
        assert initial.index("def init_worker(") < initial.index("load_general_plugins()")
    finally:
        base.close()


@pytest.mark.parametrize("version", ["0.20.1", "0.33.0"])
def test_the_kernel_of_a_method_is_named(audited: Audited, version: str) -> None:
    """From 0.33.0 on one method serves NVFP4 and FP8: its kernel tells them apart."""
    _folder, made = audited(version)["dense"]
    (kernel,) = [m.kernel for m in made.methods if m.name.startswith("ModelOpt") and m.kernel]
    assert kernel.endswith("NvFp4LinearKernel")
