"""Variables of a stranger: which a process of this machine gets, and what is said of the others."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from builder.applier.layers import Env
from builder.layers.catalog import Catalog
from builder.probes.dispatch_expect import Failure
from builder.proof import codegen, wholemodel
from builder.proof.isolation import SandboxUnavailable
from builder.proof.replies import Ask, CodegenReply, CodegenRequest, DispatchRequest
from builder.proof.runners import InSandbox
from builder.proof.sandbox import WithDsl, probe_environment
from builder.proof.target import Refusal
from builder.proof.trust import TrustedSources
from builder.proof.variables import LEFT_OUT, for_a_process, is_read, known
from tests.unit.fakes import fake_base, layer_text, vllm_files

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Values that name a path, a module, an address or a command.
TRAPS = (
    "/etc/passwd", "../x", "~", "x.py", "os.system", "a.b:c", "ext://sys.stdout", "[::1]",
    "http://127.0.0.1:1/", "127.0.0.1:80", "localhost:80", "$(id)", "`id`", "a;b", "a|b", "{}",
    '{"a": 1}', "a\nb", "a\n", "a\0b", "%x", "a=b", "--x y", "/", "\\x", "@file",
)  # fmt: skip
PATHS = ("VLLM_LOGGING_CONFIG_PATH", "VLLM_NCCL_SO_PATH", "CUTE_DSL_LIBS", "VLLM_PLUGINS")


def of(env: Mapping[str, Any], **own: str) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """What a process gets, and what is said of the others; ``own`` is the user's."""
    found = for_a_process(env, TrustedSources(variables=own).sets, apart=False)
    return dict(found.passed), found.left_out


@pytest.mark.parametrize("name", sorted(known().forms))
def test_no_variable_of_the_list_takes_a_trap(name: str) -> None:
    for trap in TRAPS:
        with pytest.raises(SandboxUnavailable, match=name):
            of({name: trap})


def test_no_variable_of_the_list_is_named_like_a_place() -> None:
    places = ("PATH", "DIR", "ROOT", "HOME", "URL", "HOST", "IP", "PORT", "LIBS", "FILE", "NVCC")
    for name in known().forms:
        assert is_read(name)
        assert not {*name.split("_")} & {*places}, name
    assert not known().folders & known().forms.keys()


def test_what_is_not_on_the_list_is_left_out_and_named() -> None:
    given = {"VLLM_USE_DEEP_GEMM": "0", "PATH": "/x", "LD_PRELOAD": "/x.so", "HF_TOKEN": "x"}
    passed, left_out = of({**given, **dict.fromkeys(PATHS, "/x")})
    assert passed == {"VLLM_USE_DEEP_GEMM": "0"}
    assert [text.split()[2] for text in left_out] == sorted(PATHS)
    assert all(text.startswith(LEFT_OUT) and "not on the list" in text for text in left_out)


def test_a_name_is_shown_as_one_short_line() -> None:
    _, left_out = of({"VLLM_\n::error::": "1", f"VLLM_{'X' * 500}": "1"})
    assert all(len(text) < 200 and "\n" not in text for text in left_out)


def test_what_the_user_gave_is_passed_with_that_value_alone() -> None:
    assert of({"VLLM_OWN": "/x", "LD_PRELOAD": "/x"}, VLLM_OWN="/x")[0] == {"VLLM_OWN": "/x"}
    assert of({"VLLM_OWN": "/y"}, VLLM_OWN="/x")[0] == {}
    strange = {"VLLM_NVFP4_GEMM_BACKEND": "a b"}
    assert of(strange, **strange)[0] == strange


def test_a_folder_is_never_anybody_else_s() -> None:
    """Not that of a stranger, not that of the user; and none is unset, so that HOME would count."""
    for name in known().folders:
        passed, left_out = of({name: "/x"}, **{name: "/x"})
        assert (passed, len(left_out)) == ({}, 1)
        assert of({name: None})[0] == {}
        assert probe_environment("/own")[name] == "/own"


def test_only_a_variable_that_is_read_can_be_unset() -> None:
    assert of({"VLLM_X": None, "PATH": None, "HOME": None}) == ({"VLLM_X": None}, ())


