"""Every command that takes a path, with something odd there: one line, an exit code, at once."""

from __future__ import annotations

import contextlib
import os
import signal
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.applier.test_files import ODD
from tests.unit.caller import LAYER
from tests.unit.fakes import vllm_files, write_tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from tests.unit.caller import Call, Result

PATCH = b"--- a/vllm/x.py\n+++ b/vllm/x.py\n@@ -1,4 +1,4 @@\n one\n two\n-three\n+drei\n four\n"
CONFIG = dumps({"architectures": ["X"], "num_hidden_layers": 1}).encode()
#: A plan of the layer on the directory; nothing is asked of the network.
DIR_PLAN = ("plan", "-l", "fix", "-b", "dir:site")
LAYOUT = {
    "image/oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
    "image/index.json": b'{"schemaVersion": 2, "manifests": []}',
}

#: The words of a command, the path at which the odd thing is, and the other files.
COMMANDS: dict[str, tuple[tuple[str, ...], str, dict[str, bytes]]] = {
    "diagnose": (("diagnose", "odd"), "odd", {}),
    "diagnose-folder": (("diagnose", "logs"), "logs/odd.log", {"logs/a.log": b"INFO vLLM\n" * 9}),
    "diagnose-check": (("diagnose", "check", "odd"), "odd", {}),
    "lint": (("lint", "odd", "--release", "0.33.0"), "odd", {}),
    "preflight": (("preflight", "./odd"), "odd", {}),
    "preflight-config": (("preflight", "./model"), "model/config.json", {"model/x": b""}),
    "memory": (("memory", "./odd"), "odd", {}),
    "memory-config": (("memory", "./model"), "model/config.json", {"model/x": b""}),
    "memory-quant": (
        ("memory", "./model"), "model/hf_quant_config.json", {"model/config.json": CONFIG}
    ),
    "memory-index": (
        ("memory", "./model"), "model/model.safetensors.index.json", {"model/config.json": CONFIG}
    ),
    "memory-tensors": (
        ("memory", "./model"), "model/model.safetensors", {"model/config.json": CONFIG}
    ),
    "audit": (("audit", "./odd"), "odd", {}),
    "audit-folder": (("audit", "./model"), "model/model.safetensors", {"model/x": b""}),
    "models": (("models", "list", "--models", "own"), "own/mine.toml", {"own/x": b""}),
    "recipe": (("recipe", "nemotron-3-super", "-o", "odd"), "odd", {}),
    "bench-log": (("bench", "http://127.0.0.1:9", "--log", "odd"), "odd", {}),
    "bench-against": (("bench", "http://127.0.0.1:9", "--against", "odd"), "odd", {}),
    "from-patch": (("layers", "new", "x", "--from-patch", "odd"), "odd", {}),
    "from-series": (("layers", "new", "x", "--from-series", "s"), "s/series", {"s/a": PATCH}),
    "from-series-patch": (
        ("layers", "new", "x", "--from-series", "s"), "s/a.patch", {"s/series": b"a.patch\n"}
    ),
    "from-mod": (("layers", "new", "x", "--from-mod", "odd"), "odd", {}),
    "from-mod-script": (("layers", "new", "x", "--from-mod", "m"), "m/run.sh", {"m/a": b""}),
    "layers-check": (
        ("layers", "check", "x", "--patches", "own"), "own/x/layer.toml", {"own/y/layer.toml": b""}
    ),
    "layers-list": (
        ("layers", "list", "--patches", "own"), "own/x/pins.toml",
        {"own/x/layer.toml": LAYER.encode()},
    ),
    "lock": ((*DIR_PLAN, "--lock"), "spark-build.lock", {}),
    "bake": (("bake", "--images", "odd", "-o", "out"), "odd", {}),
    "verify-against": (
        ("verify", "oci:image", "--level", "serve", "--bench", "--against", "odd"), "odd", LAYOUT
    ),
    "verify-index": (("verify", "oci:image"), "image/index.json", LAYOUT),
    "publish-index": (
        ("publish", "oci:image", "--to", "localhost:9/x"), "image/index.json", LAYOUT
    ),
    "evidence": (
        ("publish", "oci:image", "--to", "localhost:9/x", "--evidence", "odd"), "odd", LAYOUT
    ),
    "plan-record": (DIR_PLAN, "site/vllm-0.20.1.dist-info/RECORD", {}),
    "plan-file": (DIR_PLAN, "site/vllm/core.py", {}),
    "plan-receipt": (DIR_PLAN, "site/.spark-build/receipts/fix.json", {}),
    "apply-file": (("apply", "site", "-l", "fix"), "site/vllm/core.py", {}),
    "apply-journal": (("apply", "site", "-l", "fix"), "site/.spark-build/journal.json", {}),
    "apply-lock": (("apply", "site", "-l", "fix"), "site/.spark-build/lock", {}),
    "revert-journal": (("revert", "site"), "site/.spark-build/journal.json", {}),
    "revert-receipt": (("revert", "site"), "site/.spark-build/receipts/fix.json", {}),
    "matrix-mods": (("matrix", "--mods", "odd", "--wheels", "w"), "odd", {"w/x": b""}),
    "matrix-wheels": (
        ("matrix", "-l", "fix", "--wheels", "w"), "w/vllm-0.20.1-py3-none-any.whl", {"w/x": b""}
    ),
    "dispatch-table": (
        ("dispatch", "table", "--evidence", "e", "--to", "t.md"), "e/vllm-0.20.1.json",
        {"e/x": b""},
    ),
    "dispatch-to": (
        ("dispatch", "table", "--check", "--to", "odd", "--evidence", "e"), "odd", {"e/x": b""}
    ),
    "recipes-tags": (("recipes", "export", "--in", "r", "--tags", "odd"), "odd", {}),
    "recipes-check": (
        ("recipes", "export", "--in", "r", "--check"), "r/recipes/sparkrun/a.yaml", {}
    ),
    "mods-check": (("mods", "export", "--in", "m", "--check"), "m/sm121-marlin/run.sh", {}),
}  # fmt: skip
#: A log may come through a pipe.
READS_PIPES = {"diagnose"}


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """End a command that waits for ever, or reads without an end."""

    def over(_number: int, _frame: FrameType | None) -> None:
        pytest.fail("it waits, or reads without an end")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(30)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def called_with(call: Call, command: str, kind: str) -> Result:
    words, place, files = COMMANDS[command]
    write_tree(Path(), files)
    write_tree(Path("site"), vllm_files())
    path = Path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    ODD[kind][0](path)
    with at_once():
        return call(*words)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("command", COMMANDS)
