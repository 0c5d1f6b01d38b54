"""Level ``imports``: names and calls of patched modules, held against what is installed."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import OverlayTree
from builder.proof.imports import check_imports, dotted_name, mismatch, parse_module
from builder.proof.target import VerifyTarget
from tests.unit.fakes import (
    FakeRunner,
    dist_files,
    fake_base,
    make_layer,
    make_plan_of,
    make_wheel,
    replace_op,
    subject_of,
    vllm_files,
)

if TYPE_CHECKING:
    from builder.applier.trees import Tree
    from builder.common.plan import PlanDocument
    from builder.proof.checks import Check

OTHER = {
    "flashinfer/__init__.py": "from .gemm import mm\n",
    "flashinfer/gemm.py": (
        "import functools\n\n@functools.cache\ndef mm(a, b, *, out=None): ...\n\n"
        "@flashinfer_api\ndef traced(a): ...\n\nif True:\n    LIMIT = 1\n"
    ),
    "flashinfer/dynamic.py": "def __getattr__(name): ...\n",
    "flashinfer/star.py": "from other import *\n",
    "flashinfer/native.cpython-312-aarch64-linux-gnu.so": "",
    "flashinfer/namespace/inner.py": "X = 1\n",
    "flashinfer/sub/__init__.py": "",
    "flashinfer/sub/deep.py": "D = 1\n",
    "nvidia_cutlass_dsl/python_packages/cutlass/__init__.py": "Int32 = int\n",
}


def check_of(code: str, path: str = "vllm/core.py") -> Check:
    """The check of one module that a layer edited to hold that code."""
    files = vllm_files() | dist_files("flashinfer-python", "1", OTHER | {path: "MARK\n"})
    base = fake_base(files)
    plan = make_plan_of(base, make_layer("fix", replace_op("MARK\n", code, path)))
    assert plan.decisions[0].needed, plan.decisions[0].outcome.reason
    tree = OverlayTree(base.tree)
    tree.update(plan.changes)
    (check,) = check_imports(target(plan.document, tree))
    return check


def target(plan: PlanDocument, tree: Tree) -> VerifyTarget:
    return VerifyTarget(
        name="t", subject=subject_of(tree), plan=plan, layers=[], runner=FakeRunner()
    )


GOOD = {
    "name": "from flashinfer.gemm import mm\n",
    "in-a-branch": "from flashinfer.gemm import LIMIT\n",
    "module": "import flashinfer.gemm\n",
    "module-from-package": "from flashinfer import gemm\n",
    "re-exported": "from flashinfer import mm\n",
    "getattr": "from flashinfer.dynamic import anything\n",
    "star-source": "from flashinfer.star import anything\n",
    "star": "from flashinfer.gemm import *\n",
    "extension-module": "from flashinfer.native import kernel\n",
    "namespace-package": "from flashinfer.namespace.inner import X\n",
    "path-root": "from cutlass import Int32\n",
    "other-packages": "from torch.gone import nothing\nimport numpy.gone\n",
    "inside-a-function": "def f():\n    from flashinfer.gemm import mm\n    return mm(1, 2)\n",
    "renamed": "from flashinfer.gemm import mm as gemm\ngemm(1, 2, out=3)\n",
    "unknown-decorator": "from flashinfer.gemm import traced\ntraced(1, 2, 3)\n",
    "relative": "from .envs import environment_variables\n",
}


@pytest.mark.parametrize("code", GOOD.values(), ids=GOOD.keys())
def test_existing_names_pass(code: str) -> None:
    check = check_of(code)
    assert (check.status, check.where) == ("pass", "vllm/core.py"), check.seen


BAD = {
    "name": ("from flashinfer.gemm import mm2\n", "line 1: flashinfer.gemm has no mm2"),
    "module": ("import flashinfer.gone\n", "line 1: no module flashinfer.gone"),
    "from-module": ("\nfrom flashinfer.gone import x\n", "line 2: no module flashinfer.gone"),
    "from-package": ("from flashinfer import gone\n", "line 1: flashinfer has no gone"),
    "path-root": ("from cutlass import Int64\n", "line 1: cutlass has no Int64"),
    "inside": ("def f():\n    from flashinfer.gemm import no\n", "line 2: flashinfer.gemm has no"),
    "relative": ("from .envs import gone\n", "line 1: vllm.envs has no gone"),
    "call": (
        "from flashinfer.gemm import mm\nmm(1, 2, dtype=3)\n",
        "line 2: mm() has no parameter 'dtype'",
    ),
    "renamed-call": ("from flashinfer.gemm import mm as g\ng(1)\n", "line 2: g() misses 'b'"),
}


@pytest.mark.parametrize(("code", "seen"), BAD.values(), ids=BAD.keys())
def test_missing_names_fail(code: str, seen: str) -> None:
    check = check_of(code)
    assert check.status == "fail"
    assert seen in check.seen


@pytest.mark.parametrize(
    ("path", "code", "status"),
    [
        ("flashinfer/sub/__init__.py", "from .deep import D\n", "pass"),
        ("flashinfer/sub/__init__.py", "from .deep import E\n", "fail"),
        ("flashinfer/sub/__init__.py", "from ..gemm import mm\n", "pass"),
        ("flashinfer/__init__.py", "from .gemm import gone\n", "fail"),
        ("flashinfer/sub/deep.py", "from . import other\n", "fail"),
        ("flashinfer/sub/deep.py", "from ..gemm import mm\n", "pass"),
    ],
)
def test_relative_imports_start_at_the_package(path: str, code: str, status: str) -> None:
    check = check_of(code, path)
    assert check.status == status, check.seen


def test_a_missing_module_fails() -> None:
    base = fake_base(vllm_files())
    plan = make_plan_of(base, make_layer("fix", replace_op("BACKEND = 'cutlass'", "BACKEND = 1")))
    tree = OverlayTree(base.tree)
    tree.update({**plan.changes, "vllm/core.py": None})
    (check,) = check_imports(target(plan.document, tree))
    assert (check.status, check.seen) == ("fail", "vllm/core.py does not exist")


def test_wheel_layers_are_skipped_and_no_edit_means_not_run() -> None:
    wheel = make_wheel("lib", "1", {"lib/x.py": "from vllm.gone import x\n"})
    op = {"op": "wheel", "distribution": "lib", "version": "1"}
    base = fake_base(vllm_files())
    plan = make_plan_of(base, make_layer("lib", op, wheels=[wheel]), wheels=[wheel])
    tree = OverlayTree(base.tree)
    tree.update(plan.changes)
    (check,) = check_imports(target(plan.document, tree))
    assert check.status == "not-run"
    assert "no layer edited a Python module" in check.reason


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("vllm/core.py", "vllm.core"),
        ("vllm/model/__init__.py", "vllm.model"),
        ("nvidia_cutlass_dsl/python_packages/cutlass/cute/mma.py", "cutlass.cute.mma"),
        ("nvidia_cutlass_dsl/dsl_packages/cutlass/__init__.py", "cutlass"),
    ],
)
def test_dotted_name(path: str, name: str) -> None:
    assert dotted_name(path) == name


# -------------------------------------------------------------------------------------- signatures


def called(signature: str, arguments: str, decorator: str = "") -> str | None:
    function = ast.parse(f"{decorator}\ndef f({signature}): ...").body[0]
    call = ast.parse(f"f({arguments})", mode="eval").body
    assert isinstance(function, ast.FunctionDef)
    assert isinstance(call, ast.Call)
    return mismatch(call, function)


@pytest.mark.parametrize(
    ("signature", "arguments"),
    [
        ("", ""),
        ("a, b=1", "1"),
        ("a, b=1", "1, 2"),
        ("a, b=1", "b=2, a=1"),
        ("a, /, b", "1, b=2"),
        ("*args", "1, 2, 3"),
        ("**kwargs", "a=1"),
        ("a, *, b", "1, b=2"),
        ("a, *, b=2", "1"),
        ("a, b", "*x"),
        ("a, b", "**x"),
        ("a=1, *, c", "1, c=2"),
    ],
)
def test_calls_that_match(signature: str, arguments: str) -> None:
    assert called(signature, arguments) is None


@pytest.mark.parametrize(
    ("signature", "arguments", "problem"),
    [
        ("", "1", "takes 0 positional arguments, 1 are given"),
        ("a", "", "misses 'a'"),
        ("a, b", "1", "misses 'b'"),
        ("a, b", "b=1", "misses 'a'"),
        ("a", "1, 2", "takes 1 positional arguments, 2 are given"),
        ("a", "1, c=2", "has no parameter 'c'"),
        ("a, *, b", "1", "misses 'b'"),
        ("a=1, *, c", "1", "misses 'c'"),
        ("a, b=1, *, c", "1, 2", "misses 'c'"),
        ("a, *, b", "1, 2", "takes 1 positional arguments, 2 are given"),
        ("a, /", "a=1", "'a'"),
        ("a, b", "1, a=2", "'a'"),
        ("a", "*x, c=1", "has no parameter 'c'"),
    ],
)
def test_calls_that_do_not_match(signature: str, arguments: str, problem: str) -> None:
    assert problem in (called(signature, arguments) or "")


@pytest.mark.parametrize(
    ("decorator", "trusted"),
    [("@cache", False), ("@functools.lru_cache(maxsize=1)", False), ("@support_torch", True)],
)
def test_a_decorator_that_may_change_the_signature_is_trusted(
    decorator: str, trusted: bool
) -> None:
    assert (called("a", "1, 2", decorator) is None) == trusted


def test_names_of_a_module_are_collected_from_every_branch() -> None:
    module = parse_module(
        "m.py",
        b"import a.b\nfrom c import d as e\nif a:\n    X = 1\nelse:\n    Y: int = 2\n"
        b"try:\n    import f\nexcept ImportError:\n    f = None\nwith a as g: pass\n"
        b"def h():\n    inner = 1\nclass I:\n    attribute = 1\nfor j in a: pass\n(k, l) = 1, 2\n",
    )
    assert sorted(module.names) == ["I", "X", "Y", "a", "e", "f", "g", "h", "j", "k", "l"]
    assert not module.dynamic
