"""Layer files, and layers in images, changed by chance: refused with a reason, or judged."""

from __future__ import annotations

import contextlib
import datetime
import json
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.judging import judge
from builder.applier.values import ApplyError
from builder.errors import RemoteError, SparkBuildError, UsageError
from builder.images.engines.baked import read_layers, read_plan
from builder.layers.catalog import order
from builder.layers.layerfile import description, load_layer
from tests.unit.chance import CASES
from tests.unit.fakes import (
    TARGET,
    FakeSources,
    MemoryTree,
    fake_base,
    make_layer,
    make_plan_of,
    make_wheel,
    replace_op,
    vllm_files,
)
from tests.unit.images.rootfs.test_fuzz import (  # noqa: F401 - a fixture
    _bounded,
    broken,
    changed,
    dices,
    document,
)

if TYPE_CHECKING:
    from pathlib import Path

    from builder.applier.layers import DonorPin, InputPin, Kernels, Layer
    from builder.applier.machinecode import KernelCode
    from builder.applier.sources import Member
    from builder.applier.trees import Tree

WHEEL = make_wheel("donor", "1.0", {"donor/a.py": "def one():\n    return 1\n"})
FILES = {
    "old.txt": "BACKEND = 'cutlass'",
    "fix.diff": "--- a/vllm/core.py\n+++ b/vllm/core.py\n@@ -1,5 +1,5 @@\n-BACKEND = 'cutlass'\n"
    "+BACKEND = 'b12x'\n \n \n def run():\n     return BACKEND\n",
    "hook.py": "def edit(text):\n    return text.replace('cutlass', 'b12x')\n",
    "new.py": "NEW = 1\n",
    "gpu.diff": "diff --git a/csrc/a.cu b/csrc/a.cu\n--- a/csrc/a.cu\n+++ b/csrc/a.cu\n"
    "@@ -1 +1 @@\n-1\n+2\n",
}
WHEN = {"vllm": ">=0.20.0"}
OPS: tuple[dict[str, Any], ...] = (
    {"op": "replace", "file": "vllm/core.py", "old-file": "old.txt", "new": "x", "count": 1},
    {"op": "diff", "file": "fix.diff", "if": WHEN},
    {"op": "graft", "file": "vllm/core.py", "from": "donor==1.0", "member": "donor/a.py",
     "names": ["one"], "after": "run"},
    {"op": "graft", "file": "vllm/a.py", "from": "donor==1.0", "member": "donor/a.py",
     "whole": True},
    {"op": "copy", "from": "new.py", "to": "vllm/new.py"},
    {"op": "wheel", "distribution": "donor", "version": "1.0", "wins-over": ["x"]},
    {"op": "remove", "distribution": "donor", "unless": ">=1"},
    {"op": "env", "name": "VLLM_NVFP4_GEMM_BACKEND", "value": "marlin", "reader": "vllm/envs.py"},
    {"op": "hook", "file": "vllm/core.py", "hook": "hook.py:edit"},
    {"op": "compile", "source": "vllm", "file": "gpu.diff", "arch": "12.1a"},
    {"op": "compile", "source": "vllm", "change": "sm120-family", "arch": "12.1a"},
    {"op": "pull", "pull": "vllm-project/vllm#1", "include": ["vllm/*"], "exclude": ["x"],
     "map": {"src/": "vllm/"}, "project": "a/b"},
)  # fmt: skip
LAYER: dict[str, Any] = {
    "summary": "a fix", "description": "more", "order": 50, "after": ["other"], "series": "s",
    "package": "vllm",
    "provenance": {
        "origin": "our own", "bug": ["#1"], "forwarded": "no", "applied-upstream": "no",
        "last-update": datetime.date(2026, 1, 2),
    },
    "upstream": [{
        "when": {"vllm": ">=0.30.0"}, "since": "vllm 0.30.0", "reason": "it is there",
        "probe": [{"file": "vllm/core.py", "contains": "x"}, {"file": "a", "missing": True}],
    }],
    "not-applicable": [{"when": {"vllm": "<0.10.0rc0"}, "reason": "too old"}],
    "variant": [{"name": "only", "when": WHEN, "notes": ["a"], "serve-flags": ["--a"],
                 "moe-serve-flags": ["--b"], "op": list(OPS[:2])}],
}  # fmt: skip
PINS: dict[str, Any] = {
    "wheel": [WHEEL.pin],
    "donor": [WHEEL.donor_pin("donor/a.py")],
    "code": [{"version": "0.20.1", "platform": "linux/arm64", "module": "vllm/_C.so",
              "sha256": "0" * 64, "how": "runs", "arch": "sm_120", "guard": "x"}],
    "pull": [{"base": "1" * 40, "commit": "2" * 40, "date": "2026-01-02", "forge": "github.com",
              "repository": "vllm-project/vllm", "request": "vllm-project/vllm#1", "number": 1,
              "sha256": "3" * 64, "size": 9}],
}  # fmt: skip


