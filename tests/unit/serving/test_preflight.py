"""``preflight``: what is made of a release's answers, and what is refused before it is asked."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from builder.cli import preflight as command
from builder.errors import SparkBuildError, UsageError
from builder.proof import wholemodel as asked
from builder.proof.flags import flag_groups
from builder.proof.isolation import SandboxUnavailable
from builder.proof.sandbox import PreparedSandbox, Requirements, Sandbox, Torch
from builder.proof.trust import TrustedSources
from builder.proof.wholemodel import (
    CacheMemory,
    LayerRow,
    ModelAnswer,
    ModelReply,
    Refusal,
    Release,
    Target,
    as_read,
    configuration_of,
    exact_pins,
    not_the_releases,
    own_folder,
    sentence,
)
from builder.serving import preflight as asking
from builder.serving import preflightfile
from builder.serving.memory import GIB
from builder.serving.options import Given
from builder.serving.preflight import (
    Cure,
    ModelMatrix,
    Preflight,
    device_memory,
    expected_speed,
    in_short,
    model_folder,
    refuse_if_it_does_not_start,
    refuse_if_it_starts_nowhere,
    room,
    troubles_of,
    unquantised,
    variables_of,
    was_built,
    with_flags,
)
from tests.unit.fakes import fake_base, vllm_files

if TYPE_CHECKING:
    from pathlib import Path


def layer(**values: Any) -> LayerRow:
    given: dict[str, Any] = {
        "pattern": "model.layers.*.mlp", "layer": "Linear", "quantisation": "Fp8LinearMethod",
        "kernels": (), "attention": "", "experts": None, "count": 1, "bytes": 0, "token_bytes": 0,
        **values,
    }  # fmt: skip
    return LayerRow(**given)


def answer(**values: Any) -> ModelAnswer:
    given: dict[str, Any] = {
        "error": None, "lines": (), "warnings": (), "settings": {}, "layers": (), "caches": (),
        "parameter_bytes": 0, **values,
    }  # fmt: skip
    return ModelAnswer(**given)


def refused(message: str, kind: str = "ValueError") -> Refusal:
    return Refusal(type=kind, message=message, where="vllm/a.py:1 in f", stage="model")


def test_a_token_reads_nothing_of_a_tower() -> None:
    """Otherwise a measurement was above the ceiling: Qwen3.6 35B-A3B, 97.7 and 86.9 tokens/s."""
    parts = {one: as_read(layer(part=one, bytes=9, token_bytes=9)) for one in ("model", "tower")}
    assert [(row.bytes, row.token_bytes) for row in parts.values()] == [(9, 9), (9, 0)]


def document(**values: Any) -> Preflight:
    given: dict[str, Any] = {
        "model": "./m", "served": "./m", "base": "pypi:vllm==0.33.0",
        "packages": {"vllm": "0.33.0"}, "patched": (), "flags": (), "environment": {},
        "starts": "no", "refusal": refused("no kernel"),
        "warnings": (), "lines": (), "settings": {}, "layers": (), "caches": (), "memory": None,
        "simulated": (), **values,
    }  # fmt: skip
    return Preflight(**given)


#: What a release says of its cache: 16 requests fit.
SIZED = CacheMemory(
    refusal=None, requested_bytes=60 * GIB, overhead_bytes=GIB, available_bytes=32 * GIB,
    block_tokens=16, groups=(), blocks=100, context=4096, concurrency=16.0,
    request_bytes=2 * GIB, longest={"1": 4096, "16": 4096, "4": 4096},
)  # fmt: skip
DEVICE = device_memory(None, chosen=True)


def test_memory_is_what_the_release_says() -> None:
    rows = (layer(bytes=10**9, token_bytes=10**9), layer(bytes=9 * 10**9, token_bytes=10**9))
    made = room(answer(layers=rows, parameter_bytes=10**10, memory=SIZED), DEVICE)
    assert made.cache_bytes == SIZED.available_bytes
    assert (made.request_bytes, made.concurrency, made.block_tokens) == (2 * GIB, 16.0, 16)
    assert list(made.longest) == ["1", "4", "16"]
    assert made.ceiling == 136.5
    assert made.sparks is None


@pytest.mark.parametrize(
    ("settings", "experts", "expected"),
    [
        ({}, None, (77.0, 85.0)),
        ({}, (8, 128), (61.0, 70.0)),
        ({"speculative": "mtp"}, None, None),
        ({"tensor_parallel_size": 2}, None, None),
        ({"pipeline_parallel_size": 2}, None, None),
    ],
)
def test_the_expected_speed_is_a_share_of_the_ceiling(
    settings: Any, experts: Any, expected: Any
) -> None:
    assert expected_speed(answer(settings=settings, layers=(layer(experts=experts),)), 100.0) == (
        expected
    )
    assert expected_speed(answer(settings=settings), None) is None


def test_the_stages_of_a_pipeline_run_one_after_another() -> None:
    rows = (layer(bytes=10**9, token_bytes=10**9),)
    one, two = (
        room(answer(layers=rows, settings={"pipeline_parallel_size": stages}), DEVICE).ceiling
        for stages in (1, 2)
    )
    assert (one, two) == (273.0, 136.5)


def test_weights_of_several_machines() -> None:
    made = room(answer(parameter_bytes=200 * GIB, memory=SIZED), DEVICE)
    assert made.sparks == 2


def test_a_cache_that_was_not_sized_says_why() -> None:
    made = room(answer(parameter_bytes=GIB, memory_unknown="a kernel was launched"), DEVICE)
    assert made.not_asked == "a kernel was launched"
    assert made.request_bytes == 0


def test_more_memory_may_be_free_where_somebody_chose_a_share() -> None:
    """0.95 served in logs of GB10s; vLLM's own default, 0.92, ran out in others."""
    free = [device_memory(None, chosen=chosen).free for chosen in (False, True)]
    assert free[0] < 0.92 * 121.69 * GIB
    assert free[1] > 0.95 * 121.69 * GIB


