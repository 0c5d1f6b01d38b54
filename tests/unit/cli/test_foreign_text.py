"""What strangers wrote, in what commands print: no line of it commands a terminal or a runner."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.fakes import vllm_files, write_tree

if TYPE_CHECKING:
    from tests.unit.caller import Call

#: As it stands in TOML.
EVIL = r"x\n::error::pwned\n  ::set-output name=a::b\n##[error]c ##[add-mask]d\u001b[2J\u009b1A"
LAYER = f"""
summary = "{EVIL}"
description = "{EVIL}"
order = 100
package = "vllm"

[provenance]
origin = "vendor, {EVIL}"
forwarded = "not-needed"
applied-upstream = "no"
last-update = 2026-11-22

[[upstream]]
when = {{ vllm = ">=0.30.0rc0" }}
since = "vllm 0.30.0"
reason = "{EVIL}"
probe = [{{ file = "vllm/core.py", contains = "BACKEND" }}]

[[not-applicable]]
when = {{ vllm = "<0.10.0rc0" }}
reason = "{EVIL}"

[[variant]]
name = "first"
when = {{ vllm = ">=0.20.0rc0" }}
notes = ["{EVIL}"]

[[variant.op]]
op = "replace"
file = "vllm/core.py"
old = "BACKEND = 'cutlass'"
new = "BACKEND = 'b12x'"
count = 1
"""
LOG = (
    b"INFO 11-28 10:00:00 [api_server.py:1] vLLM API server version 0.33.0\n"
    b"ERROR 11-28 10:00:01 [core.py:1] ValueError: ::error::x ##[error]y\n"
    b"::error::z\n##[error]q\n"
    b"torch.OutOfMemoryError: CUDA out of memory. ##[error] \x1b[2J ::warning::w\n"
)

COMMANDS = {
    "list": ("layers", "list", "--patches", "own"),
    "show": ("layers", "show", "evil", "--patches", "own"),
    "check": ("layers", "check", "evil", "--patches", "own"),
    "plan": ("plan", "-l", "evil", "-b", "dir:site", "--patches", "own"),
    "apply": ("apply", "site", "-l", "evil", "--patches", "own"),
    "matrix": ("matrix", "-l", "evil", "--patches", "own", "--wheels", "w"),
    "diagnose": ("diagnose", "server.log"),
    "diagnose-two": ("diagnose", "server.log", "other.log"),
    "lint": ("lint", "serve.sh", "--release", "0.33.0"),
    "unknown": ("layers", "show", "::error::x\n##[error]y"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("version", ["0.20.1", "0.30.0"])
def test_no_line_is_a_command(
    call: Call, command: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where GitHub's variables are not seen, as in a container that a step runs."""
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    write_tree(Path("own"), {"evil/layer.toml": LAYER.encode()})
    write_tree(Path("site"), vllm_files(version))
    write_tree(Path("w"), {"x": b""})
    for name in ("server.log", "other.log"):
        Path(name).write_bytes(LOG)
    Path("serve.sh").write_bytes(b"vllm serve m --::error::x ##[error]y\n  ::error::z\n")
    done = call(*COMMANDS[command])
    assert "internal error" not in done.err
    said = done.out + done.err
    assert "pwned" in said or command not in {"list", "show"}
    assert not re.findall(r"^\s*::.*", said, re.MULTILINE)
    assert "##[" not in said
    assert not set("\x1b\x9b") & set(said)


def test_a_json_document_keeps_its_values(call: Call) -> None:
    write_tree(Path("own"), {"evil/layer.toml": LAYER.encode()})
    done = call("layers", "list", "--patches", "own", "--json")
    assert "##[" not in done.out
    (summary,) = (row["summary"] for row in done.json["layers"] if row["name"] == "evil")
    assert "\n##[error]c ##[add-mask]d" in summary
