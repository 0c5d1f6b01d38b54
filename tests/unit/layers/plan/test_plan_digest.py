"""The digest of a plan is what it was: images and locks that are published name it."""

from __future__ import annotations

import dataclasses
from typing import Any

from builder.applier.layers import DonorPin, InputPin, WheelPin
from builder.applier.machinecode import Compiled, ModuleCode
from builder.applier.receipts import FileEntry, Receipt
from builder.applier.states import Outcome
from builder.applier.trees import Content
from builder.applier.values import read_value
from builder.common.document import read
from builder.common.plan import (
    BuildPlan,
    ExpectedChoice,
    FoundSources,
    LayerDecision,
    Maker,
    PinnedWheel,
    StageRequest,
    digest_of,
)
from tests.unit.fakes import BACKEND, fake_base, make_layer, vllm_files

PIN = WheelPin("lib", "2", "lib-2-py3-none-any.whl", "1" * 64, 7, "any", "py3")
DONOR = {
    "distribution": "vllm", "version": "1", "filename": "vllm-1.whl", "sha256": "2" * 64,
    "member": "vllm/a.py", "member-sha256": "3" * 64,
}  # fmt: skip
STAGE: dict[str, Any] = {
    "change": "sm121-guard", "arch": "12.1a", "platform": "linux/arm64", "vllm": "0.20.1",
    "torch": "2.9.0", "module": "4" * 64, "compilers": {"nvcc": "13.0", "g++": "12"},
    "operators": ["cutlass_scaled_fp4_mm"],
    "files": [{"path": "csrc/a.cu", "before": "5" * 64, "after": None}],
    "units": [{"path": "csrc/a.cu", "extension": "_C", "gencode": ["compute_121a,sm_121a"]}],
    "inputs": [DONOR], "toolkit": {"image": "cuda:13", "digest": f"sha256:{'6' * 64}"},
    "pulls": [{
        "request": "o/r#1", "repository": "o/r", "number": 1, "commit": "7" * 40,
        "sha256": "8" * 64,
    }],
}  # fmt: skip
COMPILED = Compiled(
    code=ModuleCode("vllm/_C.so", "9" * 64, "trap", "sm_120a", "enable_sm120_only"),
    wheel=InputPin("companion", "1", "companion-1.whl", "a" * 64),
    sources=FoundSources(
        change="pr-1",
        filename="vllm.tar.gz",
        sha256="b" * 64,
        found="to-compile",
        unreached=("csrc/é.cuh",),
    ),
    stage=read(STAGE, StageRequest),
)
WHEEL = PinnedWheel(filename="vllm-1.whl", sha256="f" * 64)
CARRIED = Compiled(carrier="compiled")
RECEIPT = Receipt(
    layer="fix",
    layer_digest="",
    variant="only",
    sequence=1,
    env={},
    serve_flags=(),
    moe_serve_flags=(),
    files={
        "vllm/core.py": FileEntry(before="c" * 64, after="d" * 64, ops=("replace",)),
        "vllm/gone.py": FileEntry(before="c" * 64, after=None, ops=("remove",)),
    },
)


def decision(name: str, outcome: Outcome, **more: Any) -> LayerDecision:
    """A layer, judged."""
    return LayerDecision(layer=make_layer(name, BACKEND), outcome=outcome, **more)


def whole_plan() -> BuildPlan:
    """A plan with one of everything."""
    fix = Outcome(
        "fix", "needed", "1 file to change", variant="only", env={"B": "2", "A": "ü"},
        serve_flags=["--x"], moe_serve_flags=["--moe-x"], notes=["an offset of 3 lines"],
        inputs=[PIN, read_value(DonorPin, DONOR, "the pin")],
    )  # fmt: skip
    changes = {"vllm/core.py": Content(sha256="d" * 64, size=3), "vllm/gone.py": None}
    compiled = Outcome("compiled", "needed", "compiled", compiled=COMPILED)
    carried = Outcome("carried", "needed", "compiled with layer compiled", compiled=CARRIED)
    upstream = Outcome("idle", "upstream", "merged", since="vllm 0.21.0")
    return BuildPlan(
        name="test",
        profiles=("one", "two"),
        base=fake_base(vllm_files(), wheels=(WHEEL,)).identity,
        decisions=(
            decision("fix", fix, receipt=RECEIPT, changes=changes),
            decision("carried", carried, receipt=None, changes={}),
            decision("compiled", compiled, receipt=RECEIPT, changes={}),
            decision("idle", upstream, receipt=None, changes={}),
        ),
        expect=(
            ExpectedChoice(kind="moe", line="Using X"),
            ExpectedChoice(kind="linear", selected="*"),
            ExpectedChoice(kind="kv", refused="no fp4"),
        ),
        maker=Maker(version="1.2.3", files=f"sha256:{'e' * 64}"),
        epoch=1700000000,
        single_layer=True,
        hints=("a hint",),
    )


def test_the_digest_is_unchanged() -> None:
    plan = whole_plan()
    assert plan.digest == "sha256:5253bbb55ea9df27ac61d64edb4e5d236ae76350026c97372e9822c6e57b38da"
    assert digest_of(plan.as_json()) == plan.digest


def test_the_path_of_a_directory_is_ignored() -> None:
    base = dataclasses.replace(whole_plan().base, kind="dir", ref="dir:/home/me")
    plan = dataclasses.replace(whole_plan(), base=base)
    assert plan.digest == "sha256:40faf325aa56d69e08342532d443dbbd2478faac6429850a22c33d03d03732a2"
    elsewhere = dataclasses.replace(base, ref="dir:/srv", site_packages="/srv")
    assert dataclasses.replace(plan, base=elsewhere).digest == plan.digest