def test_a_smaller_machine_has_less_free() -> None:
    device = device_memory(60 * GIB, chosen=True)
    assert 50 * GIB < device.free < device.total == 60 * GIB


@pytest.mark.parametrize(
    ("values", "settings", "hint"),
    [
        ({"sparks": 4}, {}, "4 GB10s"),
        ({"fraction": 0.92}, {"gpu_memory_utilization": 0.92}, "--gpu-memory-utilization 0.85"),
        ({"fraction": 0.5, "longest": {"1": 5000}}, {}, "--max-model-len 4096"),
        ({"fraction": 0.5, "longest": {"1": 5}}, {}, "smaller checkpoint"),
    ],
)
def test_a_model_that_does_not_fit_is_told_what_to_try(
    values: Any, settings: Any, hint: str
) -> None:
    device = device_memory(None, chosen=False)
    memory = replace(room(answer(), device), **values)
    refusal = Refusal(type="ValueError", message="23.25 GiB KV cache is needed", stage="memory")
    with pytest.raises(SparkBuildError, match="GiB KV cache is needed") as error:
        refuse_if_it_does_not_start(document(refusal=refusal, memory=memory, settings=settings))
    assert error.value.code == 5
    assert hint in str(error.value.hint)


@pytest.mark.parametrize(
    ("stage", "built"),
    [("memory", True), ("loading", True), ("model", False), ("arguments", False)],
)
def test_a_model_that_was_built_has_no_flag_as_its_cure(stage: str, built: bool) -> None:
    """Without any of its flags the release builds it too, which cures nothing."""
    assert was_built(document(refusal=Refusal(type="E", message="m", stage=stage))) is built


