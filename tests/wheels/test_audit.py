"""The audit beside real releases: vLLM finds it as a plugin, and its worker calls it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.paths import data_dir
from builder.common.reference import Ref
from builder.images.bases.identify import identify
from builder.images.bases.imagetree import preload
from builder.images.subject import BaseRequest
from builder.proof.recorded import read_records
from builder.serving.audit import AuditRequest, audit, write_inside

from ..unit.inimage import load
from ..unit.serving.checkpoints import safetensors
from .sandboxed import release_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from builder.common.pypi import PackageIndex
    from builder.serving.audit import Audit

    from .support import Planner

    Folder = tuple[dict[str, tuple[str, list[int]]], dict[str, Any], list[str]]
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
            release.run("audit_tiny.py", *words, root=root)
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


# -- models whose names, layers or quantisation are others than those of the tiny ones

BF16: tuple[str, list[int]] = ("BF16", [16])
NVFP4: dict[str, tuple[str, list[int]]] = {
    "weight": ("U8", [64]), "weight_scale": ("F8_E4M3", [8]), "weight_scale_2": ("F32", []),
    "input_scale": ("F32", []),
}  # fmt: skip
ATTENTION = [f"{part}_proj" for part in "qkvo"]


def _names(parent: str, **tensors: tuple[str, list[int]]) -> dict[str, tuple[str, list[int]]]:
    return {f"{parent}.{name}": tensor for name, tensor in tensors.items()}


def _hybrid() -> Folder:
    """Nemotron-H: Mamba, attention, experts with shared ones, a layer without them."""
    mixer = "backbone.layers.{}.mixer".format
    tensors = _names("backbone", **{"embeddings.weight": BF16, "norm_f.weight": BF16})
    tensors |= _names("lm_head", weight=BF16)
    tensors |= _names(mixer(0), A_log=BF16, D=BF16, dt_bias=BF16)
    for name in ("conv1d", "in_proj", "norm"):
        tensors |= _names(f"{mixer(0)}.{name}", weight=BF16)
    quantised = [f"{mixer(0)}.out_proj", *(f"{mixer(1)}.{name}" for name in ATTENTION)]
    for below in ("shared_experts.", *(f"experts.{n}." for n in range(8))):
        quantised += [f"{mixer(2)}.{below}{name}" for name in ("up_proj", "down_proj")]
    quantised += [f"{mixer(3)}.up_proj", f"{mixer(3)}.down_proj"]
    for name in quantised:
        tensors |= _names(name, **NVFP4)
    tensors |= _names(f"{mixer(2)}.gate", weight=BF16, e_score_correction_bias=BF16)
    for layer in range(4):
        tensors |= _names(f"backbone.layers.{layer}.norm", weight=BF16)
    config = {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*E-", "num_hidden_layers": 4, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_shared_expert_intermediate_size": 256,
        "n_shared_experts": 1, "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 16,
        "n_groups": 2, "conv_kernel": 4, "chunk_size": 128, "use_bias": False,
        "use_conv_bias": True, "mamba_proj_bias": False, "mlp_bias": False,
        "mlp_hidden_act": "relu2", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    }  # fmt: skip
    return tensors, config, ["lm_head", "*in_proj", "*gate", "*conv1d"]


def _shared_experts() -> Folder:
    """Qwen 2 MoE: shared experts that nobody quantised, beside routed ones in NVFP4."""
    tensors = _names("model", **{"embed_tokens.weight": BF16, "norm.weight": BF16})
    tensors |= _names("lm_head", weight=BF16)
    for layer in (f"model.layers.{n}" for n in range(2)):
        parts = [f"mlp.experts.{n}.{part}" for n in range(8) for part in ("gate", "up", "down")]
        quantised = [f"self_attn.{name}" for name in ATTENTION]
        for name in (*quantised, *(f"{part}_proj" for part in parts)):
            tensors |= _names(f"{layer}.{name}", **NVFP4)
        plain = [f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")]
        plain += ["mlp.gate", "mlp.shared_expert_gate", "input_layernorm"]
        for name in (*plain, "post_attention_layernorm"):
            tensors |= _names(f"{layer}.{name}", weight=BF16)
    config = {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 256,
    }  # fmt: skip
    return tensors, config, ["lm_head", "*gate", "*shared_expert*"]


def _mxfp4() -> Folder:
    """gpt-oss: experts in MXFP4, attention by another name."""
    tensors = _names("model", **{"embed_tokens.weight": BF16, "norm.weight": BF16})
    tensors |= _names("lm_head", weight=BF16)
    for layer in (f"model.layers.{n}" for n in range(2)):
        tensors |= _names(f"{layer}.self_attn", sinks=BF16)
        names = [f"self_attn.{name}" for name in ATTENTION]
        for name in (*names, "mlp.router", "input_layernorm", "post_attention_layernorm"):
            tensors |= _names(f"{layer}.{name}", weight=BF16)
        for part in ("gate_up_proj", "down_proj"):
            packed = {f"{part}_blocks": ("U8", [64]), f"{part}_scales": ("U8", [4])}
            tensors |= _names(f"{layer}.mlp.experts", **packed, **{f"{part}_bias": BF16})
    config = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 8,
        "intermediate_size": 256, "sliding_window": 128, "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 128, "truncate": False,
        },
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    return tensors, config, []


@pytest.mark.parametrize(
    ("version", "made", "plain"),
    [
        # the first whose sandbox has a Transformers that knows the model
        ("0.33.0", _hybrid, {"in_proj", "conv1d", "gate"}),
        ("0.20.1", _shared_experts, {"gate", "shared_expert_gate", "gate_up_proj", "down_proj"}),
        ("0.33.0", _shared_experts, {"gate", "shared_expert_gate", "gate_up_proj", "down_proj"}),
        ("0.20.1", _mxfp4, {"qkv_proj", "o_proj", "router"}),
        ("0.33.0", _mxfp4, {"qkv_proj", "o_proj", "router"}),
    ],
)
def test_other_models_are_as_their_checkpoints(
    planned: Planner, tmp_path: Path, version: str, made: Callable[[], Folder], plain: set[str]
) -> None:
    """Every module of vLLM has its counterpart in the headers, whatever either calls it."""
    tensors, config, ignored = made()
    folder = load("tiny_model").write(tmp_path / "model", "moe")
    whole = json.loads((folder / "config.json").read_text())
    whole["quantization_config"]["ignore"] = ignored
    (folder / "config.json").write_text(json.dumps(whole | config))
    write_inside(tmp_path / "plugin")
    request = tmp_path / "request.json"
    release = release_of(planned(f"pypi:vllm=={version}", "marlin"))
    request.write_text(json.dumps(release.simulation(VLLM_DISABLE_SHARED_EXPERTS_STREAM="1")))
    words = map(str, (request, tmp_path / "plugin", folder))
    release.run("audit_tiny.py", *words, root=tmp_path)
    safetensors(folder / "model.safetensors", tensors)
    found = _audit(folder).compared
    assert found is not None
    assert found.differences == ()
    assert found.only_checkpoint == ()
    # scales of the KV cache alone
    assert all(one.name.endswith(".attn") and one.bytes < 100 for one in found.only_loaded)
    audit_made = _audit(folder)
    names = {row.name.rpartition(".")[2] for row in audit_made.kept if row.layers}
    assert {name for name in names if "norm" not in name} - {"mixer", "attn"} == plain


@pytest.mark.parametrize("version", ALL)
def test_every_release_has_what_the_audit_rests_on(index: PackageIndex, version: str) -> None:
    base = identify(
        BaseRequest(ref=Ref(f"pypi:vllm=={version}"), pins={}, tracked=("vllm",), index=index)
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