def test_an_isolated_process_gets_all() -> None:
    given = {"VLLM_USE_B12X_MOE": "1", "VLLM_LOGGING_CONFIG_PATH": "/x"}
    assert for_a_process(given, TrustedSources().sets, apart=True).passed == given


def test_every_variable_of_our_layers_is_on_the_list() -> None:
    """So that an image with them is proven by whoever has other layers."""
    catalog = Catalog.discover()
    ops = [op for name in catalog.folders for op in catalog.layer(name).ops if isinstance(op, Env)]
    settings = {(op.name, op.value) for op in ops}
    assert len(settings) > 5
    for name, value in settings:
        assert of({name: value}) == ({name: value}, ())


def test_variables_of_layers_of_this_machine_are_the_user_s_own(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    text = layer_text('op = "env"\nname = "VLLM_OWN"\nvalue = "/x"')
    (tmp_path / "mine" / "layer.toml").write_text(text)
    trust = TrustedSources(patches=(tmp_path,))
    assert trust.sets("VLLM_OWN", "/x")
    assert trust.sets("VLLM_OWN", None)
    assert not trust.sets("VLLM_OWN", "/y")
    assert not trust.sets("VLLM_OTHER", None)


# ---------------------------------------------------------------------------- each of the customers


def test_whoever_starts_a_process_asks_here() -> None:
    """Every module that starts a probe on this machine takes its variables from this one."""
    starting = {"ask_probe", "ask_server"}
    for file in Path(wholemodel.__file__).parents[1].rglob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if names & starting and file.name not in ("sandbox.py", "modelserver.py"):
            assert "for_a_process" in names, file


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> InSandbox:
    """One whose files are all known."""
    monkeypatch.setattr(TrustedSources, "apart", lambda *_: None)
    base = fake_base(files=vllm_files())
    return InSandbox(base.tree, base.identity.packages)


def test_levels_pass_what_is_allowed(sandbox: InSandbox) -> None:
    env: dict[str, str | None] = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_CACHE_ROOT": None, "HOME": None}
    ask = Ask(kind="nvfp4-linear", env={"VLLM_USE_DEEP_GEMM": None, "HOME": None, "PATH": None})
    request = DispatchRequest(env={**env, **dict.fromkeys(PATHS, "/x")}, ask=(ask,))
    allowed, left_out = sandbox.allowed(request, apart=False)
    assert allowed.env == {"VLLM_USE_DEEP_GEMM": "0"}
    assert allowed.ask[0].env == {"VLLM_USE_DEEP_GEMM": None}
    assert len(left_out) == len(PATHS)
    assert sandbox.allowed(request, apart=True) == (request, ())


def test_level_codegen_passes_what_is_allowed(
    sandbox: InSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = SimpleNamespace(
        inputs=[], settings={}, folders=(), sandbox=SimpleNamespace(python=Path("python")),
        torch=SimpleNamespace(what="a torch"),
    )  # fmt: skip
    seen = []

    def ask(_python: Path, request: Mapping[str, Any], *_: object, **__: object) -> CodegenReply:
        seen.append(request["env"])
        return CodegenReply(fatal=Failure(type="E", message="x"))

    monkeypatch.setattr(codegen, "own_files", lambda _tree: [])
    monkeypatch.setattr(codegen, "lay_out", lambda _tree: None)
    monkeypatch.setattr(codegen, "ask_probe", ask)
    monkeypatch.setattr(WithDsl, "prepare", lambda *_: prepared)
    env: dict[str, str | None] = {"CUTE_DSL_ARCH": "sm_121a", "CUTE_DSL_LIBS": "/x.so"}
    request = CodegenRequest(env=env, arch="sm_121a", jobs=1, kernels=())
    reply = sandbox.compile(request)
    assert isinstance(reply, CodegenReply)
    assert seen == [{"CUTE_DSL_ARCH": "sm_121a"}]
    assert any(part.startswith("left out: CUTE_DSL_LIBS") for part in reply.simulated)
    refused = sandbox.compile(replace(request, env={"CUTE_DSL_ARCH": "sm_121a -o /x"}))
    assert isinstance(refused, Refusal)
    assert "its value is not an architecture" in str(refused)