def test_weights_that_cannot_be_loaded_are_tried_on_other_releases() -> None:
    refusal = Refusal(type="ValueError", message="in 16 bits", stage="loading")
    refused_document = document(refusal=refusal, memory=room(answer(), DEVICE))
    with pytest.raises(SparkBuildError, match="in 16 bits") as error:
        refuse_if_it_does_not_start(refused_document)
    assert error.value.hint == "spark-build preflight ./m --releases all"


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ({"model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4"}}, "in 16 bits"),
        ({"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}, ""),
        ({}, ""),
    ],
)
def test_experts_that_the_release_builds_unquantised_cannot_be_loaded(
    tmp_path: Path, layers: Any, why: str
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quantized_layers": layers}})
    )
    experts = layer(quantisation="UnquantizedFusedMoEMethod", experts=(8, 128), bytes=60 * GIB)
    refusal = unquantised(tmp_path, answer(layers=(experts,)))
    assert (why in refusal.message) if refusal else not why
    assert unquantised(tmp_path, answer(layers=(replace(experts, quantisation="Fp8"),))) is None


@pytest.mark.parametrize(
    ("kind", "innermost", "said"),
    [
        ("NotImplementedError", "/x/torch/_meta_registrations.py", "torch raised it"),
        ("ValueError", "/x/transformers/configuration_utils.py", "Transformers raised it"),
        ("ValueError", "p.pyz/builder/probes/preflight_probe.py", "a stand-in raised it"),
        ("AttributeError", "/x/vllm/a.py", "a stand-in's fault"),
        ("TypeError", "/x/vllm/a.py", "a stand-in's fault"),
        ("ValueError", "/x/vllm/a.py", ""),
        ("NotImplementedError", "/x/pydantic/a.py", ""),
    ],
)
def test_an_error_of_another_place_is_no_refusal(kind: str, innermost: str, said: str) -> None:
    why = not_the_releases(Refusal(type=kind, message="m", innermost=innermost))
    assert (said in why) if said else not why


@pytest.mark.parametrize(
    ("flags", "more", "together"),
    [
        ((), ("--moe-backend", "marlin"), ("--moe-backend", "marlin")),
        (("--moe-backend", "a"), ("--moe-backend", "b"), ("--moe-backend", "a")),
        (("--moe_backend=a",), ("--moe-backend", "b", "--x"), ("--moe_backend=a", "--x")),
        (("--x",), (), ("--x",)),
    ],
)
def test_the_users_flags_win(flags: Any, more: Any, together: Any) -> None:
    assert with_flags(flags, more) == together


def test_flags_with_their_values() -> None:
    words = ("--a", "1", "2", "--b", "-tp", "2")
    assert flag_groups(words) == [("--a", "1", "2"), ("--b",), ("-tp", "2")]


VALIDATION = """\
2 validation errors for SpeculativeConfig
method
  Input should be 'mtp' [type=literal_error, input_value='mtpp', input_type=str]
    For further information visit https://errors.example.invalid/literal_error
moe_backnd
  Unexpected keyword argument [type=unexpected_keyword_argument, input_value=1, input_type=int]
"""
LISTED = """\
1 validation error for ParallelConfig
  Value error, World size (2) is larger than 1. Using:
- ray, set a.
- multiprocessing, set b. [type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]
"""


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("no kernel\nmore", "no kernel"),
        ("", "ValueError"),
        (VALIDATION, "method: Input should be 'mtp'; moe_backnd: Unexpected keyword argument"),
        (
            LISTED,
            "World size (2) is larger than 1. Using: - ray, set a. - multiprocessing, set b.",
        ),
    ],
)
def test_a_refusal_in_a_sentence(message: str, words: str) -> None:
    assert sentence(refused(message)) == words


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (refused("No module named 'timm'", "ModuleNotFoundError"), "lacks the module timm"),
        (refused("tilelang is required for mhc but is not installed.", "ImportError"), "tilelang"),
        (refused("Can't load image processor for '/x'.", "OSError"), "preprocessor_config.json"),
        (refused("the operator torch.ops._C.x was called; its library is not here"), "operator"),
        (refused("/x/spark-build/torch/a.so: undefined symbol: cudaFoo"), "stand-in failed"),
        (refused("Tensor.item() cannot be called on meta tensors"), "values of weights"),
        (refused("the process ended with signal 11", "Crashed"), "signal 11"),
        (refused("/x does not appear to have a file named own.py. Checkout"), "own.py is not read"),
        (refused("[Errno 28] No space left on device", "OSError"), "No space left on device"),
        (refused("marshal data too short", "EOFError"), "marshal data too short"),
        (refused("please pass trust_remote_code=True"), "code of its own"),
        (refused("We couldn't connect to 'https://hub' to load the files", "OSError"), "not here"),
    ],
)
def test_what_our_sandbox_lacks_is_no_answer(error: Refusal, reason: str) -> None:
    assert reason in asked.not_the_releases(error)


