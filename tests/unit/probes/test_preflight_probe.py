"""``preflight_probe``: an answer that a stand-in had a part in is none of the release's."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from builder.proof.wholemodel import Refusal, not_the_releases
from tests.unit.inimage import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

probe = load("preflight_probe")


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], Any]:
    """The answer of a release that builds a model with this function."""
    probe.ANSWERED.clear()
    config = SimpleNamespace(create_engine_config=lambda usage_context: None)
    usage = SimpleNamespace(UsageContext=SimpleNamespace(OPENAI_API_SERVER="server"))
    monkeypatch.setitem(sys.modules, "vllm.usage.usage_lib", usage)
    module = SimpleNamespace(set_current_vllm_config=contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(config=module))
    monkeypatch.setitem(sys.modules, "vllm.config", module)
    monkeypatch.setattr(probe, "parsed", lambda *_: config)
    monkeypatch.setattr(probe, "record_log", lambda _: {"lines": [], "warnings": []})
    monkeypatch.setattr(probe, "settings_of", lambda _: {})
    monkeypatch.setattr(probe, "layers_of", lambda _: [])
    monkeypatch.setattr(probe, "draft_of", lambda _: None)
    monkeypatch.setattr(probe, "use_own_configuration", lambda *_: None)
    monkeypatch.setattr(probe, "without_code", lambda model, *_: model)
    monkeypatch.setattr(probe, "check_lora", lambda *_: None)
    monkeypatch.setattr(probe, "caches_of", lambda _: [])
    monkeypatch.setattr(probe, "check_attention", lambda *_: None)
    monkeypatch.setattr(probe, "loading_of", lambda *_: [])

    def ask(build: Callable[[], object]) -> Any:
        monkeypatch.setattr(probe, "built", lambda *_: build())
        return probe.answer({"model": "m", "flags": []}, SimpleNamespace(simulated=[]), "")

    return ask


def swallowed() -> None:
    with contextlib.suppress(Exception):
        probe.Operator("torch.ops._C.supports")()


def launched() -> None:
    with contextlib.suppress(NotImplementedError):
        probe.Kernel(swallowed)[1,]()


def refused_because_of_it() -> None:
    swallowed()
    raise ValueError("no kernel supports this layer")


def asked_triton() -> None:
    probe.Nothing("triton.runtime.driver.active.get_current_target")()


def tested_triton() -> None:
    if probe.Nothing("triton.knobs.runtime.interpret"):
        pass


def compared_triton() -> None:
    with contextlib.suppress(Exception):
        assert probe.Nothing("triton.runtime.driver.active.target.arch") == 90


def iterated_triton() -> None:
    with contextlib.suppress(Exception):
        list(probe.Nothing("triton.backends.all"))


def asked_cuda() -> None:
    assert probe.NoDevice("cudaDeviceReset")() == 100


def asked_deep_gemm() -> None:
    probe.dispatch_device._any_name("get_num_sms")()


@pytest.mark.parametrize(
    "build",
    [
        swallowed, launched, refused_because_of_it, asked_triton, tested_triton, compared_triton,
        iterated_triton, asked_cuda, asked_deep_gemm,
    ],
)  # fmt: skip
def test_a_stand_in_that_was_called_is_no_answer_though_its_error_was_caught(
    answered: Any, build: Any
) -> None:
    error = answered(build)["error"]
    assert error is not None
    named = {name: error[name] for name in ("type", "message", "where", "stage")}
    assert "called" in not_the_releases(Refusal(**named)) or error["type"] == "StandInError"
    assert answered(lambda: None)["error"] is None, "nor has the next question it"


def test_what_a_module_defines_while_it_is_imported_is_no_answer(
    answered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decorators of kernels, and lists of their configurations."""
    text = "import nothing; CONFIG = nothing.it(1); FAST = bool(nothing.it); nothing.cuda()\n"
    (tmp_path / "kernels_of_a_model.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    nothing = SimpleNamespace(it=probe.Nothing("triton.Config"), cuda=probe.NoDevice("cudaX"))
    monkeypatch.setitem(sys.modules, "nothing", nothing)
    monkeypatch.delitem(sys.modules, "kernels_of_a_model", raising=False)
    build = partial(importlib.import_module, "kernels_of_a_model")
    reply = answered(build)
    assert reply["error"] is None
    assert [words.partition(" of ")[0] for words in reply["simulated"]] == [
        "triton.Config", "triton.Config", "cudaX",
    ]  # fmt: skip
    assert answered(lambda: probe.Nothing("triton.jit")(len))["error"] is None
    assert answered(probe.dispatch_device._any_name("set_pdl"))["error"] is None


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[str]]:
    """Prepare an attention whose backend runs this code; what is noted of it."""
    torch = SimpleNamespace(device=lambda _: contextlib.nullcontext())
    module = SimpleNamespace(set_current_vllm_config=lambda _: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(config=module))
    monkeypatch.setitem(sys.modules, "vllm.config", module)
    monkeypatch.setattr(probe, "on_meta", contextlib.nullcontext)
    file = tmp_path / "vllm" / "v1" / "attention" / "x.py"

    def prepare(text: str) -> list[str]:
        names: dict[str, Any] = {"probe": probe, "swallowed": swallowed}
        source = f"def builder(spec, names, config, device):\n    {text}\n"
        exec(compile(source, str(file), "exec"), names)
        backend = type("Backend", (), {"get_builder_cls": staticmethod(lambda: names["builder"])})
        layer = SimpleNamespace(attn_backend=backend, get_kv_cache_spec=lambda _: "spec")
        layers = {"a": layer, "b": layer, "without": SimpleNamespace()}
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
        notes: list[str] = []
        probe.CALLED.clear()
        probe.check_attention(config, SimpleNamespace(note=notes.append))
        return notes

    return prepare


