"""What a container does to a command: shells as entrypoints, files mounted over a package."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from builder.serving.commands import read_commands
from builder.serving.lint import Finding, lint
from builder.serving.models import Models
from builder.serving.serveflags import Processors, ServeInterface, read_interface
from tests.unit.serving.release import files as release_files
from tests.unit.serving.test_lint import FakeLinter, flag

SERVE = "vllm serve a/b --port 1"
POD = "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - image: x/vllm:1\n"


def compose(*lines: str) -> str:
    return "\n    ".join(["services:\n  v:\n    image: x/vllm:1", *lines]) + "\n"


def found(name: str, text: str) -> list[Finding]:
    return list(lint([(name, text)], FakeLinter(release="0.33.0"), Models.discover()).findings)


def of(rule: str, name: str, text: str) -> list[Finding]:
    return [one for one in found(name, text) if one.rule == rule]


GOOD = (
    ("compose.yaml", compose("entrypoint: /bin/bash", f'command: ["-c", "{SERVE}"]')),
    ("compose.yaml", compose('entrypoint: ["bash", "-c"]', f'command: ["{SERVE}"]')),
    ("compose.yaml", compose("entrypoint: sh -lc", f"command: '\"{SERVE}\"'")),
    ("compose.yaml", compose('entrypoint: [tini, --, bash, -c]', f'command: ["{SERVE}"]')),
    ("compose.yaml", compose('entrypoint: ["bash", "-euo", "pipefail", "-c"]',
                             f'command: ["{SERVE}"]')),
    ("compose.yaml", compose('entrypoint: ""', f'command: [bash, -c, "{SERVE}"]')),
    ("pod.yaml", f'{POD}    command: [bash, -c, "{SERVE}"]\n'),
    ("pod.yaml", f'{POD}    command: [/bin/sh]\n    args: [-lc, "{SERVE}"]\n'),
    ("x.sh", f'docker run --entrypoint bash x/vllm:1 -c "{SERVE}"\n'),
    ("x.sh", f"docker create --entrypoint=/bin/sh x/vllm:1 -lc '{SERVE}'\n"),
    ("x.sh", f"docker run --entrypoint bash x/vllm:1 -c 'exec \"$@\"' -- {SERVE}\n"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "text"), GOOD)
def test_a_shell_as_entrypoint_is_read(name: str, text: str) -> None:
    (command,) = read_commands(name, text)
    assert [word.text for word in command.words] == ["a/b", "--port", "1"]
    assert command.image == "x/vllm:1"
    assert not of("shell-entrypoint", name, text)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        # bash reads a file: the second shell, vllm
        ("compose.yaml", compose("entrypoint: /bin/bash", f'command: [bash, -c, "{SERVE}"]'),
         "a script to read"),
        ("compose.yaml", compose("entrypoint: [bash]", f"command: {SERVE}"), "a script to read"),
        ("x.sh", f"docker run --entrypoint bash x/vllm:1 {SERVE}\n", "a script to read"),
        ("pod.yaml", f"{POD}    command: [bash]\n    args: [{', '.join(SERVE.split())}]\n",
         "a script to read"),
        # -c takes one word, and compose splits a text into words
        ("compose.yaml", compose('entrypoint: ["bash", "-c"]', f"command: {SERVE}"), "alone"),
        ("compose.yaml", compose("entrypoint: /bin/sh -lc", "command: |", f"  {SERVE}"), "alone"),
        ("compose.yaml", compose('entrypoint: ["bash", "-c"]', "command: >", f"  {SERVE}"),
         "alone"),
        ("x.sh", f"docker run --entrypoint bash x/vllm:1 -c {SERVE}\n", "alone"),
        ("x.sh", f"docker run x/vllm:1 bash -lc {SERVE}\n", "alone"),
        ("x.sh", f"bash -c {SERVE}\n", "alone"),
    ],
)  # fmt: skip
def test_a_shell_that_does_not_run_the_command(name: str, text: str, why: str) -> None:
    (command,) = read_commands(name, text)
    assert [word.text for word in command.words] == ["a/b", "--port", "1"]
    (finding,) = of("shell-entrypoint", name, text)
    assert finding.severity == "error"
    assert why in finding.message
    assert finding.help


OVER = "/usr/local/lib/python3.12/dist-packages/vllm/model_executor/layers/wombat.py"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("x.sh", f"docker run -v ./wombat.py:{OVER}:ro x/vllm:1 {SERVE}\n", 1),
        ("x.sh", f"docker run \\\n  --volume=./w.py:{OVER} \\\n  x/vllm:1 {SERVE}\n", 2),
        ("x.sh", f"docker run --mount type=bind,source=$PWD/w.py,target={OVER} x/vllm:1 {SERVE}\n",
         1),
        ("x.sh", f"docker run --mount type=bind,src=./w.py,dst={OVER},ro x/vllm:1 {SERVE}\n", 1),
        ("compose.yaml",
         compose("volumes:", "  - hf:/root/.cache", f"  - ./w.py:{OVER}:ro", f"command: {SERVE}"),
         6),
        ("compose.yaml",
         compose("volumes:", f"  - {{type: bind, source: ./w.py, target: {OVER}}}",
                 f"command: {SERVE}"), 5),
        ("pod.yaml", (f"{POD}    command: [{', '.join(SERVE.split())}]\n    volumeMounts:\n"
         f"    - {{name: w, mountPath: {OVER}, subPath: w.py}}\n"), 8),
        ("x.sh", (f"docker run -v ./vllm:/opt/venv/lib/python3.12/site-packages/vllm x/vllm:1 "
         f"{SERVE}\n"), 1),
        ("x.sh", f"docker run -v ./w.py:/workspace/vllm/vllm/v1/wombat.py x/vllm:1 {SERVE}\n", 1),
        ("x.sh", (f'export VLLM_SPARK_EXTRA_DOCKER_ARGS="-v $PWD/w.py:{OVER}"\n'
         f"./launch-cluster.sh exec {SERVE}\n"), 1),
    ],
)  # fmt: skip
def test_a_file_that_is_mounted_over_a_package(name: str, text: str, line: int) -> None:
    (finding,) = of("mounted-over", name, text)
    assert (finding.severity, finding.line) == ("warning", line)
    assert "vllm" in finding.message
    assert "layers new" in finding.help
    assert "matrix --patches" in finding.help


@pytest.mark.parametrize(
    "mount",
    ["~/.cache/huggingface:/root/.cache/huggingface", "./models:/models:ro",
     "./parser.py:/app/parser.py", "./template.jinja:/vllm/template.jinja",
     "vllm:/root/.cache/vllm"],
)  # fmt: skip
def test_other_mounts_are_no_finding(mount: str) -> None:
    assert not of("mounted-over", "x.sh", f"docker run -v {mount} x/vllm:1 {SERVE}\n")


# --------------------------------------------------------------- processors with a speculation

V1, V2 = (
    "vllm/v1/sample/logits_processor/__init__.py",
    "vllm/v1/worker/gpu/sample/logits_processor/loader.py",
)
REFUSES = """
def build_logitsprocs(vllm_config, custom_logitsprocs=()):
    if vllm_config.speculative_config:
        if custom_logitsprocs:
            raise ValueError(STR)
        return []
    return [1]