@pytest.mark.parametrize(
    "error",
    [
        None,
        refused("No module named 'vllm.foo'", "ModuleNotFoundError"),
        refused("--linear-backend=x was requested but no 'x' kernel exists for this layer type."),
    ],
)
def test_what_the_release_refuses_is_an_answer(error: Refusal | None) -> None:
    assert asked.not_the_releases(error) == ""


def test_known_troubles() -> None:
    assert not troubles_of((layer(kernels=("MARLIN",)),))
    (one,) = troubles_of((layer(kernels=("DeepGemmFp8BlockScaledMMKernel",)),))
    assert one.kernel == "DeepGEMM"
    assert troubles_of((layer(kernels=("DEEPGEMM",)), layer(kernels=("DEEPGEMM",)))) == (one,)


def test_the_error_says_the_next_command() -> None:
    with pytest.raises(SparkBuildError) as caught:
        refuse_if_it_does_not_start(document(flags=("--x",)))
    assert caught.value.code == 5
    assert str(caught.value) == "./m does not start on vLLM 0.33.0: no kernel"
    assert caught.value.hint.endswith("--base pypi:vllm==0.33.0 --x --layers b12x-full")
    cured = document(cures=(Cure(change="without --x", flags=("--y",)),), flags=("--x", "--y"))
    with pytest.raises(SparkBuildError) as caught:
        refuse_if_it_does_not_start(cured)
    assert caught.value.hint.endswith("--base pypi:vllm==0.33.0 --y")


def test_not_run_is_no_pass() -> None:
    refuse_if_it_does_not_start(document(starts="yes", refusal=None))
    with pytest.raises(SparkBuildError, match=r"was not built with vLLM 0\.33\.0: no") as caught:
        refuse_if_it_does_not_start(document(starts="not run", refusal=None, reason="no torch"))
    assert caught.value.code == 5


def test_an_answer_in_short() -> None:
    rows = (
        layer(kernels=("CUTLASS",), bytes=10),
        layer(kernels=("MARLIN",), experts=(2, 8), bytes=90),
        layer(attention="FLASHINFER"),
        layer(kernels=("TOWER",), part="tower", bytes=99),
        layer(kernels=("DRAFT",), part="draft", bytes=99),
    )
    settings = {"kv_cache_dtype": "fp8_e4m3"}
    short = in_short("0.33.0", document(starts="yes", refusal=None, layers=rows, settings=settings))
    assert (short.linear, short.experts) == (("CUTLASS",), ("MARLIN",))
    assert (short.attention, short.cache) == (("FLASHINFER",), "fp8_e4m3")
    assert (short.starts, short.why) == ("yes", "")
    assert in_short("x", document()).why == "no kernel"
    assert in_short("x", document(starts="not run", reason="no torch")).why == "no torch"
    text = "\n".join(command.choice_lines([short, in_short("0.17.1", document())]))
    assert "CUTLASS; MARLIN; FLASHINFER; fp8_e4m3" in text
    assert "REFUSES  no kernel" in text


def test_a_table_without_a_start_is_a_failure() -> None:
    rows = (in_short("a", document()), in_short("b", document(starts="yes", refusal=None)))
    none = ModelMatrix(model="./m", flags=(), layers=(), rows=rows[:1])
    with pytest.raises(SparkBuildError, match="starts on none of 1 releases") as caught:
        refuse_if_it_starts_nowhere(none)
    assert caught.value.code == 5
    refuse_if_it_starts_nowhere(replace(none, rows=rows))


