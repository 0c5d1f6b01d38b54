"""The dispatch probe on a vLLM of a few lines: what it asks, isolates, simulates and reports."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import platform
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.programs import DISPATCH
from builder.probes import dispatch_probe
from builder.probes.stub_driver import shared_library
from tests.unit.fakevllm import FILES, write_fake_vllm
from tests.unit.inimage import load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Asker = Callable[..., dict[str, Any]]

LINEAR = "vllm/model_executor/kernels/linear/__init__.py"
DEEP_GEMM = "vllm/third_party/deep_gemm"
CUTLASS = "Using CutlassKernel for NVFP4 GEMM"


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.fixture
def ask(tmp_path: Path) -> Asker:
    """Runs the probe on a tree with some files changed."""

    def run(
        request: Mapping[str, Any], changes: Mapping[str, bytes | None] | None = None
    ) -> dict[str, Any]:
        root = write_fake_vllm(tmp_path / "site", changes)
        answer = subprocess.run(
            [sys.executable, "-B", str(DISPATCH.file())],
            input=json.dumps({"paths": [str(root)], **request}),
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        result: dict[str, Any] = json.loads(answer.stdout)
        return result

    return run


def linear(**settings: Any) -> dict[str, Any]:
    return {"kind": "nvfp4-linear", **settings}


# ---------------------------------------------------------------------------------------- questions


def test_an_answer_has_the_choice_and_the_log_lines(ask: Asker) -> None:
    result = ask({"ask": [linear()]})
    (answer,) = result["answers"]
    assert result["fatal"] is None
    assert (answer["selected"], answer["lines"]) == ("CutlassKernel", [CUTLASS])
    assert answer["debug"] == ["passed over: nothing"]
    assert answer["request"] == linear()
    assert (answer["error"], answer["not_applicable"]) == (None, None)
    assert result["versions"]["vllm"] == "0.20.1"


def test_the_device_is_taken_from_the_request(ask: Asker) -> None:
    (answer,) = ask({"ask": [linear()], "capability": [9, 0]})["answers"]
    assert answer["selected"] == "MarlinKernel"


def test_requests_do_not_share_settings(ask: Asker) -> None:
    marlin = linear(env={"VLLM_NVFP4_GEMM_BACKEND": "marlin"})
    unset = linear(env={"VLLM_NVFP4_GEMM_BACKEND": None})
    request = {"ask": [marlin, linear(), unset] * 3, "env": {"VLLM_NVFP4_GEMM_BACKEND": "cutlass"}}
    answers = ask(request)["answers"]
    assert [a["selected"] for a in answers] == [
        "MarlinKernel",
        "CutlassKernel",
        "CutlassKernel",
    ] * 3
    assert [a["request"] for a in answers] == request["ask"]


def test_a_refusal_has_the_error_of_vllm(ask: Asker) -> None:
    rejected, invalid = ask(
        {
            "ask": [
                linear(linear_backend="rejected"),
                linear(env={"VLLM_NVFP4_GEMM_BACKEND": "b12x"}),
            ]
        }
    )["answers"]
    assert rejected["error"] == {"type": "ValueError", "message": "rejected is no backend"}
    assert invalid["error"]["message"].startswith("Invalid value 'b12x'")
    assert rejected["selected"] is invalid["selected"] is None


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"kind": "nonsense"}, "unknown kind 'nonsense'"),
        (linear(moe_backend="marlin"), "this release has no moe_backend setting"),
        (linear(linear_backend="humming"), "the package humming is not installed here"),
    ],
)
def test_an_unavailable_choice_is_neither_an_answer_nor_an_error(
    ask: Asker, question: dict[str, Any], reason: str
) -> None:
    (answer,) = ask({"ask": [question]})["answers"]
    assert reason in answer["not_applicable"]
    assert (answer["selected"], answer["error"]) == (None, None)


def test_a_layer_without_a_kernel_is_unavailable(ask: Asker) -> None:
    """The fake release has no scheme for W4A16 and does not choose either."""
    (answer,) = ask({"ask": [{"kind": "w4a16-linear"}]})["answers"]
    assert answer["selected"] is None
    assert answer["error"]["type"] in ("ModuleNotFoundError", "AttributeError")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        pytest.param({"CRASH": "9"}, "ended with signal 9", id="killed"),
        pytest.param({"CRASH": "11"}, "ended with signal 11", id="segmentation-fault"),
        pytest.param({"EXIT": "3"}, "ended with exit status 3", id="exit"),
        pytest.param({"LOOP": "1"}, "took more than 2 s", id="endless-loop"),
    ],
)
def test_a_crashed_child_fails_only_its_own_request(
    ask: Asker, env: dict[str, str], message: str
) -> None:
    request = {"ask": [linear(), linear(env=env), linear()], "seconds": 2}
    first, second, third = ask(request)["answers"]
    assert second["error"] == {"type": "Crashed", "message": f"the child that asked {message}"}
    assert first["selected"] == third["selected"] == "CutlassKernel"


#: Each line is one import of the module.
COUNTING = FILES["vllm/__init__.py"] + (
    "import os\nwith open(os.environ['COUNT'], 'a') as log:\n    log.write('imported\\n')\n"
)


def test_one_import_answers_all_kinds_as_a_process_for_each_would(
    ask: Asker, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    files, common = {"vllm/__init__.py": COUNTING.encode()}, {"env": {"COUNT": str(count)}}
    asks = [{"kind": kind} for kind in dispatch_probe.FLAGS] + [linear(linear_backend="marlin")]
    together = ask({**common, "ask": asks}, files)
    assert count.read_text() == "imported\n"
    alone = [ask({**common, "ask": [one]}, files) for one in asks]
    assert count.read_text() == "imported\n" * (1 + len(asks))
    assert together["answers"] == [answer for one in alone for answer in one["answers"]]


def test_choices_are_read_from_the_release(ask: Asker) -> None:
    result = ask({"choices": ["nvfp4-linear"]})
    found = [(a["request"], a["selected"]) for a in result["choices"]]
    variable = "VLLM_NVFP4_GEMM_BACKEND"
    assert found == [
        (linear(env={variable: "cutlass"}), "CutlassKernel"),
        (linear(env={variable: "marlin"}), "MarlinKernel"),
        (linear(env={"VLLM_DISABLED_KERNELS": "CutlassKernel"}), "CutlassKernel"),
        (linear(linear_backend="cutlass"), "CutlassKernel"),
        (linear(linear_backend="marlin"), "MarlinKernel"),
        (linear(linear_backend="humming"), None),
    ]
    assert result["choices"][-1]["not_applicable"] == "the package humming is not installed here"


# --------------------------------------------------------------------------------------- simulation


def test_every_simulated_part_is_named(ask: Asker) -> None:
    text = "\n".join(ask({"ask": [linear()]})["simulated"])
    for part in (
        "device: NVIDIA GB10, compute capability 12.1",
        "torch.version.cuda: 13.0 (a CPU build of torch)",
        "torch.ops._C.cutlass_scaled_mm_supports_fp4: answers as a CUDA 13.0 build would",
        "vllm._C: an empty module (not installed)",
    ):
        assert part in text
    assert "driver" not in text  # nothing here is linked against one


@pytest.mark.skipif(has_driver(), reason="this machine has a driver, which is then used")
def test_a_stub_driver_is_made_for_installed_extensions(ask: Asker) -> None:
    """They load as far as the loader goes; this one then turns out to be no module."""
    module = shared_library("_C.abi3.so", ["nothing"], platform.machine())
    result = ask({"ask": [linear()]}, {"vllm/_C.abi3.so": module})
    text = "\n".join(result["simulated"])
    assert "driver: a generated libcuda.so.1 whose functions all return CUDA_ERROR_STUB" in text
    assert "vllm._C: an empty module (dynamic module does not define" in text
    assert result["real"] == []
    assert result["answers"][0]["selected"] == "CutlassKernel"


def test_a_release_that_cannot_be_imported_is_fatal(ask: Asker) -> None:
    result = ask({"ask": [linear()]}, {"vllm/platforms/cuda.py": b"import nobody_has_this\n"})
    assert result["fatal"]["type"] == "ModuleNotFoundError"
    assert "nobody_has_this" in result["not_found"]
    assert result["answers"] == []


def test_a_failed_kernel_import_does_not_stop_other_requests(ask: Asker) -> None:
    kinds = ("nvfp4-linear", "fp8-block", "w4a16-linear", "nonsense")
    request = {"ask": [{"kind": kind} for kind in kinds]}
    result = ask(request, {LINEAR: b"raise ImportError('cut in two')\n"})
    assert result["fatal"] is None
    *broken, other = result["answers"]
    assert {answer["error"]["message"] for answer in broken} == {"cut in two"}
    assert other["not_applicable"]


def test_no_vllm_is_fatal(ask: Asker) -> None:
    fatal = ask({"paths": [], "ask": [linear()]})["fatal"]
    assert fatal["type"] == "ModuleNotFoundError"
    assert fatal["message"] == "vllm is not installed for this interpreter"


BUNDLED = """
try:
    import vllm.third_party.deep_gemm as bundled
    seen = str(bundled.fp8_gemm_nt)
