"""``preflight`` on released wheels: whole models, each from a ``config.json`` alone.

The kernels are those that `docs/dispatch.md` has for single layers; the refusals are the releases'.
"""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.preflight_sweep import sweep
from builder.__main__ import run
from builder.common.document import read
from builder.common.paths import cache_dir
from builder.common.reference import Ref
from builder.layers.catalog import Selection
from builder.pipeline.bases import identify_base
from builder.proof.model import kinds_of
from builder.proof.trust import TrustedSources
from builder.proof.wholemodel import LayerRow, Release, Target
from builder.serving.configurations import FORMS
from builder.serving.memory import memory_estimate
from builder.serving.models import Models
from builder.serving.options import MemoryRequest

from .states import expected

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from builder.common.pypi import PackageIndex

NVFP4 = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8",
    "group_size": 16, "ignore": ["lm_head", "model.layers.*.mlp.gate"],
    "producer": {"name": "modelopt", "version": "0.33"},
}  # fmt: skip
COMMON = {
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "rms_norm_eps": 1e-6,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 2,
    "max_position_embeddings": 40960, "rope_theta": 1e6, "vocab_size": 151936,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "quantization_config": NVFP4,
}  # fmt: skip
LLAMA = {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
EXPERTS = {
    **COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
    "max_window_layers": 2, "use_sliding_window": False, "attention_bias": False,
}  # fmt: skip
#: Attention in FP8 beside NVFP4, as in mixed checkpoints.
MIXED = {
    **LLAMA,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": ["lm_head"],
        "quantized_layers": {
            f"model.layers.{number}.{name}": {"quant_algo": kind, "group_size": 16}
            for number in range(2)
            for kind, names in {
                "FP8": [f"self_attn.{part}_proj" for part in "qkvo"],
                "NVFP4": [f"mlp.{part}_proj" for part in ("gate", "up", "down")],
            }.items()
            for name in names
        },
    },
}
#: What preflight adds where nobody chose a share of the memory.
SHARE = ["--gpu-memory-utilization", "0.85"]
B12X = ("--linear-backend", "flashinfer_b12x", "--moe-backend", "flashinfer_b12x")


@pytest.fixture
def asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The exit status and the document for a configuration, a release and more words."""

    def ask(config: dict[str, Any], release: str, *words: str) -> tuple[int, dict[str, Any]]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        code = run(["preflight", str(tmp_path), "--release", release, "--json", *words])
        return code, dict(json.loads(capfd.readouterr().out))

    return ask


#: Newer than what a model of ours says that it needs.
NEWEST = "0.33.0"
WITH_CONFIGURATION = [
    name for name in Models.discover().files if Models.discover().model(name).config is not None
]


@pytest.mark.parametrize("name", WITH_CONFIGURATION)
def test_a_known_model_is_as_its_file_says(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Each builds without a network; its experts, and its weights if known, are as in its file."""
    model = Models.discover().model(name)
    code = run(["preflight", name, "--release", NEWEST, "--json"])
    document = json.loads(capfd.readouterr().out)
    fits = document["memory"]["cache_bytes"] > 0
    assert (code, document["starts"]) == ((0, "yes") if fits else (5, "no"))
    assert "not_asked" not in document["memory"]
    assert document["memory"]["block_tokens"] > 0
    experts = any(row["experts"] for row in document["layers"] if row["part"] == "model")
    total, active = model.parameters, model.active_parameters
    sparse = active is not None and (total is None or active.value != total.value)
    assert experts is (model.experts is not None or sparse)
    if model.weight_bytes is not None:
        ratio = document["memory"]["weight_bytes"] / model.weight_bytes.value
        assert ratio == pytest.approx(1, abs=0.05)
    if model.token_bytes is not None:
        read = sum(row["token_bytes"] for row in document["layers"])
        assert read == model.token_bytes.value
    made = memory_estimate(MemoryRequest(subject=name))
    assert made.ceiling is not None
    assert made.ceiling.tokens_per_second == document["memory"]["ceiling"]
    quantised = {row["quantisation"] for row in document["layers"]}
    full = {
        "UnquantizedLinearMethod",
        "UnquantizedFusedMoEMethod",
        "UnquantizedEmbeddingMethod",
        "",
    }
    if model.kinds() != {"unquantized"}:
        assert quantised - full


#: What servers on GB10s logged: the block size of the KV cache, and lines about it.
LOGGED = [
    (
        "nemotron-3-nano", "0.26.0",
        ("--max-model-len", "131072", "--gpu-memory-utilization", "0.9", "--kv-cache-dtype", "fp8",
         "--no-enable-prefix-caching", "--max-num-batched-tokens", "8192", "--moe-backend",
         "marlin"),
        4176, ("Add 1 padding layers",),
    ),
    ("qwen3.6-27b", "0.28.0", ("--max-model-len", "262144", "--max-num-seqs", "8",
     "--gpu-memory-utilization", "0.82", "--speculative-config",
     '{"method":"mtp","num_speculative_tokens":3}'), 1600, ()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "release", "flags", "block", "lines"), LOGGED)