def test_the_backends_that_a_release_passed_over() -> None:
    line = (
        "Some attention backends are not valid for cuda with X(a=[1]). "
        "Reasons: {FLASH_ATTN: ['compute capability not supported'], TRITON_MLA: ['MLA', 'dtype']}."
    )
    assert answer(refused_attention=(line, line)).passed_over == (
        "FLASH_ATTN: compute capability not supported",
        "TRITON_MLA: MLA, dtype",
    )


def test_variables() -> None:
    assert variables_of(["A=1", "B=x=y"]) == {"A": "1", "B": "x=y"}
    with pytest.raises(UsageError, match="'A' is not NAME=VALUE"):
        variables_of(["A"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory: a model's folder has a config.json"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "names no architecture"),
        ("{}", "names no architecture"),
    ],
)
def test_what_is_no_model(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        own_folder(tmp_path)


def test_only_configuration_reaches_the_release(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "modeling_own.py").write_text("raise SystemExit")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    alone = asked.configuration_alone(own_folder(tmp_path / "config.json"))
    assert [path.name for path in alone.iterdir()] == ["config.json"]
    assert asked.configuration_alone(tmp_path) == alone
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert asked.configuration_alone(tmp_path) != alone


def test_the_releases_own_pins() -> None:
    lines = ["Name: vllm", "Version: 0.20.1"]
    lines += ["Requires-Dist: compressed-tensors==0.15.0.1", "Requires-Dist: lark>=1.2"]
    lines += ["Requires-Dist: six==1.0; python_version > '3.11'", "Requires-Dist: ???"]
    files = {**vllm_files(), "vllm-0.20.1.dist-info/METADATA": "\n".join(lines).encode()}
    target = Target.of(fake_base(files, "pypi"))
    assert exact_pins(target.tree) == {"compressed-tensors": "0.15.0.1"}


def a_sandbox(folder: Path) -> PreparedSandbox:
    packages = Requirements(
        name="x", packages=(), needs_dsl=False, pretend_triton=False, megabytes=0
    )
    torch = Torch(folder=folder / "torch", version="2.9.0", what="a torch")
    return PreparedSandbox(sandbox=Sandbox(packages), torch=torch, paths=(torch.folder,))


def test_a_damaged_copy_of_a_configuration_is_written_again() -> None:
    folder = configuration_of({"config.json": b"{}"})
    (folder / "config.json").write_bytes(b"{")
    assert configuration_of({"config.json": b"{}"}) == folder
    assert [(one.name, one.read_bytes()) for one in folder.iterdir()] == [("config.json", b"{}")]


def a_release(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Release, list[Any]]:
    """A release whose probe answers that the model starts, and the requests that it was sent."""
    requests: list[Any] = []

    def reply(
        _python: Path, header: Any, questions: Any, *_: object, **_more: object
    ) -> ModelReply:
        requests.append({**header, "questions": questions})
        return ModelReply(answers=(answer(),) * len(questions))

    prepared = a_sandbox(folder)
    monkeypatch.setattr(asked, "ask_server", reply)
    monkeypatch.setattr(asked, "make", lambda *_: prepared)
    monkeypatch.setattr(asked, "model_packages", lambda *_: folder / "more")
    monkeypatch.setattr(asked, "transformers_of", lambda *_: folder / "transformers")
    trust = TrustedSources(everything=True)
    return Release(Target.of(fake_base(vllm_files(), "pypi")), trust), requests


@pytest.mark.parametrize(
    ("vllm", "version"), [("0.26.0", "transformers==5.14.1"), ("0.33.0", None), ("0.17.1", None)]
)
def test_a_model_is_built_with_the_transformers_of_the_releases_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm: str, version: str | None
) -> None:
    installed: list[list[str]] = []
    monkeypatch.setattr(asked, "_installed", lambda _, __, wanted, ___: installed.append(wanted))
    asked.transformers_of(a_sandbox(tmp_path), vllm)
    assert [wanted[0] for wanted in installed] == ([version] if version else [])