def test_something_odd_in_the_place_of_a_file(call: Call, command: str, kind: str) -> None:
    if command in READS_PIPES and kind == "pipe":
        pytest.skip("it reads pipes")
    done = called_with(call, command, kind)
    assert done.code in {0, 2, 3, 4, 5, 8, 9}, done.err
    assert "internal error" not in done.err
    assert "Traceback" not in done.err
    if done.code:
        errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, done.err


@pytest.mark.parametrize(
    "command", ["diagnose-check", "memory", "audit", "from-patch", "from-mod", "bench-log", "bake"]
)
def test_the_error_names_the_file(call: Call, command: str) -> None:
    done = called_with(call, command, "pipe")
    assert "odd" in done.err.partition("\n")[0]


def test_a_log_through_a_pipe_is_read(call: Call) -> None:
    """As of ``diagnose <(docker logs NAME)``."""
    reading, writing = os.pipe()
    os.write(writing, b"INFO 11-28 10:00:00 [api_server.py:1] vLLM API server version 0.33.0\n" * 3)
    os.close(writing)
    with at_once():
        done = call("diagnose", f"/dev/fd/{reading}")
    os.close(reading)
    assert "3 lines" in done.out + done.err or done.code == 0, done.err


#: A safetensors file without a tensor: its header is an empty object.
EMPTY = (2).to_bytes(8, "little") + b"{}"


@pytest.mark.parametrize("command", ["audit", "memory"])
@pytest.mark.parametrize("config", [b"{}", CONFIG, None])
def test_a_checkpoint_without_a_tensor(call: Call, command: str, config: bytes | None) -> None:
    """``audit`` took the longest of no names."""
    write_tree(Path("model"), {"model.safetensors": EMPTY})
    if config is not None:
        write_tree(Path("model"), {"config.json": config})
    done = call(command, "./model")
    assert done.code in {0, 2, 5}, done.err
    assert "internal error" not in done.err
    assert call(command, "./model", "--json").code == done.code