def test_what_attention_refuses_when_it_is_prepared_is_the_releases_answer(prepared: Any) -> None:
    assert prepared("return None") == []
    with pytest.raises(ValueError, match="requires sm100f"):
        prepared("raise ValueError('requires sm100f')")


@pytest.mark.parametrize(
    "text",
    [
        "swallowed(); raise ValueError('because of it')",
        "raise TypeError('a stand-in has another form')",
        "probe.Operator('torch.ops._C.x')()",
    ],
)
def test_other_errors_of_preparing_attention_are_named(prepared: Any, text: str) -> None:
    assert "its attention was not prepared" in prepared(text)[0]
    assert not probe.CALLED


def test_a_release_that_refuses_says_so(answered: Any) -> None:
    def refuse() -> None:
        raise ValueError("no kernel")

    assert answered(refuse)["error"]["message"] == "no kernel"


def test_whether_ranks_can_talk_is_no_kernel(answered: Any) -> None:
    """A release may call an operator of it, as 0.24.0 does, and catch the error."""

    def build() -> None:
        with contextlib.suppress(Exception):
            probe.Operator("torch.ops._C_custom_ar.meta_size")()

    assert answered(build)["error"] is None


def test_an_operator_that_chooses_nothing_is_harmless(answered: Any) -> None:
    def build() -> None:
        assert probe.Operator("torch.ops._flashkda_C.get_workspace_size")(1, 2) == 0
        assert probe.Operator("torch.ops._C.get_cuda_view_from_cpu_tensor.default")("w") == "w"

    assert answered(build)["error"] is None


@pytest.mark.parametrize(
    "message",
    [
        "No CUDA GPUs are available",
        "'_OpNamespace' '_C' object has no attribute 'rotary_embedding'",
        "TimmWrapperModel requires the timm library but it was not found in your environment.",
        "cannot import name 'X' from 'transformers.models.pixtral.modeling_pixtral' (/a/b.py)",
    ],
)
def test_what_the_sandbox_lacks_is_no_refusal(message: str) -> None:
    assert not_the_releases(Refusal(type="RuntimeError", message=message))
    assert not not_the_releases(Refusal(type="RuntimeError", message="no kernel"))


