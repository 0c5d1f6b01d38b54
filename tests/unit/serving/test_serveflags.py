"""What a release understands, read from source that is written as vLLM's is."""

from __future__ import annotations

import pytest

from builder.errors import UsageError
from builder.serving.serveflags import ServeInterface, read_interface

from .release import ARG_UTILS, ARGPARSE_UTILS, CLI_ARGS, KERNEL, PARSERS, SERVE, Files, files


def read(changed: dict[str, str] | None = None) -> ServeInterface:
    return read_interface(Files(files(changed)).read, "1.2.3")


@pytest.fixture(scope="module")
def release() -> ServeInterface:
    return read()


def test_all_flags_are_found_and_nothing_else(release: ServeInterface) -> None:
    assert {flag.names[0] for flag in release.flags} == {
        "--headless", "--api-server-count", "--lora-modules", "--chat-template-kwargs",
        "--enable-auto-tool-choice", "--tool-call-parser", "--port", "--allowed-origins",
        "--model", "--quantization", "--max-model-len", "--max-num-queued-tokens",
        "--kv-cache-memory-bytes", "--load-format", "--tokenizer-mode", "--attention-backend",
        "--old-way", "--hf-token",
        "--tensor-parallel-size", "--ids", "--pair", "--backend", "--moe-backend", "--nested",
        "--shade", "--device", "--disable-log-stats", "--enable-log-requests",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "takes", "kind", "choices"),
    [
        ("--headless", "nothing", "true-or-false", ()),
        ("-asc", "one", "integer", ()),
        ("--lora-modules", "many", "text", ()),
        ("--chat-template-kwargs", "one", "json", ()),
        ("--allowed-origins", "one", "json", ()),
        ("--quantization", "one", "text", ()),
        ("--max-model-len", "one", "size-or-auto", ()),
        ("--max-num-queued-tokens", "one", "size", ()),
        ("--kv-cache-memory-bytes", "one", "size", ()),
        ("--hf-token", "optional", "text", ()),
        ("-tp", "one", "integer", ()),
        ("--ids", "many", "integer", ()),
        ("--pair", 2, "integer", ()),
        ("--backend", "one", "text", ("mp", "ray")),
        ("--moe-backend", "one", "text", ("auto", "flashinfer_b12x", "marlin")),
        ("--nested", "one", "object", ()),
        ("--shade", "one", "text", ("dark", "light")),
        ("--device", "one", "text", ()),
        ("--enable-log-requests", "nothing", "true-or-false", ()),
    ],
)
def test_what_a_flag_takes(
    release: ServeInterface, name: str, takes: str | int, kind: str, choices: tuple[str, ...]
) -> None:
    flag = release.flag(name)
    assert flag is not None
    assert (flag.takes, flag.kind, flag.choices) == (takes, kind, choices)


def test_a_switch_has_the_names_that_the_release_gives_it(release: ServeInterface) -> None:
    older, newer = release, read({"utils/argparse_utils": ARGPARSE_UTILS})
    for one, off in ((older, ("--no-enable-log-requests",)),
                     (newer, ("--no-enable-log-requests", "--disable-log-requests"))):  # fmt: skip
        flag = one.flag("--enable-log-requests")
        assert flag is not None
        assert flag.off == off
    assert older.flag("--no-headless") is None  # store_true has no such form


