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
from builder.proof.sandbox import PreparedSandbox, Requirements, Sandbox, Torch
from builder.proof.trust import TrustedSources
from builder.proof.wholemodel import (
    CacheRow,
    LayerRow,
    ModelAnswer,
    ModelReply,
    Refusal,
    Release,
    Target,
    as_read,
    configuration_of,
    exact_pins,
    own_folder,
    sentence,
)
from builder.serving import preflight as asking
from builder.serving import preflightfile
from builder.serving.options import Given
from builder.serving.preflight import (
    Cure,
    ModelMatrix,
    Preflight,
    flag_groups,
    in_short,
    longest_context,
    model_folder,
    refuse_if_it_does_not_start,
    refuse_if_it_starts_nowhere,
    room,
    troubles_of,
    variables_of,
    with_flags,
)
from tests.unit.fakes import fake_base, vllm_files

if TYPE_CHECKING:
    from pathlib import Path

FULL = CacheRow(kind="FullAttentionSpec", block_tokens=16, block_bytes=1600, window=None, count=2)
WINDOW = CacheRow(kind="SlidingWindowSpec", block_tokens=16, block_bytes=1600, window=32, count=1)
STATE = CacheRow(kind="MambaSpec", block_tokens=4096, block_bytes=5000, window=None, count=3)


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
        "model": "./m", "base": "pypi:vllm==0.33.0", "packages": {"vllm": "0.33.0"}, "patched": (),
        "flags": (), "environment": {}, "starts": "no", "refusal": refused("no kernel"),
        "warnings": (), "lines": (), "settings": {}, "layers": (), "caches": (), "memory": None,
        "simulated": (), **values,
    }  # fmt: skip
    return Preflight(**given)


@pytest.mark.parametrize(
    ("row", "tokens", "size"),
    [
        (FULL, 1, 3200),
        (FULL, 16, 3200),
        (FULL, 17, 6400),
        (WINDOW, 16, 1600),
        (WINDOW, 10_000, 4800),
        (STATE, 1, 15_000),
        (STATE, 100_000, 15_000),
    ],
)
def test_bytes_of_caches(row: CacheRow, tokens: int, size: int) -> None:
    assert row.bytes_for(tokens) == size


def test_the_longest_context_is_the_last_that_fits() -> None:
    caches = (FULL, WINDOW, STATE)
    least = sum(row.bytes_for(1) for row in caches)
    assert longest_context(caches, least - 1, 10**6) == 0
    assert longest_context(caches, least, 10**6) == 16
    assert longest_context(caches, 10**12, 4096) == 4096
    fits = longest_context(caches, 10**6, 10**6)
    assert sum(row.bytes_for(fits) for row in caches) <= 10**6
    assert sum(row.bytes_for(fits + 1) for row in caches) > 10**6


def test_memory_of_a_model() -> None:
    rows = (layer(bytes=10**9, token_bytes=10**9), layer(bytes=9 * 10**9, token_bytes=10**9))
    made = room(
        answer(
            layers=rows, parameter_bytes=10**10, caches=(FULL,),
            settings={"gpu_memory_utilization": 0.5, "max_model_len": 4096},
        )
    )  # fmt: skip
    assert made.cache_bytes == int(made.total_bytes * 0.5) - 10**10 - made.overhead_bytes
    assert made.ceiling == 136.5
    assert made.longest == {"1": 4096, "4": 4096, "16": 4096}
    full = room(answer(parameter_bytes=10**12, caches=(FULL,)))
    assert full.cache_bytes < 0
    assert full.longest == {"1": 0, "4": 0, "16": 0}


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

    packages = Requirements(
        name="x", packages=(), needs_dsl=False, pretend_triton=False, megabytes=0
    )
    torch = Torch(folder=folder / "torch", version="2.9.0", what="a torch")
    prepared = PreparedSandbox(sandbox=Sandbox(packages), torch=torch, paths=(torch.folder,))
    monkeypatch.setattr(asked, "ask_server", reply)
    monkeypatch.setattr(asked, "make", lambda *_: prepared)
    monkeypatch.setattr(asked, "model_packages", lambda *_: folder / "more")
    trust = TrustedSources(everything=True)
    return Release(Target.of(fake_base(vllm_files(), "pypi")), trust), requests


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
