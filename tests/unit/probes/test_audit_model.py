"""The program that audits a model beside vLLM, on modules of the same form as torch's."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.inimage import load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

audit_model = load("audit_model")
SIZES = {"torch.bfloat16": 2, "torch.uint8": 1, "torch.float8_e4m3fn": 1, "torch.float32": 4}


class Tensor:
    """Some values of a dtype at a place in memory."""

    _next = 4096

    def __init__(self, dtype: str, values: int, place: int | None = None) -> None:
        self.dtype, self.values = f"torch.{dtype}", values
        self.place = Tensor._next if place is None else place
        Tensor._next += 1 << 20

    def numel(self) -> int:
        return self.values

    def element_size(self) -> int:
        return SIZES[self.dtype]

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self.place)


class Module:
    """As torch.nn.Module names its parts."""

    def __init__(self, **parts: Any) -> None:
        self._parts: dict[str, Any] = parts

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        yield prefix, self
        for name, part in self._parts.items():
            if isinstance(part, Module):
                yield from part.named_modules(f"{prefix}.{name}" if prefix else name)

    def parameters(self, recurse: bool) -> list[Tensor]:
        assert not recurse
        return [part for part in self._parts.values() if isinstance(part, Tensor)]

    def buffers(self, recurse: bool) -> list[Tensor]:
        assert not recurse
        return self._parts.get("table", [])  # type: ignore[no-any-return]


class ModelOptNvFp4LinearMethod:
    kernel: object = None


class CutlassKernel:
    pass


class UnquantizedLinearMethod:
    pass


class Wrapper:
    def __init__(self, inner: object) -> None:
        self.old_quant_method = inner


class Experts(Module):
    top_k, global_num_experts, local_num_experts = 2, 8, 4


class Toy(Module):
    hf_to_vllm_mapper = SimpleNamespace(
        orig_to_new_prefix={"backbone.": "model.", "drop.": None}, orig_to_new_substr={"a": "b"}
    )
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012


def with_method(module: Module, method: object) -> Module:
    module.quant_method = method  # type: ignore[attr-defined]
    return module


def toy() -> Toy:
    """An NVFP4 layer, an unquantised one, experts, an output head that is the embedding."""
    table = Tensor("bfloat16", 100)
    nvfp4 = ModelOptNvFp4LinearMethod()
    nvfp4.kernel = CutlassKernel()
    packed = Module(weight=Tensor("uint8", 64), scale=Tensor("float8_e4m3fn", 8))
    return Toy(
        embed=with_method(Module(weight=table), UnquantizedLinearMethod()),
        qkv_proj=with_method(packed, nvfp4),
        o_proj=with_method(Module(weight=Tensor("bfloat16", 32)), UnquantizedLinearMethod()),
        experts=with_method(Experts(w13=Tensor("uint8", 16)), Wrapper(ModelOptNvFp4LinearMethod())),
        norm=Module(weight=Tensor("float32", 4)),
        rotary=Module(table=[Tensor("bfloat16", 1000)]),
        lm_head=with_method(Module(weight=table), UnquantizedLinearMethod()),
        act=Module(),
    )


def test_each_module_with_its_method_and_bytes() -> None:
    made = audit_model.audit(toy())
    rows = {row.pop("name"): row for row in made["modules"]}
    plain = {"method": "UnquantizedLinearMethod"}
    assert rows == {
        "embed": {"class": "Module", "bytes": {"bfloat16": 200}, **plain},
        "qkv_proj": {
            "class": "Module", "bytes": {"uint8": 64, "float8_e4m3fn": 8},
            "method": "ModelOptNvFp4LinearMethod", "kernel": "CutlassKernel",
        },
        "o_proj": {"class": "Module", "bytes": {"bfloat16": 64}, **plain},
        "experts": {
            "class": "Experts", "bytes": {"uint8": 16}, "method": "ModelOptNvFp4LinearMethod",
            "experts": [2, 8],
        },
        "norm": {"class": "Module", "bytes": {"float32": 16}},
        "rotary": {"class": "Module", "bytes": {}, "buffers": 2000},
        "lm_head": {"class": "Module", "bytes": {}, "shares": "embed", **plain},
    }  # fmt: skip
    assert made["renamed"] == {"prefix": {"backbone.": "model."}, "substr": {"a": "b"}}
    assert made["packed"] == {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def test_a_scheme_of_compressed_tensors_and_its_kernel_are_named() -> None:
    module = with_method(Module(weight=Tensor("uint8", 8)), UnquantizedLinearMethod())
    module.scheme = SimpleNamespace(kernel=CutlassKernel())  # type: ignore[attr-defined]
    (row,) = audit_model.audit(module)["modules"]
    assert (row["scheme"], row["kernel"]) == ("SimpleNamespace", "CutlassKernel")


def test_weights_that_are_not_registered_count_once() -> None:
    """Triton's MXFP4 experts: the parameters are gone, their values in an object of its own."""
    inner, method = Tensor("uint8", 4096), ModelOptNvFp4LinearMethod()
    experts = with_method(Experts(bias=Tensor("bfloat16", 2)), method)
    experts.w13_weight = SimpleNamespace(storage=SimpleNamespace(data=inner))  # type: ignore[attr-defined]
    method.w13_weight = inner  # type: ignore[attr-defined]
    table = Tensor("float32", 8)
    experts.table = table  # type: ignore[attr-defined]
    (row, other) = audit_model.audit(Toy(experts=experts, rotary=Module(cos=table)))["modules"]
    assert row["bytes"] == {"bfloat16": 4, "uint8": 4096}
    assert row["shares"] == "rotary", "what another module has registered is counted there"
    assert other["bytes"] == {"float32": 32}


