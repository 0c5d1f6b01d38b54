"""Memory before the start: what is known is added up, what is not is said to be unknown."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from builder.errors import UsageError
from builder.serving import memory
from builder.serving import serveflags as interface_module
from builder.serving.checkpoint import ModelConfig, Unknown, kv_need, read_config
from builder.serving.memory import (
    KvCache,
    MemoryEstimate,
    MemoryFigure,
    estimate_of,
    memory_estimate,
    verdict,
)
from builder.serving.models import Models
from builder.serving.options import MemoryRequest
from builder.serving.recipe import recipe_of

from .checkpoints import DENSE, checkpoint
from .release import Files, files
from .served import interface, request

if TYPE_CHECKING:
    from pathlib import Path

    from builder.images.subject import BaseRequest
    from builder.serving.memory import MemoryEstimate
    from tests.unit.caller import Call

GIB = 2**30
SMALL: dict[str, tuple[str, list[int]]] = {
    "model.embed_tokens.weight": ("BF16", [100, 10]),
    "model.layers.0.self_attn.q_proj.weight": ("U8", [500]),
    "model.layers.0.mlp.experts.0.up_proj.weight": ("U8", [800]),
    "lm_head.weight": ("BF16", [100, 10]),
}
EXPERTS: dict[str, Any] = DENSE | {"num_experts": 8, "num_experts_per_tok": 2}
SUPER: dict[str, Any] = {
    "num_hidden_layers": 4, "hybrid_override_pattern": "M*E-", "num_key_value_heads": 2,
    "head_dim": 128, "torch_dtype": "bfloat16", "mamba_num_heads": 4, "mamba_head_dim": 8,
    "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
}  # fmt: skip


def estimate(folder: Path, **options: Any) -> MemoryEstimate:
    return memory_estimate(MemoryRequest(subject=str(folder), **options))


def need(context: int = 10, dtype: str = "auto", **config: Any) -> tuple[int, int, int]:
    found = kv_need(msgspec.convert(config, ModelConfig), dtype, context)
    return found.bytes_per_token, found.bytes, found.recurrent


def test_weights_cache_and_ceiling_of_a_checkpoint(tmp_path: Path) -> None:
    made = estimate(checkpoint(tmp_path, SMALL, EXPERTS), sequences=3)
    assert made.weights is not None
    assert (made.weights.bytes, made.weights.at_least) == (5300, False)
    assert made.kv_cache is not None
    assert made.kv_cache.bytes_per_token == 2 * 2 * 2 * 16 * 2, "k and v, layers, heads, dim, bf16"
    assert made.kv_cache.bytes == 3 * 1000 * 256
    assert made.ceiling is not None
    assert made.ceiling.bytes_per_token == 500 + 800 * 2 // 8 + 2000, "no embedding"
    assert made.ceiling.tokens_per_second == round(273e9 / 2700, 1)
    assert (made.fits, made.unknown, made.not_counted) == ("yes", (), ())
    assert made.utilization.least == 0.08, "5.44 GiB, 3 of error and 257 MiB of 121.69 GiB"
    assert made.flags == (
        "--gpu-memory-utilization", "0.08", "--max-model-len", "1000", "--max-num-seqs", "3",
        "--kv-cache-memory-bytes", str(257 * 2**20),
    )  # fmt: skip


def test_rows_by_kind_of_layer_and_dtype(tmp_path: Path) -> None:
    made = estimate(checkpoint(tmp_path, SMALL, EXPERTS))
    assert {(row.group, row.dtype, row.bytes, row.read) for row in made.held} == {
        ("embedding", "BF16", 2000, 0), ("output head", "BF16", 2000, 2000),
        ("attention", "U8", 500, 500), ("routed experts", "U8", 800, 200),
    }  # fmt: skip


def test_an_embedding_that_is_the_output_head_is_read(tmp_path: Path) -> None:
    tied = {name: value for name, value in SMALL.items() if name != "lm_head.weight"}
    made = estimate(checkpoint(tmp_path, tied, EXPERTS))
    assert made.ceiling is not None
    assert made.ceiling.bytes_per_token == 500 + 200 + 2000


@pytest.mark.parametrize(
    ("config", "unknown"),
    [
        (None, ("ceiling: no config.json gives the number of experts", "KV cache: ")),
        (
            EXPERTS | {"num_experts_per_tok": None},
            ("ceiling: config.json does not give the number",),
        ),
        (EXPERTS | {"num_experts_per_tok": 9}, ("ceiling: config.json does not give the number",)),
        (DENSE, ("ceiling: config.json has 1 experts, which the names",)),
    ],
)
def test_without_figures_there_is_no_ceiling(
    tmp_path: Path, config: dict[str, Any] | None, unknown: tuple[str, ...]
) -> None:
    made = estimate(checkpoint(tmp_path, SMALL, config))
    assert made.ceiling is None
    assert len(made.unknown) == len(unknown)
    assert all(said.startswith(why) for said, why in zip(made.unknown, unknown, strict=True))
    assert made.fits == ("unknown" if config is None else "yes")
    assert (made.utilization.least is None) == (config is None)


def test_hybrid_models_count_layers_of_attention_only(tmp_path: Path) -> None:
    state = 4 * 8 * 16 * 4 + (4 * 8 + 2 * 2 * 16) * 3 * 2
    assert need(**SUPER) == (2 * 2 * 128 * 2, 10 * 1024 + 2 * state, 1)
    assert need(**SUPER, dtype="fp8")[0] == 512
    quantized: dict[str, Any] = {
        "quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    }
    assert need(**SUPER, **quantized)[0] == 512
    linear: dict[str, Any] = {
        "num_hidden_layers": 8, "full_attention_interval": 4, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    assert need(**(DENSE | linear)) == (2 * 2 * 2 * 16 * 2, 2560 + 8 * state, 6)
    tensors: dict[str, tuple[str, list[int]]] = {
        "backbone.layers.0.mixer.in_proj.weight": ("BF16", [2])
    }
    made = estimate(checkpoint(tmp_path, tensors, SUPER | {"max_position_embeddings": 10}))
    assert made.kv_cache is not None
    assert (made.kv_cache.recurrent_layers, made.kv_cache.state_bytes) == (1, state)
    assert made.not_counted == ("states that prefix caching keeps of earlier requests",)


def test_windows_mla_and_nested_configs() -> None:
    window: dict[str, Any] = {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 101,
    }
    assert need(100_000, **DENSE, **window)[1] == 128 * (100_000 + 100 + 8192)
    assert need(50, **DENSE, **window)[1] == 128 * 100, "not more than the context"
    gemma: dict[str, Any] = {"global_head_dim": 32, "num_global_key_value_heads": 1}
    assert need(**DENSE, **window, **gemma)[:2] == (128, 10 * (128 + 128))
    assert need(**DENSE, kv_lora_rank=512, qk_rope_head_dim=64)[0] == 2 * 576 * 2
    assert need(text_config=DENSE)[0] == 256


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_key_value_heads": None}, "no single num_key_value_heads"),
        ({"num_key_value_heads": [2, 4]}, "no single num_key_value_heads"),
        ({"hidden_size": None}, "has no head_dim"),
        ({"dtype": None}, "does not say the dtype"),
        ({"ssm_state_size": 128}, "does not list which layers"),
        ({"hybrid_override_pattern": "M*"}, "does not give the state size"),
        ({"hybrid_override_pattern": "M?"}, "has '?', which is not supported"),
        ({"layer_types": ["mlp"]}, "has 1 layers, num_hidden_layers is 2"),
        ({"layer_types": ["mlp", "sliding_attention"]}, "no sliding_window"),
        ({"kv_lora_rank": 512}, "no qk_rope_head_dim"),
        ({"index_topk": 2048}, "sparse attention"),
    ],
)
def test_a_cache_that_the_config_does_not_say_is_unknown(change: dict[str, Any], why: str) -> None:
    with pytest.raises(Unknown) as unknown:
        need(**(DENSE | change))
    assert why in str(unknown.value)


def test_a_dense_model_reads_its_weights_without_its_tower_for_each_token() -> None:
    made = memory_estimate(MemoryRequest(subject="gemma-4-31b"))
    assert made.weights is not None
    assert made.ceiling is not None
    assert 29e9 < made.ceiling.bytes_per_token < made.weights.bytes < 34e9
    measured = [
        one.tokens_per_second
        for one in Models.discover().model("gemma-4-31b").measured
        if one.concurrency == 1
    ]
    assert measured
    assert max(measured) < made.ceiling.tokens_per_second < 10


def test_the_bytes_that_a_token_reads_come_before_active_parameters() -> None:
    known = Models.discover().model("nemotron-3-super")
    assert known.token_bytes is not None
    exact = memory.weights_of_model(known)[1]
    rough = memory.weights_of_model(msgspec.structs.replace(known, token_bytes=None))[1]
    assert exact is not None
    assert rough is not None
    assert exact.bytes_per_token == known.token_bytes.value > rough.bytes_per_token
    assert "active parameters" in rough.source


def test_no_measurement_of_one_stream_is_above_the_ceiling() -> None:
    models = Models.discover()
    for name in models.files:
        made = memory_estimate(MemoryRequest(subject=name))
        most = made.ceiling.tokens_per_second if made.ceiling else math.inf
        for one in models.model(name).measured:
            assert one.concurrency > 1 or one.tokens_per_second < most


@pytest.mark.parametrize(
    ("quantization", "beside", "dtype"),
    [
        (None, {"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_algo": "MIXED"}, {"quantization": {"kv_cache_quant_algo": "fp8"}}, "fp8"),
        ({"quant_algo": "NVFP4"}, {"quantization": {"kv_cache_quant_algo": None}}, "bfloat16"),
        ({"quant_algo": "NVFP4"}, {"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "bfloat16"),
        ({"quant_algo": "NVFP4"}, {}, "bfloat16"),
        ({"kv_cache_quant_algo": "NONE"}, {"quantization": {"kv_cache_quant_algo": "FP8"}},
         "bfloat16"),
        ({"kv_cache_quant_algo": "FP8"}, {"quantization": {}}, "fp8"),
    ],
)  # fmt: skip
def test_modelopt_s_own_file_names_the_dtype_of_the_kv_cache(
    tmp_path: Path, quantization: Any, beside: Any, dtype: str
) -> None:
    config = DENSE | ({"quantization_config": quantization} if quantization else {})
    folder = checkpoint(tmp_path / "held", SMALL, config)
    (folder / "hf_quant_config.json").write_text(json.dumps(beside), "utf-8")
    made = memory_estimate(MemoryRequest(subject=str(folder)))
    assert made.kv_cache is not None
    assert made.kv_cache.dtype == dtype
    assert ("--kv-cache-dtype fp8" in " ".join(made.flags)) == (dtype == "fp8")
    recipe = recipe_of(request("qwen3-30b-a3b", checkpoint=folder))
    given = [one.value for one in recipe.flags if one.name == "--kv-cache-dtype"]
    named = quantization is None or "kv_cache_quant_algo" not in quantization
    assert given == (["fp8"] if dtype == "fp8" and named else [])


def test_a_malformed_file_of_modelopt_is_an_error(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "held", SMALL, DENSE)
    for text in ("{", "[]", '{"quantization": 3}', '{"quantization": {"kv_cache_quant_algo": 8}}'):
        (folder / "hf_quant_config.json").write_text(text, "utf-8")
        with pytest.raises(UsageError, match=r"hf_quant_config\.json: cannot be read"):
            read_config(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"num_hidden_layers": "2"}', '{"head_dim": -1}'])
def test_a_malformed_config_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json: cannot be read"):
        read_config(tmp_path)


def without_bytes(name: str) -> MemoryEstimate:
    """The estimate of a known model whose file would not have its bytes."""
    model = Models.discover().model(name)
    less = msgspec.structs.replace(model, weight_bytes=None, token_bytes=None)
    return estimate_of(less, None, MemoryRequest(subject=name))


def test_a_models_file_gives_a_lower_bound_and_never_yes() -> None:
    made = without_bytes("nemotron-3-nano-w4a16")
    assert made.weights is not None
    assert (made.weights.bytes, made.weights.at_least) == (16_875_000_000, True)
    assert (made.fits, made.utilization.least) == ("unknown", None)
    assert made.flags[:2] == ("--gpu-memory-utilization", "0.85")
    known = memory_estimate(MemoryRequest(subject="nemotron-3-nano"))
    assert known.flags[:2] == ("--gpu-memory-utilization", "0.90"), "the model's file advises it"
    assert known.utilization.most == 0.9
    unread = without_bytes("gpt-oss-120b")
    assert unread.ceiling is None
    assert "ceiling: no source gives the active parameters" in unread.unknown


def unconfigured(folder: Path) -> Path:
    """A folder with the model ``plain``, whose configuration is not known."""
    text = 'summary = "x"\n[id]\nvalue = "me/plain"\nsource = "x"\n'
    (folder / "plain.toml").write_text(text)
    return folder


def test_a_releases_flags_are_read_from_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    closed: list[str] = []

    def identified(request: BaseRequest, _place: str) -> SimpleNamespace:
        asked.append(request.ref.text)
        identity = SimpleNamespace(packages={"vllm": "1.2.3"})
        tree = Files(files({}))
        return SimpleNamespace(
            identity=identity, tree=tree, close=lambda: closed.append(request.ref.text)
        )

    monkeypatch.setattr(interface_module, "identify_pypi", identified)
    models = (unconfigured(tmp_path),)
    made = memory_estimate(MemoryRequest(subject="plain", release="1.2.3", models=models))
    assert asked == closed == ["pypi:vllm==1.2.3"]
    assert made.flags == ()
    assert "vLLM 1.2.3 has no flag --gpu-memory-utilization" in made.unknown[-1]


def test_a_release_gets_only_flags_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = lambda ref: interface(ref.partition("==")[2])  # noqa: E731
    monkeypatch.setattr(memory, "interface_of_wheels", read)
    made = estimate(checkpoint(tmp_path, SMALL, EXPERTS), release="0.17.0")
    assert "--max-model-len" in made.flags
    assert "--kv-cache-memory-bytes" not in made.flags
    assert made.unknown[0].startswith("vLLM 0.17.0 has no flag --kv-cache-memory-bytes")
    assert len(made.unknown) == 1


def test_what_does_not_fit_fails_and_says_what_would(call: Call, tmp_path: Path) -> None:
    config = EXPERTS | {"num_key_value_heads": 64, "head_dim": 1024, "num_hidden_layers": 4}
    folder = checkpoint(tmp_path / "big", SMALL, config)
    assert call("memory", folder, "--sequences", "95", "--json").json["fits"] == "yes"
    result = call("memory", folder, "--sequences", "140", "--json")
    assert (result.code, result.json["fits"]) == (5, "no")
    assert result.json["error"]["code"] == 5
    assert "--kv-cache-dtype fp8" in result.json["error"]["hint"]
    assert result.json["flags"] == []
    wanted = result.json["kv_cache"]["bytes"]
    fitting = call("memory", folder, "--sequences", "70", "--json").json
    given = int(fitting["flags"][fitting["flags"].index("--kv-cache-memory-bytes") + 1])
    assert given - (256 << 20) - wanted / 2 * 1.05 == pytest.approx(0, abs=1 << 20)
    options = ("--sequences", "140", "--kv-cache-dtype", "fp8")
    folder = checkpoint(tmp_path / "long", SMALL, config | {"max_position_embeddings": 4096})
    result = call("memory", folder, *options, "--context", "2000")
    assert (result.code, "--context 1024" in result.err) == (5, True)
    assert "  fits              no\n" in result.out
    assert call("memory", folder, *options, "--context", "1024").code == 0


@pytest.mark.parametrize(
    "given", [("--context", "8192"), ("--sequences", "2"), ("--kv-cache-dtype", "fp8")]
)
def test_options_of_the_cache_need_a_checkpoint(
    call: Call, tmp_path: Path, given: tuple[str, str]
) -> None:
    result = call("memory", "plain", *given, "--models", unconfigured(tmp_path))
    assert result.code == 2
    assert f"{given[0]} needs the checkpoint's folder" in result.err
    assert "try: spark-build memory plain" in result.err


def test_the_room_is_that_of_the_flag_beside_it(call: Call) -> None:
    """The share of the flags, and not the largest one."""
    made = memory_estimate(MemoryRequest(subject="nemotron-3-super"))
    assert made.weights is not None
    fixed = made.weights.bytes + made.overhead.bytes
    assert (made.utilization.share, made.flags[:2]) == (0.85, ("--gpu-memory-utilization", "0.85"))
    assert made.room_for_kv_cache == int(0.85 * made.total.bytes) - fixed
    assert made.room_at_most == int(0.9 * made.total.bytes) - fixed
    shown = call("memory", "nemotron-3-super").out
    assert "28.50 GiB  at --gpu-memory-utilization 0.85; 34.58 GiB at most, at 0.90\n" in shown
    asked = MemoryRequest(subject="nemotron-3-super", utilization="0.7", context=4096)
    assert memory_estimate(asked).flags[:4] == (
        "--gpu-memory-utilization", "0.70", "--max-model-len", "4096",
    )  # fmt: skip


def test_a_share_that_was_asked_for_may_be_too_small(call: Call) -> None:
    result = call("memory", "nemotron-3-super", "--gpu-memory-utilization", "0.6")
    assert result.code == 5
    assert "does not fit into 0.60 of 121.7 GiB" in result.err
    assert "--gpu-memory-utilization 0.67" in result.err
    for share in ("0", "1.5", "much"):
        refused = call("memory", "nemotron-3-super", "--gpu-memory-utilization", share)
        assert (refused.code, "--gpu-memory-utilization" in refused.err) == (2, True)


def test_a_larger_batch_takes_more(call: Call) -> None:
    """As preflight counts it: 225 KiB for each token of a batch."""
    usual = memory_estimate(MemoryRequest(subject="qwen3-30b-a3b"))
    large = memory_estimate(MemoryRequest(subject="qwen3-30b-a3b", batched_tokens=65536))
    assert usual.overhead.bytes == 5 * GIB + 2048 * 225 * 1024
    assert large.overhead.bytes - usual.overhead.bytes == (65536 - 2048) * 225 * 1024
    assert usual.room_at_most is not None
    assert large.room_at_most is not None
    assert usual.room_at_most - large.room_at_most == (65536 - 2048) * 225 * 1024
    shown = call("memory", "qwen3-30b-a3b", "--max-num-batched-tokens", "65536").out
    assert "19.06 GiB  activations, workspaces, CUDA graphs: +-3 GiB (seven server logs" in shown


@pytest.mark.parametrize(("gib", "said"), [(-4, "no"), (-1, "unknown"), (4, "unknown"), (9, "yes")])
@pytest.mark.parametrize("at_least", [False, True])
def test_between_yes_and_no_it_is_unknown(gib: int, said: str, at_least: bool) -> None:
    """Activations may take 3 GiB more or less; and recurrent layers three times the cache."""
    weights = MemoryFigure(bytes=GIB, source="a test")
    cache = KvCache(
        dtype="fp8", source="a test", context=1, sequences=1, full_layers=1, sliding_layers=0,
        recurrent_layers=0, state_bytes=0, bytes_per_token=1, bytes=3 * GIB, at_least=at_least,
    )  # fmt: skip
    room = (3 + gib) * GIB
    said = "yes" if gib == 4 and not at_least else said
    assert verdict(weights, cache, room) == said
    assert verdict(weights, cache, room + 9 * GIB, 3 * GIB) == ("unknown" if at_least else "yes")
    assert verdict(weights, cache, room + 9 * GIB, 2 * GIB) == "no"
    lower = msgspec.structs.replace(weights, at_least=True)
    assert verdict(lower, cache, room) == ("no" if said == "no" else "unknown")
    assert verdict(None, cache, room) == verdict(weights, cache, None) == "unknown"


def test_the_cache_of_recurrent_layers_is_a_lower_bound(call: Call) -> None:
    """A release takes up to 2.3 times as much: its bytes are no flag."""
    made = memory_estimate(MemoryRequest(subject="qwen3.6-27b", context=8192))
    assert made.kv_cache is not None
    assert (made.kv_cache.at_least, made.fits) == (True, "yes")
    assert "--kv-cache-memory-bytes" not in made.flags
    many = MemoryRequest(subject="qwen3.6-27b", context=8192, sequences=100)
    assert memory_estimate(many).fits == "unknown"
    shown = call("memory", "qwen3.6-27b", "--context", "8192", "--sequences", "100").out
    assert "KV cache        >=" in shown
    assert "ask the release: spark-build preflight" in shown


def test_the_caches_of_a_known_model_are_those_of_its_configuration(tmp_path: Path) -> None:
    model = Models.discover().model("qwen3-30b-a3b")
    assert model.config is not None
    folder = checkpoint(tmp_path / "ck", SMALL, model.config.value)
    request = MemoryRequest(subject="qwen3-30b-a3b", context=8192)
    own = memory_estimate(replace(request, subject=str(folder)))
    assert memory_estimate(request).kv_cache == own.kv_cache is not None


@pytest.mark.parametrize("command", ["memory", "audit", "preflight"])
@pytest.mark.parametrize("named", ["m.gguf", "org/Model-GGUF", "org/Model-GGUF:Q4_K_M", "folder"])
def test_gguf_is_not_read(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "m.gguf", tmp_path / "folder/model-00001.gguf"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"GGUF\x03")
    result = call(command, named)
    assert (result.code, f"{named} is in GGUF, the format of llama.cpp" in result.err) == (2, True)
    (tmp_path / "folder/config.json").write_text("{}")
    assert "GGUF" not in call(command, "folder").err, "a folder may have both"


def test_what_is_neither_a_folder_nor_a_model(call: Call) -> None:
    result = call("memory", "no/where")
    assert (result.code, "'no/where' is neither a folder nor a model" in result.err) == (2, True)
    assert "try: spark-build models list\n" in result.err


def test_context_beyond_the_maximum_of_the_model_is_refused(call: Call, tmp_path: Path) -> None:
    config = EXPERTS | {"max_position_embeddings": 4096}
    result = call("memory", checkpoint(tmp_path / "ck", SMALL, config), "--context", "4097")
    assert result.code == 2
    assert "the model's own maximum is 4096" in result.err


def test_weights_alone_may_be_too_large(call: Call, tmp_path: Path) -> None:
    huge: dict[str, tuple[str, list[int]]] = {
        "model.layers.0.mlp.up_proj.weight": ("BF16", [60, GIB])
    }
    result = call("memory", checkpoint(tmp_path / "huge", huge, DENSE))
    assert result.code == 5
    assert "use a smaller checkpoint" in result.err
    assert "in 16 bits: feed-forward 120.000 GiB" in result.out


def test_the_command_prints_what_is_unknown(call: Call, tmp_path: Path) -> None:
    result = call("memory", checkpoint(tmp_path / "x", SMALL, None))
    assert result.code == 0
    assert "unknown: KV cache: " in result.out
    assert "tokens/s" not in result.out
    assert "in 16 bits: embedding 0.000 GiB, output head 0.000 GiB\n" in result.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["./gone"], "./gone is not a folder"),
        (["nemotron-3-supr"], "did you mean 'nemotron-3-super'?"),
        (["."], "contains no *.safetensors"),
        (["nemotron-3-super", "--kv-cache-dtype", "fp8_e4m33"], "did you mean 'fp8_e4m3'?"),
        (["nemotron-3-super", "--context", "0"], "greater than or equal to 1"),
    ],
)
def test_what_is_not_there(call: Call, words: list[str], message: str) -> None:
    result = call("memory", *words)
    assert result.code == 2
    assert message in result.err


def test_a_truncated_file_is_an_error_of_the_command(call: Call, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "x", SMALL, DENSE)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    result = call("memory", folder, "--json")
    assert (result.code, "is truncated" in json.loads(result.out)["error"]["message"]) == (2, True)