def test_transformers_runs_no_code_of_a_checkpoint(
    answered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also code of another id, which is in the cache of Hugging Face, and tried without error."""
    ran: list[str] = []
    modules = SimpleNamespace(get_class_in_module=ran.append)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(dynamic_module_utils=modules))
    monkeypatch.setitem(sys.modules, "transformers.dynamic_module_utils", modules)
    probe.refuse_code_of_checkpoints(SimpleNamespace(note=str))

    def build() -> None:
        with contextlib.suppress(Exception):
            modules.get_class_in_module("Own", "a/b/own.py")

    error = answered(build)["error"]
    assert not ran
    words = Refusal(type=error["type"], message=error["message"])
    assert not_the_releases(words).startswith("the checkpoint has code of its own")


def test_the_releases_class_reads_what_transformers_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: dict[str, Any] = {}
    notes: list[str] = []
    own = type("OwnConfig", (), {"model_type": "own"})
    auto = SimpleNamespace(
        CONFIG_MAPPING={"known": 1}, AutoConfig=SimpleNamespace(register=registered.__setitem__)
    )
    name = "vllm.transformers_utils.configs"
    monkeypatch.setitem(sys.modules, "transformers.models.auto.configuration_auto", auto)
    for part in ("vllm", "vllm.transformers_utils", name):
        monkeypatch.setitem(sys.modules, part, SimpleNamespace(__path__=[], __spec__=None))
    monkeypatch.setitem(sys.modules, f"{name}.own", SimpleNamespace(OwnConfig=own, other=int))
    for kind in ("known", "nobody_knows", "../own", "own"):
        (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
        probe.use_own_configuration(str(tmp_path), SimpleNamespace(note=notes.append))
    assert registered == {"own": own}
    assert len(notes) == 1


def test_flags_of_a_server_that_is_not_here_are_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server's own parser lacks a module, only the engine's flags are known."""

    class Arguments:
        @staticmethod
        def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser.add_argument("--model")
            parser.add_argument("--load-format")
            return parser

        from_cli_args = staticmethod(lambda known: SimpleNamespace(model=known.model))

    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__path__": [], "__spec__": None},
        "vllm.engine": {"__path__": [], "__spec__": None},
        "vllm.engine.arg_utils": {"EngineArgs": Arguments},
        "vllm.entrypoints": {"__path__": [], "__spec__": None},
        "vllm.entrypoints.openai": {"__path__": [], "__spec__": None},
        "vllm.utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
    }
    for name, values in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**values))

    def parsed(*flags: str) -> Any:
        return probe.parsed("m", flags, SimpleNamespace())  # nothing is noted

    assert parsed("--load-format", "dummy").model == "m"
    assert parsed("--model", "other").model == "m", "the answer is about m"
    with pytest.raises(probe.StandInError, match="--tool-parser x: those of the server are not"):
        parsed("--tool-parser", "x")
    with pytest.raises(ValueError, match="expected one argument"):
        parsed("--load-format")


@pytest.mark.parametrize(
    ("flags", "architectures", "left_out"),
    [
        (["--trust-remote-code"], ["NemotronHForCausalLM"], True),
        (["--trust-remote-code"], ["OfNobody"], False),
        (["--trust-remote-code"], [], False),
        ([], ["NemotronHForCausalLM"], False),
    ],
)
def test_code_of_a_checkpoint_is_left_out_where_the_release_has_the_class(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    architectures: list[str],
    left_out: bool,
) -> None:
    registry = SimpleNamespace(get_supported_archs=lambda: ["NemotronHForCausalLM"])
    models = SimpleNamespace(ModelRegistry=registry)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models", models)
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": architectures, "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    device = SimpleNamespace(note=list)
    asked = probe.without_code(str(folder), flags, device, str(tmp_path))
    assert (asked != str(folder)) is left_out
    read = json.loads((tmp_path / asked / "config.json").read_text())
    assert ("auto_map" in read) is not left_out