def test_two_names_of_one_tensor_in_a_module_count_once() -> None:
    weight = Tensor("uint8", 8)
    (row,) = audit_model.audit(Module(weight=weight, weight_packed=weight))["modules"]
    assert (row["bytes"], "shares" in row) == ({"uint8": 8}, False)


def test_tensors_without_memory_are_not_taken_for_one() -> None:
    module = Module(a=Tensor("uint8", 8, place=0), b=Tensor("uint8", 8, place=0))
    (row,) = audit_model.audit(module)["modules"]
    assert row["bytes"] == {"uint8": 16}


def test_a_model_without_tensors_is_no_success() -> None:
    with pytest.raises(audit_model.AuditError, match="has no module with tensors"):
        audit_model.audit(Module())


class Worker:
    """As vLLM's, with a model, and one that drafts with the same embedding."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.model = toy()
        self.seen: list[bool] = []
        draft = Module(embed=self.model._parts["embed"], fc=Module(weight=Tensor("bfloat16", 2)))
        self.model_runner = SimpleNamespace(drafter=SimpleNamespace(model=draft))
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model="me/toy"),
            parallel_config=SimpleNamespace(world_size=2),
        )

    def get_model(self) -> Module:
        return self.model

    def load_model(self, *, load_dummy_weights: bool = False) -> str:
        self.seen.append(load_dummy_weights)
        return "loaded"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[Worker]:
    """The class of vLLM's workers in a module of its name, without the audit."""

    class Fresh(Worker):
        def load_model(self, *, load_dummy_weights: bool = False) -> str:
            return super().load_model(load_dummy_weights=load_dummy_weights)

    module = ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = Fresh  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.0")
    return Fresh