except ImportError:
    seen = "absent"
except RuntimeError as error:
    seen = str(error)
logger.info("bundled: %s", seen)
""".replace("\n", "\n    ")
ASKING = FILES[LINEAR].replace("    capability =", f"{BUNDLED}\n    capability =").encode()


@pytest.mark.parametrize(
    ("files", "seen"),
    [
        pytest.param({}, "absent", id="not-in-the-release"),
        pytest.param(
            {f"{DEEP_GEMM}/__init__.py": b"from . import _C\n", f"{DEEP_GEMM}/_C.so": None},
            "<function",
            id="compiled-for-another-machine",
        ),
        pytest.param(
            {f"{DEEP_GEMM}/__init__.py": b"from . import _C\n", f"{DEEP_GEMM}/_C.so": b"?"},
            "<function",
            id="does-not-load-here",
        ),
        pytest.param(
            {
                f"{DEEP_GEMM}/__init__.py": b"raise RuntimeError('no toolkit')\n",
                f"{DEEP_GEMM}/_C.so": b"?",
            },
            "no toolkit",
            id="fails-by-itself",
        ),
    ],
)
def test_bundled_code_is_replaced_only_if_it_cannot_load(
    ask: Asker, files: dict[str, bytes | None], seen: str
) -> None:
    """An error of its own is the release's answer: it decides what is selected."""
    result = ask({"ask": [linear()]}, {LINEAR: ASKING, **files})
    (line,) = (text for text in result["answers"][0]["lines"] if text.startswith("bundled: "))
    assert line.startswith(f"bundled: {seen}")
    noted = any("deep_gemm: a stand-in" in part for part in result["simulated"])
    assert noted is (seen == "<function")


def test_modules_are_recognised_installed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12 on ``importlib.metadata.files`` leaves out what is not on disk."""
    info = tmp_path / "vllm-0.20.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.1\n")
    names = ("vllm/_C.abi3.so", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/envs.py")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "files", lambda _: [])
    found = dict(load("dispatch_device").extensions_of_wheel())
    assert list(found) == ["vllm._C", "vllm.vllm_flash_attn._vllm_fa2_C"]
    assert found["vllm._C"] == str(tmp_path / "vllm/_C.abi3.so")
