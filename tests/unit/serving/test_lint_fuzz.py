"""Files that nobody would write are read in bounded memory and time, or refused in words."""

from __future__ import annotations

import os
import random
import resource
import signal
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.errors import UsageError
from builder.layers import shell
from builder.serving.commands import open_quotes, read_commands
from builder.serving.lint import lint
from builder.serving.models import Models
from tests.unit.chance import CASES

from .test_lint import FakeLinter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Another one is for a longer run by hand, with SPARK_BUILD_TEST_FUZZ for more cases.
SEED = int(os.environ.get("SPARK_BUILD_TEST_SEED", "20261123"))
#: What a case may take more than the process has, and the seconds after which it hangs.
MEMORY, SECONDS = 2 << 30, 120

SCRIPT = """\
#!/bin/bash
set -euo pipefail
export VLLM_A="${VLLM_A:-1}"
PORT=${1:-8000}
ARGS=(--port "$PORT" --moe-backend marlin)
if [ -n "$X" ]; then ARGS+=(--enforce-eager); fi
VLLM_B=2 vllm serve m "${ARGS[@]}" $EXTRA --x='{"a": {"b": 1}}' | tee -a log &
docker run --rm -it -e VLLM_C -e D=$E -p 1:1 vllm/vllm-openai:v0.33.0 \\
  --model m --port "$PORT"
ssh -p 22 host "docker exec c bash -lc 'vllm serve m --port 1'" <<'EOF'
x
EOF
cat > c.yaml <<EOF
services: {a: {image: me/x, command: "vllm serve m --port $PORT"}}
EOF
for i in 1 2; do eval "vllm serve m$i"; done
"""
COMPOSE = """\
services:
  a: &a
    image: vllm/vllm-openai:${TAG:-v0.33.0}
    command: ["--model", "m", "--port", "${PORT}"]
    environment: {VLLM_A: "1", B: $C}
  b:
    <<: *a
    entrypoint: [bash, -c]
    command:
      - |
        set -e
        vllm serve m \\
          --port 1
"""
RECIPE = """\
recipe_version: "2"
container: vllm/vllm-openai:v0.33.0
mods: ["@spark-build/x"]
defaults: {port: 8000, a: b}
env: {VLLM_A: "1"}
command: |
  vllm serve {model} --port {port} --x {a}
"""
MANIFEST = """\
spec:
  containers:
    - image: me/x
      command: [vllm]
      args: [serve, m, --port, $(PORT)]
      env: [{name: VLLM_A, value: "1"}, {name: B, valueFrom: {x: y}}]
---
kind: Service
"""
DOCKERFILE = """\
FROM vllm/vllm-openai:v0.33.0
ENV VLLM_A=1 B="c d" \\
    E=f
ENTRYPOINT ["vllm", "serve"]
CMD ["m", "--port", "1"]
"""
TEXTS = {
    "x.sh": SCRIPT, "compose.yaml": COMPOSE, "r.yaml": RECIPE, "k.yml": MANIFEST,
    "Dockerfile": DOCKERFILE, "x.json": '{"image": "me/x", "command": ["vllm", "serve", "m"]}',
}  # fmt: skip
PIECES = [
    "'", '"', "`", "\\", "\n", " ", "\t", "$", "${A}", "$(", ")", "(", "{", "}", "[", "]", "&", "*",
    "|", ";", "<<EOF\n", "EOF\n", "#", ": ", "- ", "? ", "!!x ", "%", "@", ",", "=", "--",
    "vllm serve ",
    "A=$A$A\n", "bash -c ", "docker run ", "&a ", "*a", "\0", "\ud800", "\u202e", "\x1b", "\ue000",
    "\ue001", "é", "0x", "1e999", "null", "[[[[", "{a}" * 50, "${A[@]}", "A+=(x)\n", "9" * 500,
]  # fmt: skip


@contextmanager
def bounded() -> Iterator[None]:
    """Memory and time; more is an error of the case."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = Path("/proc/self/statm").read_text("ascii").split()[0]
    now = int(pages) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, before[1]))

    def late(*_: object) -> None:
        raise TimeoutError(f"a case takes more than {SECONDS} s")

    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def changed(random_: random.Random, text: str) -> str:
    """A text with some of its pieces removed, doubled, moved or replaced."""
    for _ in range(random_.randint(1, 8)):
        at = random_.randrange(len(text) + 1)
        to = min(len(text), at + random_.choice((0, 1, 3, 10, 60)))
        match random_.randrange(6):
            case 0:
                text = text[:at] + text[to:]
            case 1:
                text = text[:to] + text[at:to] * random_.choice((1, 2, 30)) + text[to:]
            case 2:
                text = (
                    text[:at] + random_.choice(PIECES) * random_.choice((1, 1, 2, 40)) + text[at:]
                )
            case 3:
                text = text[:at] + random_.choice(PIECES) + text[to:]
            case 4:
                text = text[to:] + text[:at]
            case _:
                other = random_.choice(list(TEXTS.values()))
                start = random_.randrange(len(other))
                text = text[:at] + other[start : start + 80] + text[at:]
    return text


@pytest.mark.parametrize("name", TEXTS)
def test_changed_files_are_read_or_refused(name: str) -> None:
    numbers = random.Random(f"{SEED} {name}")
    models, linter = Models.discover(), FakeLinter()
    for _ in range(8 * CASES):
        text = changed(numbers, TEXTS[name])
        with bounded():
            for read in (read_commands, open_quotes):
                try:
                    said = refusal(partial(read, name, text))
                except Exception as error:
                    raise AssertionError(f"{error!r} of {name}: {text!r}") from error
                assert not said or name in said, repr(text)
            try:
                report = lint([(name, text)], linter, models)
            except UsageError:
                continue
            lines = text.count("\n") + 2
            assert all(0 <= one.line <= lines for one in report.findings), repr(text)


@pytest.mark.parametrize(
    "piece",
    ["a ", "a|", "a;", "A=1 ", "--x ", "'", '"$', "$(", "((", "{ ", "[[", "<<E\n", "if a; then\n",
     "A=$A$A\n", 'A+=("${A[@]}" x)\n', "vllm serve $A\n", "export A=$A$A\n", "- ", "[", "{a: ",
     "&a ", "a: &a [*a]\n", "? ", "'':\n ", "FROM x\n", "ENV A=1\n", "CMD [\n", "CMD x \\\n",
     "\\\n", "routing_strategy ", "routing_strategy:" + " " * 40, "# spark-build: ignore[a]"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["x.sh", "x.yaml", "Dockerfile"])
def test_a_piece_that_is_repeated(name: str, piece: str) -> None:
    text = f"{piece * (5_000 // len(piece))}\nvllm serve m\n"
    with bounded():
        said = [refusal(partial(read, name, text)) for read in (read_commands, open_quotes)]
        assert all(name in one for one in said if one)
        refusal(partial(lint, [(name, text)], FakeLinter(), Models.discover()))


def refusal(call: Callable[[], object]) -> str:
    """What an input is refused with; empty if it is read."""
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def test_a_script_that_the_grammar_takes_too_long_for(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "&a " * 4000
    assert refusal(partial(read_commands, "x.sh", text)) == ""
    monkeypatch.setattr(shell, "_SECONDS", -1.0)
    for read in (read_commands, open_quotes):
        assert "is no script that can be read in" in refusal(partial(read, "x.sh", text))
    assert refusal(partial(read_commands, "x.sh", SCRIPT)) == ""
