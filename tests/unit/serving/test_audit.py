"""The audit of a model: by headers, by a model's file, and by what vLLM wrote."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.serving.audit import AuditRequest, audit, write_inside
from tests.documents import validated

from .checkpoints import DENSE, checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from builder.serving.audit import Audit
    from tests.unit.caller import Call

    Tensors = Mapping[str, tuple[str, list[int]]]


def nvfp4(name: str, size: int = 512, *, a16: bool = False) -> dict[str, tuple[str, list[int]]]:
    """An NVFP4 layer as ModelOpt writes it."""
    made: dict[str, tuple[str, list[int]]] = {
        f"{name}.weight": ("U8", [size]), f"{name}.weight_scale": ("F8_E4M3", [size // 8]),
        f"{name}.weight_scale_2": ("F32", []),
    }  # fmt: skip
    return made if a16 else made | {f"{name}.input_scale": ("F32", [])}


def fp8(name: str, scale: str = "weight_scale") -> dict[str, tuple[str, list[int]]]:
    return {f"{name}.weight": ("F8_E4M3", [64]), f"{name}.{scale}": ("F32", [])}


def bf16(*names: str, size: int = 100) -> dict[str, tuple[str, list[int]]]:
    return {f"{name}.weight": ("BF16", [size]) for name in names}


NEMOTRON: dict[str, tuple[str, list[int]]] = {
    **bf16("backbone.embeddings", "lm_head", "backbone.norm_f"),
    **nvfp4("backbone.layers.0.mixer.in_proj", a16=True),
    "backbone.layers.0.mixer.A_log": ("F32", [4]),
    **bf16("backbone.layers.0.mixer.conv1d", "backbone.layers.0.norm"),
    **fp8("backbone.layers.1.mixer.q_proj"),
    **bf16("backbone.layers.2.mixer.gate"),
    **nvfp4("backbone.layers.2.mixer.experts.0.up_proj"),
    **nvfp4("backbone.layers.2.mixer.experts.1.up_proj"),
    **bf16("backbone.layers.2.mixer.shared_experts.up_proj", size=400),
    **bf16("mtp.layers.0.mixer.q_proj"),
}
HYBRID = {
    "num_hidden_layers": 3, "hybrid_override_pattern": "M*E", "n_routed_experts": 2,
    "num_experts_per_tok": 1,
}  # fmt: skip
QWEN: dict[str, tuple[str, list[int]]] = {
    **bf16("model.language_model.embed_tokens", "lm_head"),
    **bf16("model.language_model.layers.0.linear_attn.in_proj_qkv", size=300),
    **bf16("model.language_model.layers.0.mlp.shared_expert.up_proj"),
    **nvfp4("model.language_model.layers.0.mlp.experts.0.up_proj"),
    **bf16("model.visual.blocks.0.attn.qkv"),
}
QWEN_CONFIG = {"text_config": {"num_hidden_layers": 1, "num_experts": 1}}
GEMMA: dict[str, tuple[str, list[int]]] = {
    **bf16("model.language_model.embed_tokens", "model.vision_tower.encoder.layers.0.mlp.up_proj"),
    "model.language_model.layers.0.mlp.up_proj.weight_packed": ("U8", [512]),
    "model.language_model.layers.0.mlp.up_proj.weight_scale": ("F8_E4M3", [64]),
    "model.language_model.layers.0.mlp.up_proj.weight_global_scale": ("F32", [1]),
    "model.language_model.layers.0.mlp.up_proj.input_global_scale": ("F32", [1]),
}
GPT_OSS: dict[str, tuple[str, list[int]]] = {
    **bf16("model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj"),
    "model.layers.0.mlp.experts.gate_up_proj_blocks": ("U8", [512]),
    "model.layers.0.mlp.experts.gate_up_proj_scales": ("U8", [32]),
    "model.layers.0.mlp.experts.gate_up_proj_bias": ("BF16", [8]),
}
GPT_OSS_CONFIG = DENSE | {"num_local_experts": 128, "num_experts_per_tok": 4}


def of(folder: Path, **options: Any) -> Audit:
    return audit(AuditRequest(subject=str(folder), **options))


def kinds(made: Audit) -> dict[str, int | None]:
    return {method.name: method.modules for method in made.methods}


def test_a_mixed_hybrid_checkpoint(tmp_path: Path) -> None:
    made = of(checkpoint(tmp_path, NEMOTRON, HYBRID))
    assert kinds(made) == {
        "unquantized": 9, "nvfp4-moe": 2, "w4a16-linear": 1, "fp8-linear": 1
    }  # fmt: skip
    assert made.ceiling is not None
    experts, in_proj, q_proj = 2 * (512 + 64 + 8) // 2, 512 + 64 + 4, 68
    plain = 2 * (100 * 5 + 400) + 16
    assert made.ceiling.bytes_per_token == experts + in_proj + q_proj + plain
    first, *_ = made.kept
    assert (first.name, first.layers, first.modules, first.read) == (
        "backbone.layers.*.mixer.shared_experts.up_proj", "2", 1, 800,
    )  # fmt: skip
    assert first.share == round(800 / made.ceiling.bytes_per_token, 4)
    held = {row.name: (row.group, row.read) for row in made.kept}
    assert held["backbone.embeddings"] == ("embedding", 0)
    assert held["mtp.layers.*.mixer.q_proj"] == ("draft layers", 0)
    assert made.bytes == sum(method.bytes or 0 for method in made.methods)


@pytest.mark.parametrize(
    ("tensors", "config", "expected"),
    [
        (QWEN, QWEN_CONFIG, {"unquantized": 5, "nvfp4-moe": 1}),
        (GEMMA, {"text_config": DENSE}, {"unquantized": 2, "nvfp4-linear": 1}),
        (GPT_OSS, GPT_OSS_CONFIG, {"unquantized": 3, "mxfp4-moe": 1}),
        (fp8("a.q_proj", "weight_scale_inv"), None, {"fp8-block": 1}),
        ({"a.weight": ("F8_E4M3", [64]), "a.weight_scale": ("U8", [2])}, None, {"mxfp8-linear": 1}),
        ({"a.qweight": ("U8", [64]), "a.zeros": ("F32", [1])}, None, {"other: F32, U8": 1}),
    ],
)
def test_kinds_by_the_headers(
    tmp_path: Path, tensors: Tensors, config: dict[str, Any] | None, expected: dict[str, int]
) -> None:
    assert kinds(of(checkpoint(tmp_path, tensors, config))) == expected


def test_a_tied_embedding_is_read_and_a_vision_tower_is_not(tmp_path: Path) -> None:
    made = of(checkpoint(tmp_path, GEMMA, {"text_config": DENSE}))
    read = {row.name: row.read for row in made.kept}
    assert read == {
        "model.language_model.embed_tokens": 200,
        "model.vision_tower.encoder.layers.*.mlp.up_proj": 0,
    }


def test_the_same_name_in_many_layers_is_one_row(tmp_path: Path) -> None:
    names = [f"model.layers.{n}.self_attn.o_proj" for n in (0, 1, 2, 5)]
    (row,) = of(checkpoint(tmp_path, bf16(*names), None)).kept
    assert (row.name, row.layers, row.modules) == ("model.layers.*.self_attn.o_proj", "0-2, 5", 4)


def test_without_a_config_the_share_of_experts_is_unknown(tmp_path: Path) -> None:
    made = of(checkpoint(tmp_path, NEMOTRON, None))
    assert made.ceiling is None
    assert made.unknown == ("ceiling: no config.json gives the number of experts per token",)
    assert all(row.share is None for row in made.kept)


def test_a_model_file_gives_kinds_and_their_sources() -> None:
    made = of("nemotron-3-super")  # type: ignore[arg-type]
    assert kinds(made) == dict.fromkeys(
        ("nvfp4-moe", "nvfp4-linear", "fp8-linear", "w4a16-linear"), None
    )
    assert all(method.source for method in made.methods)
    assert made.ceiling is not None
    assert made.kept == ()
    assert "a checkpoint does" in made.unknown[-1]


# -- what vLLM loaded


def row(name: str, kind: str = "ColumnParallelLinear", **more: Any) -> dict[str, Any]:
    return {"name": name, "class": kind, "bytes": {"bfloat16": 200}, **more}


def quantised(name: str, **more: Any) -> dict[str, Any]:
    parts = {"uint8": 512, "float8_e4m3fn": 64, "float32": 8}
    return row(name, bytes=parts, method="ModelOptLinearMethod", **more)


PLAIN = {"method": "UnquantizedLinearMethod"}
LOADED: dict[str, Any] = {
    "schema": 1, "vllm": "0.33.0", "model": "me/hybrid", "architecture": "NemotronHForCausalLM",
    "rank": 0, "world_size": 1, "packed": {"qkv_proj": ["q_proj", "k_proj", "v_proj"]},
    "modules": [
        row("model.embed_tokens", "VocabParallelEmbedding", method="UnquantizedEmbeddingMethod"),
        row("lm_head", "ParallelLMHead", **PLAIN),
        row("model.norm_f", "RMSNorm"),
        quantised("model.layers.0.mixer.in_proj", kernel="MarlinNvFp4LinearKernel"),
        row("model.layers.0.mixer", "MambaMixer2", bytes={"float32": 16}),
        row("model.layers.0.mixer.conv1d", **PLAIN),
        row("model.layers.0.norm", "RMSNorm"),
        row("model.layers.1.mixer.qkv_proj", bytes={"float8_e4m3fn": 64, "float32": 4},
            method="ModelOptLinearMethod", kernel="CutlassFP8ScaledMMLinearKernel"),
        row("model.layers.2.mixer.gate", "ReplicatedLinear", **PLAIN),
        quantised("model.layers.2.mixer.experts.routed_experts", experts=[1, 2]),
        row("model.layers.2.mixer.experts.shared_experts.up_proj",
            bytes={"bfloat16": 800}, **PLAIN),
        row("model.layers.0.rotary", "RotaryEmbedding", bytes={}, buffers=5000),
    ],
}  # fmt: skip


def loaded(tmp_path: Path, **changed: Any) -> Path:
    path = tmp_path / "audit.json"
    document = LOADED | {"modules": [changed.pop(m["name"], m) for m in LOADED["modules"]]}
    path.write_text(json.dumps(document | changed))
    return path


def test_a_loaded_model(tmp_path: Path) -> None:
    validated("audit-loaded", LOADED)
    made = of(loaded(tmp_path))
    assert (made.source, made.vllm, made.model) == ("vllm", "0.33.0", "me/hybrid")
    assert made.buffers == 5000
    assert {(m.name, m.kernel) for m in made.methods} == {
        ("UnquantizedEmbeddingMethod", ""), ("UnquantizedLinearMethod", ""),
        ("ModelOptLinearMethod", "MarlinNvFp4LinearKernel"), ("ModelOptLinearMethod", ""),
        ("ModelOptLinearMethod", "CutlassFP8ScaledMMLinearKernel"),
        ("no method: RMSNorm", ""), ("no method: MambaMixer2", ""),
    }  # fmt: skip
    assert made.ceiling is not None
    assert made.ceiling.bytes_per_token == 5 * 200 + 800 + 584 + 584 // 2 + 68 + 16, (
        "half of the experts, no embedding, no buffers"
    )
    assert made.kept[0].name == "model.layers.*.mixer.experts.shared_experts.up_proj"


def test_an_output_head_that_is_the_embedding_is_read_once(tmp_path: Path) -> None:
    head = row("lm_head", "ParallelLMHead", bytes={}, shares="model.embed_tokens", **PLAIN)
    made = of(loaded(tmp_path, lm_head=head))
    read = {kept.name: kept.read for kept in made.kept}
    assert read["model.embed_tokens"] == 200
    assert "lm_head" not in read


def test_a_loaded_model_that_is_as_its_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "hybrid", NEMOTRON, HYBRID)
    made = of(loaded(tmp_path), against=folder).compared
    assert made is not None
    assert made.differences == ()
    assert made.same == 11
    assert [one.name for one in made.only_checkpoint] == ["mtp.layers.*.mixer.q_proj"]
    assert made.only_loaded == ()


def test_names_that_vllm_changes(tmp_path: Path) -> None:
    """gpt-oss: self_attn of the checkpoint is attn in vLLM, which says so itself."""
    folder = checkpoint(tmp_path / "oss", GPT_OSS, GPT_OSS_CONFIG)
    path = tmp_path / "oss.json"
    modules = [
        row("model.embedding", "VocabParallelEmbedding"), row("lm_head", "ParallelLMHead"),
        row("model.layers.0.attn.qkv_proj", **PLAIN),
        quantised("model.layers.0.mlp.experts.routed_experts", experts=[4, 128]),
    ]  # fmt: skip
    names = {"substr": {".self_attn.": ".attn."}, "prefix": {"transformer.": "model."}}
    path.write_text(json.dumps(LOADED | {"modules": modules, "renamed": names}))
    made = of(path, against=folder).compared
    assert made is not None
    assert (made.same, made.only_checkpoint, made.only_loaded) == (4, (), ())
    path.write_text(json.dumps(LOADED | {"modules": modules}))
    made = of(path, against=folder).compared
    assert made is not None
    assert [one.name for one in made.only_loaded] == ["model.layers.*.attn.qkv_proj"]


def test_layers_that_only_one_of_them_quantises(call: Call, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "hybrid", NEMOTRON, HYBRID)
    kept = "model.layers.1.mixer.qkv_proj"
    shared = "model.layers.2.mixer.experts.shared_experts.up_proj"
    path = loaded(tmp_path, **{kept: row(kept, **PLAIN), shared: quantised(shared)})
    result = call("audit", path, "--against", folder, "--json")
    assert result.code == 5
    document = validated("audit", result.json)
    assert "vLLM 0.33.0 has 1 module in 16 bits" in document["error"]["message"]
    assert "model.layers.*.mixer.qkv_proj" in document["error"]["message"]
    told = {(o["name"], o["what"]): o for o in document["compared"]["differences"]}
    assert told.keys() == {
        ("model.layers.*.mixer.qkv_proj", "not quantised in vLLM"),
        ("model.layers.*.mixer.experts.shared_experts.up_proj", "quantised by vLLM"),
    }
    assert told["model.layers.*.mixer.qkv_proj", "not quantised in vLLM"]["checkpoint"] == (
        "fp8-linear"
    )
    text = call("audit", path, "--against", folder).out
    assert (
        "  not quantised in vLLM: model.layers.*.mixer.qkv_proj, layers 1: 1 module, 0.000 GiB; "
        "fp8-linear in the checkpoint, UnquantizedLinearMethod in vLLM\n"
    ) in text


def test_layers_that_only_vllm_quantises_are_no_failure(call: Call, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "hybrid", NEMOTRON, HYBRID)
    shared = "model.layers.2.mixer.experts.shared_experts.up_proj"
    result = call("audit", loaded(tmp_path, **{shared: quantised(shared)}), "--against", folder)
    assert result.code == 0
    assert "  quantised by vLLM: " in result.out


# -- the command


def test_the_command_says_what_bounds_the_speed(call: Call, tmp_path: Path) -> None:
    result = call("audit", checkpoint(tmp_path / "hybrid", NEMOTRON, HYBRID))
    assert result.code == 0
    assert "not quantised: 60% of what a token reads\n" in result.out
    assert "  backbone.layers.*.mixer.shared_experts.up_proj  " in result.out
    assert "ceiling: " in result.out
    document = call("audit", tmp_path / "hybrid", "--json").json
    assert validated("audit", document)["source"] == "headers"
    assert "\nweights: 69.500 GiB\n" in call("audit", "nemotron-3-super").out
    own = tmp_path / "own"
    own.mkdir()
    figures = "[parameters]\nvalue = 30_000_000_000\nsource = 'x'\n"
    kind = "[[holds]]\nkind = 'nvfp4-moe'\nsource = 'x'\n"
    (own / "mine.toml").write_text(
        f"summary = 'x'\n[id]\nvalue = 'a/b'\nsource = 'x'\n{kind}{figures}"
    )
    assert "\nweights: at least 15.716 GiB\n" in call("audit", "mine", "--models", own).out
    validated("audit", call("audit", "nemotron-3-super", "--json").json)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a file that spark_build_audit.py wrote: it is not valid JSON\n"),
        ("{x", "is not a file that spark_build_audit.py wrote: it is not valid JSON\n"),
        ("{}", "missing required field `schema`"),
        ('{"schema": 2}', "Invalid enum value 2"),
        (json.dumps(LOADED | {"modules": []}), "length >= 1 - at `$.modules`"),
        (json.dumps(LOADED | {"modules": [{"name": "a"}]}), "at `$.modules[0]`"),
        ("[" * 100_000, "is not a file that spark_build_audit.py wrote"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    call: Call, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "x.json").write_text(text)
    result = call("audit", tmp_path / "x.json")
    assert result.code == 2
    assert words in result.err
    assert "try: spark-build audit --inside DIR" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to audit"),
        (("./missing",), "./missing does not exist"),
        (("nemotron-3-supr",), "did you mean 'nemotron-3-super'"),
        (("no/where",), "'no/where' is neither a folder nor a model"),
        (("nemotron-3-super", "--against", "."), "is not a file that spark_build_audit.py wrote"),
        (("x", "--inside", "y"), "--inside only writes files, so x would not be audited"),
    ],
)
def test_wrong_use_is_refused(call: Call, words: tuple[str, ...], message: str) -> None:
    result = call("audit", *words)
    assert (result.code, message in result.err) == (2, True)
    assert "try: " in result.err


def test_against_what_is_no_folder_is_refused(call: Call, tmp_path: Path) -> None:
    result = call("audit", loaded(tmp_path), "--against", tmp_path / "none")
    assert result.code == 2
    assert "is not a folder" in result.err


def test_what_runs_inside_is_a_distribution_with_a_plugin(call: Call, tmp_path: Path) -> None:
    result = call("audit", "--inside", tmp_path / "in side", "--json")
    assert len(validated("audit", result.json)["written"]) == 3
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "in side")])
    assert found.metadata["Name"] == "spark-build-audit"
    (entry,) = found.entry_points
    assert (entry.group, entry.value) == ("vllm.general_plugins", "spark_build_audit:register")
    parser = configparser.ConfigParser()
    parser.read_string(found.read_text("entry_points.txt") or "")
    script = tmp_path / "in side" / "spark_build_audit.py"
    assert script.stat().st_mode & 0o111
    assert "def register()" in script.read_text()
    assert (
        f"-v '{tmp_path / 'in side'}:/audit'" in call("audit", "--inside", tmp_path / "in side").out
    )


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, call: Call) -> None:
    (tmp_path / "file").write_text("")
    result = call("audit", "--inside", tmp_path / "file")
    assert result.code == 2
    assert "cannot be written" in result.err


def test_write_inside_twice_is_the_same(tmp_path: Path) -> None:
    assert write_inside(tmp_path) == write_inside(tmp_path)