def test_the_release_sizes_its_cache_as_servers_logged(
    name: str, release: str, flags: Any, block: int, lines: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["preflight", name, "--release", release, "--json", *flags]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["memory"]["block_tokens"] == block
    for line in (*lines, "GPU KV cache size: "):
        assert any(text.startswith(line) for text in document["lines"]), line


@pytest.mark.parametrize("release", ["0.17.1", "0.24.0", "0.26.0", "0.30.0", NEWEST])
def test_a_gb10_is_a_small_device(asked: Any, release: str) -> None:
    """NVML does not know its memory, so vLLM takes the settings of a small one, as servers logged.

    The flags are those of the front end, which only a server's parser knows.
    """
    words = ("--port", "8001", "--tool-call-parser", "hermes", "--enable-auto-tool-choice")
    code, document = asked(LLAMA, release, *words)
    assert (code, document["starts"]) == (0, "yes"), document["reason"] or document["refusal"]
    settings = document["settings"]
    assert (settings["max_num_seqs"], settings["max_num_batched_tokens"]) == (256, 2048)
    assert settings["gpu_memory_utilization"] == 0.85


def test_a_context_that_does_not_fit_is_refused_in_the_releases_words(asked: Any) -> None:
    code, document = asked(LLAMA, NEWEST, "--kv-cache-memory-bytes", "1000000")
    assert (code, document["starts"]) == (5, "no")
    assert document["refusal"]["stage"] == "memory"
    assert "KV cache is needed" in document["refusal"]["message"]


def test_too_little_free_memory_is_refused_in_the_releases_words(asked: Any) -> None:
    code, document = asked(LLAMA, NEWEST, "--gpu-memory-utilization", "0.99")
    assert code == 5
    assert "is less than desired GPU memory utilization" in document["refusal"]["message"]


def test_two_data_parallel_ranks_of_two_machines(asked: Any) -> None:
    words = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
    assert asked(LLAMA, NEWEST, *words)[1]["starts"] == "yes"


@pytest.mark.parametrize(
    ("release", "flags", "why"),
    [
        (NEWEST, ("--max-model-len", "2000000"), "max_model_len"),
        (NEWEST, ("--speculative-config", '{"method":"mtpp","moe_backnd":1}'), "moe_backnd"),
        ("0.24.0", ("--kv-cache-dtype", "nvfp4"), "requires sm100f"),
    ],
)
def test_settings_of_the_field_that_do_not_start(
    asked: Any, release: str, flags: tuple[str, ...], why: str
) -> None:
    code, document = asked(EXPERTS, release, *flags)
    assert (code, document["starts"]) == (5, "no")
    assert why in document["refusal"]["message"]


def test_a_reasoning_parser_needs_no_tokenizer(asked: Any) -> None:
    """0.24.0 makes it with the tokenizer, which is not read; an unknown name is still refused."""
    assert asked(LLAMA, "0.24.0", "--reasoning-parser", "qwen3")[1]["starts"] == "yes"
    assert asked(LLAMA, "0.24.0", "--reasoning-parser", "nobody's")[1]["starts"] == "no"


@pytest.mark.parametrize("form", FORMS)
def test_the_sweep_over_architectures_in_short(form: str, tmp_path: Path) -> None:
    """Dense and with experts; whatever fails does so in the release's own words."""
    only = ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GraniteForCausalLM"]
    found = sweep(NEWEST, form, tmp_path, only)
    assert set(found) == set(only)
    assert {word for word, _ in found.values()} <= {"starts", "refused"}
    assert form == "MXFP4" or found["Qwen3ForCausalLM"] == ("starts", "")


def kernels(document: dict[str, Any]) -> dict[str, list[str]]:
    """The last part of a layer's name -> its kernels."""
    chosen = {
        row["pattern"].rpartition(".")[2]: [k for k in (*row["kernels"], row["attention"]) if k]
        for row in document["layers"]
    }
    return {name: named for name, named in chosen.items() if named}


@pytest.mark.parametrize("release", ["0.17.1", "0.20.1", "0.24.0", "0.33.0"])
def test_a_dense_model_has_the_kernels_of_its_release(asked: Any, release: str) -> None:
    code, document = asked(LLAMA, release)
    assert (code, document["starts"]) == (0, "yes"), document["reason"]
    old = release == "0.17.1"
    linear = ["FLASHINFER_CUTLASS" if old else "FlashInferCutlassNvFp4LinearKernel"]
    linears = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    assert kernels(document) == dict.fromkeys(linears, linear) | {"attn": ["FLASHINFER"]}
    assert document["settings"]["kv_cache_dtype"] == "fp8_e4m3"
    (cache,) = document["caches"]  # 2 x 4 heads x 128 values of a byte
    assert (cache["block_bytes"], cache["count"]) == (cache["block_tokens"] * 1024, 2)
    assert document["memory"]["weight_bytes"] == sum(row["bytes"] for row in document["layers"])
    assert "device: NVIDIA GB10, compute capability 12.1" in document["simulated"]


def test_experts_get_b12x_with_the_profile(asked: Any) -> None:
    """The profile's flags for experts are added because the release says that there are some."""
    code, document = asked(EXPERTS, "0.33.0", "--layers", "b12x-full")
    assert code == 0
    assert document["flags"] == [*B12X[:2], *SHARE, *B12X[2:]]
    chosen = kernels(document)
    assert chosen["qkv_proj"] == ["FlashInferB12xNvFp4LinearKernel"]
    assert chosen["routed_experts"] == ["FLASHINFER_B12X"]
    (experts,) = (row for row in document["layers"] if row["experts"])
    assert experts["experts"] == [8, 128]
    assert experts["token_bytes"] == experts["bytes"] // 16
    again = asked(EXPERTS, "0.33.0", "--layers", "b12x-full")[1]
    assert again.pop("cached")
    assert again == {name: value for name, value in document.items() if name != "cached"}


def test_lora_changes_the_kernel_of_experts(asked: Any) -> None:
    document = asked(EXPERTS, "0.33.0", "--enable-lora")[1]
    assert kernels(document)["routed_experts"] == ["MARLIN"]


def test_a_mixed_checkpoint_needs_the_patch_on_0_24(asked: Any) -> None:
    """The failure that ``vllm-linear-fallback`` cures, seen without hardware."""
    code, document = asked(MIXED, "0.24.0", *B12X[:2])
    assert (code, document["starts"], document["refusal"]["stage"]) == (5, "no", "model")
    assert document["refusal"]["message"] == (
        "--linear-backend=flashinfer_b12x was requested but no 'flashinfer_b12x' kernel exists for "
        "this layer type."
    )
    assert document["refusal"]["where"].startswith("vllm/model_executor/kernels/linear/")
    assert document["cures"] == [
        {"change": "without --linear-backend flashinfer_b12x", "flags": SHARE},
        {"change": "with --layers b12x-full", "flags": list(B12X[:2]), "layers": ["b12x-full"]},
    ]
    code, cured = asked(MIXED, "0.24.0", "--layers", "b12x-full")
    assert code == 0
    assert "vllm-linear-fallback" in cured["patched"]
    assert kernels(cured)["down_proj"] == ["FlashInferB12xNvFp4LinearKernel"]
    assert kernels(cured)["o_proj"] == ["FlashInferFP8ScaledMMLinearKernel"]


@pytest.mark.parametrize(
    ("words", "stage", "message"),
    [
        (("--no-such-flag",), "arguments", "unrecognized arguments: --no-such-flag"),
        (("--max-model-len", "2000000"), "configuration", "max_model_len (2000000) is greater"),
        (("--tensor-parallel-size", "2"), "configuration", "World size (2) is larger"),
        (("--moe-backend", "triton"), "model", "is not supported for NvFP4 MoE"),
    ],
)
def test_what_a_release_refuses(asked: Any, words: Any, stage: str, message: str) -> None:
    code, document = asked(EXPERTS, "0.33.0", *words)
    assert (code, document["starts"]) == (5, "no")
    assert document["refusal"]["stage"] == stage
    assert message in document["refusal"]["message"]
    assert [cure["flags"] for cure in document["cures"]] == [SHARE]
    assert document["error"]["code"] == 5


#: Flags of the server, and what each release says of them before it builds an engine; "" if it
#: accepts them.  Files are on the server's machine, and plugins are not run.
OF_THE_SERVER = {
    "--enable-auto-tool-choice": "Error: --enable-auto-tool-choice requires --tool-call-parser",
    "--enable-auto-tool-choice --tool-call-parser other": "invalid tool call parser: other",
    "--enable-log-outputs": "Error: --enable-log-outputs requires --enable-log-requests",
    "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 --port 8080"
    " --chat-template /none/such.jinja": "",
    "--enable-auto-tool-choice --tool-call-parser own --tool-parser-plugin /none/own.py": "",
}


@pytest.mark.parametrize("release", expected()["vllm"].releases)
def test_every_release_checks_the_flags_of_its_server(
    release: str, tmp_path: Path, index: PackageIndex
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    ref = Ref(f"pypi:vllm=={release}")
    with closing(identify_base(ref, Selection((), ()), index, platform=None)) as base:
        opened = Release(Target.of(base), TrustedSources())
        answers = opened.ask(tmp_path, [flags.split() for flags in OF_THE_SERVER])
    for answer, said in zip(answers, OF_THE_SERVER.values(), strict=True):
        assert not any("not asked" in one for one in answer.simulated)
        assert answer.not_run == ""
        assert (answer.error is not None) == bool(said)
        if answer.error is not None:
            assert said in answer.error.message
            assert answer.error.stage == "arguments"


def test_one_of_two_nodes(asked: Any) -> None:
    words = ("--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", "0")
    whole = asked(LLAMA, "0.33.0")[1]
    code, half = asked(LLAMA, "0.33.0", *words, "--master-addr", "127.0.0.1")
    assert code == 0
    assert kernels(half) == kernels(whole)
    assert 0.5 < half["memory"]["weight_bytes"] / whole["memory"]["weight_bytes"] < 0.55
    assert half["caches"][0]["block_bytes"] * 2 == whole["caches"][0]["block_bytes"]


def test_code_of_a_checkpoint_does_not_run(asked: Any, tmp_path: Path) -> None:
    marks = tmp_path / "it ran"
    (tmp_path / "own.py").write_text(f"open({str(marks)!r}, 'w')")
    (tmp_path / "own.pth").write_text(f"import sys; open({str(marks)!r}, 'w')")
    (tmp_path / "tokenize.py").write_text(f"open({str(marks)!r}, 'w')")
    config = {"auto_map": {"AutoConfig": "own.Own"}, "model_type": "own", "architectures": ["Own"]}
    code, document = asked(config, "0.33.0", "--trust-remote-code")
    assert (code, document["starts"]) == (5, "not run")
    assert not marks.exists()


def test_code_of_a_checkpoint_that_was_downloaded_before_does_not_run(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``auto_map`` may name any id; Transformers takes its code from the cache of Hugging Face."""
    marks = tmp_path / "it ran"
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(cache_dir()))
    monkeypatch.setenv("HOME", str(tmp_path))
    hub = tmp_path / ".cache" / "huggingface" / "hub" / "models--own--code"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("a" * 40)
    snapshot = hub / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "own.py").write_text(f"open({str(marks)!r}, 'w')\nclass Own: pass\n")
    config = {"auto_map": {"AutoConfig": "own/code--own.Own"}, "model_type": "own"}
    code, document = asked(config, "0.33.0", "--trust-remote-code")
    assert not marks.exists()
    assert (code, document["starts"]) == (5, "not run"), document
    assert "Hugging Face for a file that is not here" in document["reason"], "its HOME is its own"


@pytest.mark.parametrize("name", ["nemotron-3-nano", "nemotron-3-super", "qwen3-30b-a3b"])
def test_layers_of_a_known_model_are_of_its_kinds(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Models.discover().model(name)
    assert run(["preflight", name, "--release", "0.33.0", "--json"]) == 0
    rows = [read(row, LayerRow) for row in json.loads(capfd.readouterr().out)["layers"]]
    families = {kinds_of(row) for row in rows} - {()}
    assert len(families) > 1
    assert all(set(kinds) & model.kinds() for kinds in families)


def test_level_model_on_released_wheels(capfd: pytest.CaptureFixture[str]) -> None:
    """A wrong kernel fails where the release itself starts: b12x is not selected without a flag."""
    words = ("verify", "pypi:vllm==0.33.0", "--level", "model", "--json")
    assert run([*words, "--layers", "b12x-full", "--model", "qwen3-30b-a3b"]) == 0
    checks = json.loads(capfd.readouterr().out)["checks"]
    assert [check["name"] for check in checks] == [
        "qwen3-30b-a3b starts", "qwen3-30b-a3b nvfp4-linear", "qwen3-30b-a3b nvfp4-moe",
    ]  # fmt: skip
    assert checks[2]["seen"] == "48 x model.layers.*.mlp.experts.routed_experts: FLASHINFER_B12X"
    unpatched = ("verify", "pypi:vllm==0.24.0", "--level", "model", "--layers", "b12x-full")
    assert run([*unpatched, "--json", "--model", "qwen3-30b-a3b"]) == 5
    (check,) = json.loads(capfd.readouterr().out)["checks"]
    assert (check["status"], check["name"]) == ("fail", "qwen3-30b-a3b starts")
    assert "no 'flashinfer_b12x' kernel exists for NVFP4 layers" in check["seen"]
    assert check["where"].startswith("vllm/model_executor/")