class OneWheel(FakeSources):
    """An index with one wheel, and no compiler."""

    def members(self, pin: InputPin) -> list[Member]:
        if pin.filename != WHEEL.filename:
            raise RemoteError(f"{pin.filename} is not on the index")
        return super().members(pin)

    def donor(self, pin: DonorPin) -> bytes:
        if (pin.filename, pin.member) != (WHEEL.filename, "donor/a.py"):
            raise RemoteError(f"{pin.filename} is not on the index")
        return super().donor(pin)

    def code(self, tree: Tree, path: str, wanted: Kernels, digest: str) -> KernelCode:
        raise RemoteError(f"{path} is no module")


def toml(value: object) -> str:
    """A value in TOML, on one line."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, float):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return json.dumps("none" if value is None else value)


def file_of(table: dict[str, Any]) -> bytes:
    """A TOML file."""
    text = "".join(f"{json.dumps(key)} = {toml(item)}\n" for key, item in table.items())
    return text.encode("utf-8", "surrogatepass")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A layer's folder with the files that its ops name."""
    made = tmp_path / "fix"
    made.mkdir()
    for name, text in FILES.items():
        (made / name).write_text(text)
    (made / "pins.toml").write_bytes(file_of(PINS))
    return made


def judge_it(layer: Layer) -> None:
    """Judge a layer on a tree; only its own kind of error is expected."""
    with contextlib.suppress(ApplyError, SparkBuildError):
        order([layer])
        judge(layer, MemoryTree(vllm_files()), OneWheel(WHEEL), TARGET, {})


@pytest.mark.parametrize("op", OPS, ids=lambda op: str(op["op"]))
def test_every_op_is_read_unchanged(folder: Path, op: dict[str, Any]) -> None:
    variant = {**LAYER["variant"][0], "op": [op]}
    (folder / "layer.toml").write_bytes(file_of({**LAYER, "variant": [variant]}))
    layer = load_layer(folder)
    assert [one.kind for one in layer.ops] == [op["op"]]
    judge_it(layer)


def test_layer_files_by_chance(folder: Path) -> None:
    loaded = 0
    messages: list[str] = []
    for _, dice in dices("layer files", CASES * 60):
        variant = {**LAYER["variant"][0], "op": dice.sample(OPS, 2)}
        layer: Any = {**LAYER, "variant": [variant]}
        pins: Any = PINS
        for _ in range(dice.choice((1, 1, 2, 4))):
            if dice.random() < 0.7:
                layer = changed(dice, layer)
            else:
                pins = changed(dice, pins)
        data = file_of(layer) if isinstance(layer, dict) else b"x"
        (folder / "layer.toml").write_bytes(broken(dice, data) if dice.random() < 0.1 else data)
        (folder / "pins.toml").write_bytes(file_of(pins) if isinstance(pins, dict) else b"")
        try:
            read = load_layer(folder)
            description(folder)
        except UsageError as error:
            messages.append(str(error))
            continue
        loaded += 1
        judge_it(read)
    assert 0 < loaded < CASES * 60
    assert all(message.startswith("fix/") and len(message) < 2000 for message in messages)


def rendered_layers(tmp_path: Path) -> list[dict[str, Any]]:
    """A layer in JSON for each op."""
    folder = tmp_path / "fix"
    layers = []
    for op in OPS:
        variant = {**LAYER["variant"][0], "op": [op]}
        (folder / "layer.toml").write_bytes(file_of({**LAYER, "variant": [variant]}))
        layers.append(json.loads(json.dumps(load_layer(folder).rendered)))
    return layers


def test_layers_of_images_by_chance(folder: Path, tmp_path: Path) -> None:
    del folder
    layers = rendered_layers(tmp_path)
    read = 0
    for name, dice in dices("rendered", CASES * 120):
        data = document(dice, json.dumps([dice.choice(layers)]).encode())
        try:
            some = read_layers(data, name)
        except UsageError:
            continue
        read += 1
        for layer in some:
            if not any(op.kind == "hook" for op in layer.ops):  # these are not run
                judge_it(layer)
    assert 0 < read < CASES * 120


def test_plans_of_images_by_chance() -> None:
    layer = make_layer("fix", replace_op("BACKEND = 'cutlass'", "BACKEND = 'b12x'"))
    data = json.dumps(make_plan_of(fake_base(vllm_files()), layer).as_json()).encode()
    read = 0
    for name, dice in dices("plan", CASES * 120):
        try:
            plan = read_plan(document(dice, data), name)
        except UsageError:
            continue
        read += 1
        assert len(plan.digest) == 71
    assert 0 < read < CASES * 120