def test_a_deprecated_flag_says_so(release: ServeInterface) -> None:
    assert [f.names[0] for f in release.flags if f.deprecated] == ["--old-way"]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("--max-model-len", "200000", ""),
        ("--max_model_len", "1M", ""),
        ("--max-model-len", "auto", ""),
        ("--max-model-len", "long", "takes a whole number, one like 4k, or auto, not 'long'"),
        ("--max-model-len", None, "needs a value"),
        ("--headless", None, ""),
        ("--headless", "yes", "takes no value"),
        ("--hf-token", None, ""),
        ("--moe-backend", "flashinfer-b12x", ""),
        ("--moe-backend", "b12x", "has no value 'b12x' (it has auto, flashinfer_b12x, marlin)"),
        ("--backend", "MP", "has no value 'MP'"),
        ("--nested", '{"depth": 2}', ""),
        ("--nested", '{"depth": 2k}', ""),
        ("--nested", "", ""),
        ("--nested", "[2]", "takes a JSON object"),
        ("--nested", "{depth: 2}", "takes a JSON object"),
        ("--chat-template-kwargs", "[2]", ""),
        ("--chat-template-kwargs", "{depth: 2}", "takes JSON"),
        ("-asc", "4k", "takes a whole number, not '4k'"),
        ("--max-num-queued-tokens", "None", ""),
        ("--max-num-queued-tokens", "auto", "takes a whole number, or one like 4k"),
        ("--max-num-queued-tokens", "2.5k", ""),
        ("--max-num-queued-tokens", "2.5K", "takes a whole number, or one like 4k"),
        ("--max-model-len", "None", "or auto, not 'None'"),
        ("--nested.depth", "2", ""),
        ("--nested.level", "2", ""),
        ("--nested.dept", "2", "--nested of vLLM 1.2.3 has no key dept; did you mean 'depth'?"),
        ("--nested.inner.level", "2", ""),
        ("--nested.inner.depth", "2", "has no key inner.depth"),
        ("--nested.shade", "dim", "has no value 'dim' for shade (it has dark, light)"),
        ("--nested", '{"depth": 1, "inner": {"level": 2}, "shade": null}', ""),
        ("--nested", '{"inner": {"levle": 2}}', "has no key inner.levle; did you mean 'level'?"),
        ("--nested", '{"shade": "drak"}', "did you mean 'dark'? (it has dark, light)"),
        ("--nested", '{"counted": 1}', "has no key counted"),
        ("--nested", '{"computed": 1}', "has no key computed"),
        ("--chat-template-kwargs.any", "1", ""),
        ("--port.x", "2", "takes no keys"),
        ("--backend.x", "2", "takes no keys"),
        ("--load-format.x", "2", "takes no keys"),
        ("--model.rope_scaling.factor", "2", ""),
        ("--quantization", "modelop", "did you mean 'modelopt'? (it has fp8, modelopt)"),
        ("--quantization", "MODELOPT", ""),
        ("--quantization", "None", ""),
        ("--quantization", "my.quantization.Method", ""),
        ("--load-format", "dummmy", "did you mean 'dummy'?"),
        ("--tokenizer-mode", "of_the_registry", ""),
        ("--attention-backend", "flash_attn", ""),
        ("--attention-backend", "auto", ""),
        ("--attention-backend", "flash", "(it has auto, FLASH_ATTN, TRITON_ATTN)"),
        ("--max-model-length", "1", "has no flag --max-model-length; did you mean"),
    ],
)
def test_refusals(release: ServeInterface, name: str, value: str | None, why: str) -> None:
    said = release.refusal(name, value)
    assert why in said
    assert bool(said) == bool(why)
    assert "1.2.3" in said or not said


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("VLLM_HOST_IP", "10.0.0.1", ""),
        ("VLLM_NVFP4_GEMM_BACKEND", "marlin", ""),
        ("VLLM_NVFP4_GEMM_BACKEND", "b12x", "has no value 'b12x'"),
        ("VLLM_NVFP4_GEM_BACKEND", "marlin", "did you mean 'VLLM_NVFP4_GEMM_BACKEND'?"),
        ("HF_TOKEN", "x", ""),
    ],
)
def test_variables(release: ServeInterface, name: str, value: str, why: str) -> None:
    said = release.variable_refusal(name, value)
    assert why in said
    assert bool(said) == bool(why)


def test_parsers(release: ServeInterface) -> None:
    assert release.parsers("--reasoning-parser") == ("nemotron_v3", "qwen3")
    assert release.parsers("--tool-call-parser") == ("qwen3", "qwen3_coder")
    assert release.parsers("--port") == ()
    assert release.parser_refusal("--tool-call-parser", "qwen3") == ""
    assert release.parser_refusal("--reasoning-parser", "none") == ""
    assert release.parser_refusal("--port", "qwen") == ""
    assert release.parser_refusal("--tool-call-parser", "qwen3_code") == (
        "vLLM 1.2.3 has no parser 'qwen3_code' for --tool-call-parser; did you mean 'qwen3_coder'?"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"entrypoints/cli/serve": "import x\n"}, "does not import make_arg_parser"),
        ({"entrypoints/cli/serve": "def (\n"}, "is not Python"),
        ({"engine/arg_utils": ARG_UTILS.replace('**model_kwargs["model"]', "**of(1)")},
         "what of(1) takes cannot be read"),
        ({"engine/arg_utils": ARG_UTILS.replace("get_kwargs(ModelConfig)", "get_kwargs(Gone)")},
         "get_kwargs(Gone) is not known"),
        ({"entrypoints/openai/cli_args": CLI_ARGS.replace(
            "in frontend_kwargs.items()", "in sorted(frontend_kwargs)")},
         "a loop adds arguments in an unknown way"),
        ({"reasoning/__init__": PARSERS.format(table="_OTHER", name="x")},
         "its parsers are unknown"),
    ],
)  # fmt: skip
def test_a_release_that_is_built_otherwise_is_an_error_and_not_a_guess(
    changed: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError) as failure:
        read(changed)
    assert message in str(failure.value)


def test_a_name_behind_a_star_is_found() -> None:
    kernel = KERNEL.replace('Shade = Literal["dark", "light"]', "from .shades import *")
    found = read({"config/kernel": kernel, "config/shades": 'Shade = Literal["dim"]'})
    flag = found.flag("--shade")
    assert flag is not None
    assert flag.choices == ("dim",)


def test_a_module_that_moved_is_followed() -> None:
    moved = files({"entrypoints/cli/serve": SERVE.replace("openai", "common")})
    moved["vllm/entrypoints/common/cli_args.py"] = moved.pop("vllm/entrypoints/openai/cli_args.py")
    found = read_interface(Files(moved).read, "1.2.3")
    assert found.flag("--headless") is not None