@pytest.mark.parametrize(("rank", "name"), [(0, "out.json"), (1, "out.rank1.json")])
def test_a_worker_writes_a_file_once_its_model_is_loaded(
    worker: type[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, name: str
) -> None:
    monkeypatch.setenv("SPARK_BUILD_AUDIT", str(tmp_path / "out.json"))
    audit_model.register()
    audit_model.register()  # vLLM loads plugins in each process, and may do so twice
    one = worker(rank)
    assert one.load_model(load_dummy_weights=True) == "loaded"
    assert one.seen == [True]
    assert [path.name for path in tmp_path.iterdir()] == [name]
    made = json.loads((tmp_path / name).read_text())
    assert (made["vllm"], made["model"], made["rank"], made["world_size"]) == (
        "0.33.0", "me/toy", rank, 2,
    )  # fmt: skip
    rows = {row["name"]: row for row in made["modules"]}
    assert rows["draft.embed"]["shares"] == "embed"
    assert rows["draft.fc"]["bytes"] == {"bfloat16": 4}


def test_without_the_variable_the_file_is_beside_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_BUILD_AUDIT", raising=False)
    monkeypatch.setattr(audit_model, "__file__", str(tmp_path / "spark_build_audit.py"))
    assert audit_model.place_of({"rank": 0}) == tmp_path / "audit.json"


def test_an_audit_that_fails_does_not_stop_the_server(
    worker: type[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("SPARK_BUILD_AUDIT", str(tmp_path / "missing" / "out.json"))
    audit_model.register()
    assert worker().load_model() == "loaded"
    assert "spark-build audit: none: FileNotFoundError" in caplog.text


def test_a_vllm_without_that_worker_is_told_and_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    audit_model.register()
    assert "spark-build audit: none: ModuleNotFoundError" in caplog.text


class Parser:
    def parse_known_args(self, words: list[str]) -> tuple[list[str], list[str]]:
        return words[:2], words[2:]


@pytest.fixture
def vllm(worker: type[Worker], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A vLLM whose LLM loads the model in this process, as vLLM's own does."""
    made = sys.modules["vllm"]
    arguments, utils = ModuleType("vllm.engine.arg_utils"), ModuleType("vllm.utils.argparse_utils")
    arguments.EngineArgs = SimpleNamespace(  # type: ignore[attr-defined]
        add_cli_args=lambda parser: parser,
        from_cli_args=lambda known: SimpleNamespace(model=known[1]),
    )
    utils.FlexibleArgumentParser = Parser  # type: ignore[attr-defined]

    def llm(model: str) -> None:
        assert model == "me/toy"
        try:
            worker().load_model()
        except Exception as error:
            raise RuntimeError("the engine did not start") from error
        raise AssertionError("it went on after the model was loaded")

    made.LLM = llm  # type: ignore[attr-defined]
    for name in ("vllm.engine", "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (arguments, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    return made


def test_by_itself_it_loads_the_model_and_ends(
    vllm: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    made = audit_model.load(["me/toy", "--port", "8000"])
    assert made["model"] == "me/toy"
    assert made["modules"]
    assert capsys.readouterr().err == "not needed to load the model: --port 8000\n"


def test_a_model_in_other_processes_is_no_success(vllm: ModuleType) -> None:
    vllm.LLM = lambda model: None  # type: ignore[attr-defined]
    with pytest.raises(audit_model.AuditError, match="not load the model in this process"):
        audit_model.load(["me/toy"])


def test_the_command_prints_the_audit_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def load_it(words: list[str]) -> Any:
        print("a line of vLLM's log", flush=True)
        if words == ["bad"]:
            raise audit_model.AuditError("no")
        return audit_model.audit(toy())

    monkeypatch.setattr(audit_model, "load", load_it)
    monkeypatch.setattr(audit_model, "claim_stdout", lambda: (tmp_path / "out").open("w"))
    assert audit_model.main(["me/toy"]) == 0
    assert json.loads((tmp_path / "out").read_text())["schema"] == 1
    assert audit_model.main(["bad"]) == 1
    assert (tmp_path / "out").read_text() == ""
    assert "error: no" in capfd.readouterr().err
    assert (audit_model.main([]), audit_model.main(["--help"])) == (2, 0)