"""
TAKES = """
def build_logitsprocs(vllm_config, custom_logitsprocs=()):
    if custom_logitsprocs and not vllm_config.model_config:
        raise ValueError(STR)
    return [1]
"""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({V1: REFUSES}, "refused"),
        ({V1: REFUSES, V2: "def build_custom_logits_processors(): ..."}, "refused by runner V1"),
        ({V1: TAKES}, ""),
        ({}, ""),
        ({V1: "def build_logitsprocs(:"}, ""),
    ],
)
def test_a_release_says_whether_it_takes_processors(files: dict[str, str], expected: str) -> None:
    data = {**release_files(), **{path: text.encode() for path, text in files.items()}}
    assert read_interface(data.get, "0.30.0").processors == expected


class Processing(FakeLinter):
    """A release that says something of processors."""

    def __init__(self, said: Processors) -> None:
        super().__init__(release="0.30.0")
        self._said = said

    def interface(self, command: object) -> ServeInterface:
        plain = super().interface(command)
        more = flag("--logits-processors", "many")
        return replace(plain, processors=self._said, flags=(*plain.flags, more))


SPECULATION = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'"""


@pytest.mark.parametrize(
    ("processors", "severity"),
    [("refused", "error"), ("refused by runner V1", "note"), ("", "")],
)
def test_processors_with_a_speculation(processors: Processors, severity: str) -> None:
    linter = Processing(processors)
    text = f"vllm serve a/b --logits-processors x.y:Z {SPECULATION}\n"
    findings = lint([("x.sh", text)], linter, Models.discover()).findings
    some = [one for one in findings if one.rule == "processors-speculation"]
    assert [one.severity for one in some] == ([severity] if severity else [])


@pytest.mark.parametrize(
    "words", ["--logits-processors x.y:Z", SPECULATION, f"--logits-processors $P {SPECULATION}"]
)
def test_one_of_both_is_no_finding_unless_both_are_given(words: str) -> None:
    linter = Processing("refused")
    findings = lint([("x.sh", f"vllm serve a/b {words}\n")], linter, Models.discover()).findings
    both = words.count("--") > 1
    assert ("processors-speculation" in [one.rule for one in findings]) == both
