"""Torch's dispatcher takes what an extension wheel registers: real libraries, a real torch, no GPU.

A library stands for vLLM's extension and registers an operator for CPU tensors.  Another is made as
an extension wheel is, by the same generator, and put on by the same loader.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.common.console import Bar
from builder.common.paths import package_file
from builder.common.pypi import PackageIndex
from builder.common.wheels import RemoteWheel
from builder.compile.operators import Operator, load_operators, registration_source
from builder.proof.sandbox import Sandbox, _choose, requirements_for, torch_folder

MARK = "spark-build/override/1"
TORCH = "2.11.0"
ANSWER = replace(
    load_operators()[0],
    name="wheel_test::answer",
    key="CPU",
    header="ATen/core/Tensor.h",
    declaration="int64_t answer(at::Tensor const& x);",
    function="answer",
)
STABLE = replace(
    ANSWER,
    abi="stable",
    header="torch/csrc/stable/tensor.h",
    declaration="int64_t answer(torch::stable::Tensor const& x);",
)
#: Two more operators of the same library, as releases register those that ask no device.
OTHERS = [
    replace(ANSWER, name="wheel_test::implicit", key="CompositeImplicitAutograd"),
    replace(ANSWER, name="wheel_test::explicit.out", key="CompositeExplicitAutograd"),
]
RELEASED = """
#include <torch/library.h>
#include <ATen/core/Tensor.h>
namespace { int64_t answer(at::Tensor const& x) { return x.size(0) + 1; } }
TORCH_LIBRARY(wheel_test, m) {
  m.def("answer(Tensor x) -> int");
  m.impl("answer", c10::DispatchKey::CPU, &answer);
  m.def("implicit(Tensor x) -> int", &answer);
  m.def("explicit.out(Tensor x) -> int");
  m.impl("explicit.out", c10::DispatchKey::CompositeExplicitAutograd, &answer);
}
"""
#: Asked in the sandbox's own interpreter, where the loader is a module as it is in a wheel.
ASK = """
import importlib.metadata, json, sys
sys.path.insert(0, sys.argv[1])
import wheel_loader as loader, torch
released, wheel, about = sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
torch.ops.load_library(released)
about["torch"] = torch.__version__.partition("+")[0]
importlib.metadata.version = lambda name: "0.19.1"
ask = lambda: torch.ops.wheel_test.answer(torch.zeros(7))
before = ask()
try:
    loader.register(about, wheel)
    said = ""
except loader.ExtensionWheelError as error:
    said = str(error)
print(json.dumps([before, ask(), said]))
"""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    made = Sandbox(requirements_for("0.19.1"))
    made.prepare()
    return made


def headers_of_torch(folder: Path) -> Path:
    """What the torch that selection is asked with is unpacked without."""
    index = PackageIndex()
    wheel = RemoteWheel(_choose(index, TORCH), index)
    paths = [path for path in wheel.members if path.startswith("torch/include/")]
    wheel.unpack(paths, folder / "headers", Bar("headers", None, "bytes"))
    return folder / "headers" / "torch" / "include"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The release's library and two extension wheels, compiled side by side."""
    folder = tmp_path_factory.mktemp("libraries")
    torch, headers = torch_folder(TORCH).folder / "torch", headers_of_torch(folder)
    texts = {"released": RELEASED}
    for operator in (ANSWER, STABLE):
        body = operator.declaration.replace(";", " { return x.size(0) + 2; }")
        every = [operator, *(replace(operator, name=o.name, key=o.key) for o in OTHERS)]
        texts[operator.abi] = f"{registration_source(every, MARK)}\n{body}\n"
    running = []
    for name, text in texts.items():
        (folder / f"{name}.cpp").write_text(text)
        words = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{headers}"]
        words += [f"-I{headers / 'torch/csrc/api/include'}", str(folder / f"{name}.cpp")]
        words += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        running.append(subprocess.Popen([*words, "-o", str(folder / f"{name}.so")]))
    assert [process.wait() for process in running] == [0] * len(running)
    return {name: folder / f"{name}.so" for name in texts}


def asked(sandbox: Sandbox, released: Path, wheel: Path, **changed: Any) -> list[Any]:
    about = {
        "name": "wheel",
        "mark": MARK,
        "vllm": "0.19.1",
        "modules": [],
        "operators": [{"name": ANSWER.name, "key": ANSWER.key}],
        **changed,
    }
    loader = Path(str(package_file("probes", "wheel_loader.py"))).parent
    done = subprocess.run(
        [sandbox.python, "-c", ASK, str(loader), str(released), str(wheel), json.dumps(about)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(torch_folder(TORCH).folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: list[Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("operator", [ANSWER, STABLE], ids=lambda operator: operator.abi)
def test_the_extension_wheel_overrides_once_loaded(
    sandbox: Sandbox, libraries: dict[str, Path], operator: Operator
) -> None:
    released, wheel = libraries["released"], libraries[operator.abi]
    assert asked(sandbox, released, wheel) == [8, 9, ""]


@pytest.mark.parametrize("abi", ["classic", "stable"])
def test_several_operators_and_keys_are_overridden_at_once(
    sandbox: Sandbox, libraries: dict[str, Path], abi: str
) -> None:
    rows = [{"name": o.name, "key": o.key} for o in (ANSWER, *OTHERS)]
    answer = asked(sandbox, libraries["released"], libraries[abi], operators=rows)
    assert answer == [8, 9, ""]
    wrong = [{**rows[1], "key": "CUDA"}]
    said = asked(sandbox, libraries["released"], libraries[abi], operators=wrong)[2]
    assert "no wheel_test::implicit for CUDA, so there is nothing to replace" in said


def test_a_library_that_registers_nothing_is_detected(
    sandbox: Sandbox, libraries: dict[str, Path]
) -> None:
    released = libraries["released"]
    before, after, said = asked(sandbox, released, released)
    assert (before, after) == (8, 8)
    assert "is still another kernel: 'CPU: registered at " in said


def test_a_missing_operator_is_detected(sandbox: Sandbox, libraries: dict[str, Path]) -> None:
    operators = [{"name": "wheel_test::other", "key": "CPU"}]
    answer = asked(sandbox, libraries["released"], libraries["classic"], operators=operators)
    assert "nothing to replace" in answer[2]