def test_python_imports_nothing_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders of a request are first on sys.path, and their .pth files are run."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (checkpoint / "own.pth").write_text("import sys; sys.exit('run')")
    (checkpoint / "tokenize.py").write_text("raise SystemExit")
    release, requests = a_release(tmp_path, monkeypatch)
    release.ask(own_folder(checkpoint), [()])
    (request,) = requests
    assert str(checkpoint) not in json.dumps(request)
    (question,) = request["questions"]
    assert question["models"] == [question["model"]], "an isolated run reads it"


@pytest.mark.parametrize("draft", [False, True])
def test_a_billion_layers_are_not_asked_for(
    draft: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, layers in (("small", 2), ("endless", 10**9)):
        (tmp_path / name).mkdir()
        config = {"model_type": "llama", "num_hidden_layers": layers}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    release, requests = a_release(tmp_path, monkeypatch)
    model = tmp_path / ("small" if draft else "endless")
    named = json.dumps({"model": str(tmp_path / "endless")})
    flags = ("--speculative-config", named) if draft else ()
    with pytest.raises(SandboxUnavailable, match="num_hidden_layers is 1000000000"):
        release.ask(model, [flags])
    assert requests == []


def test_configuration_is_bounded_and_a_regular_file(tmp_path: Path) -> None:
    """A pipe never ends and a device never stops: neither is read, nor a file without end."""
    file = tmp_path / "config.json"
    file.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=r"config\.json.*not a regular file"):
        own_folder(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UsageError, match=r"config\.json.*not a regular file"):
        own_folder(tmp_path)
    file.unlink()
    file.write_text(json.dumps({"model_type": "llama"}))
    with (tmp_path / "model.safetensors.index.json").open("wb") as large:
        large.truncate(1 << 30)
    with pytest.raises(UsageError, match=r"index\.json.*64 MiB, which is the limit"):
        asked.configuration_alone(own_folder(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "hf_quant_config.json").symlink_to("gone")
    with pytest.raises(UsageError, match=r"hf_quant_config\.json: No such file or directory$"):
        asked.configuration_alone(own_folder(tmp_path))
    os.truncate(file, 1 << 30)
    with pytest.raises(UsageError, match=r"config\.json.*64 MiB, which is the limit"):
        own_folder(tmp_path)


@pytest.mark.parametrize("model", ["~nobody-of-that-name/x", "./a\0b"])
def test_a_path_that_cannot_be(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, _ = a_release(tmp_path, monkeypatch)
    with pytest.raises(UsageError):
        model_folder(release, model, ())


def test_a_variable_of_an_image_writes_no_line_of_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = document(environment={"VLLM_X": "1\nstarts: the release built the model\n  it starts"})
    monkeypatch.setattr(asking, "preflight", lambda _: forged)
    monkeypatch.setattr(preflightfile, "request_of", lambda _: None)
    with pytest.raises(SparkBuildError):
        command.preflight(Given(model="m"))
    out = capsys.readouterr().out
    assert "DOES NOT START" in out
    assert "VLLM_X" in out
    assert not [line for line in out.splitlines() if line.lstrip().startswith(("starts", "it st"))]


@pytest.mark.parametrize(
    "error",
    [
        refused("the process ended with signal 9", "Crashed"),
        refused("We couldn't connect to 'https://hub' to load the files", "OSError"),
    ],
)
def test_what_was_not_run_is_asked_again(
    error: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may depend on what else runs, or on what was downloaded."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": error.type}))
    release, requests = a_release(tmp_path, monkeypatch)
    killed = answer(error=error)
    with monkeypatch.context() as patch:
        patch.setattr(asked, "ask_server", lambda *_, **_more: ModelReply(answers=(killed,)))
        (first,) = release.ask(tmp_path, [()])
    assert first.error == killed.error
    (second,) = release.ask(tmp_path, [()])
    assert (second.error, second.kept) == (None, False)
    (third,) = release.ask(tmp_path, [()])
    assert third.kept
    assert len(requests) == 1


def test_an_answer_from_the_cache_is_named() -> None:
    assert not any("cached" in line for line in command._lines(document()))
    assert any("cached" in line for line in command._lines(document(cached=True)))
