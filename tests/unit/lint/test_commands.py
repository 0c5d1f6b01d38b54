"""Serve commands are found in every kind of file, each word with its line."""

import pytest

from builder.conversion.shell import UNKNOWN
from builder.errors import UsageError
from builder.lint.commands import ServeCommand
from builder.lint.readers import read_commands


def one(name: str, text: str) -> ServeCommand:
    (command,) = read_commands(name, text)
    return command


def words(command: ServeCommand) -> list[tuple[str, int]]:
    return [(word.text, word.line) for word in command.words]


def env(command: ServeCommand) -> dict[str, str]:
    return {variable.name: variable.value for variable in command.env}


def test_command_line_over_several_lines() -> None:
    command = one("serve.sh", "export VLLM_A=1\nVLLM_B=2 vllm serve m \\\n  --port 8000\n")
    assert words(command) == [("m", 2), ("--port", 3), ("8000", 3)]
    assert env(command) == {"VLLM_A": "1", "VLLM_B": "2"}
    assert command.model == "m"


def test_docker_run_of_an_official_image() -> None:
    text = "docker run --gpus all -it --rm -e VLLM_A=1 -p8000:8000 \\\n"
    text += "  --env HF_TOKEN vllm/vllm-openai:v0.33.0 \\\n  --model m --port 1\n"
    command = one("run.sh", text)
    assert command.image == "vllm/vllm-openai:v0.33.0"
    assert command.image_line == 2
    assert command.model == "m"
    assert env(command) == {"VLLM_A": "1", "HF_TOKEN": UNKNOWN}


@pytest.mark.parametrize(
    "rest",
    [
        "--entrypoint vllm me/x serve m --port 1",
        "me/x vllm serve m --port 1",
        "me/x bash -c 'vllm serve m --port 1'",
        "--entrypoint=/usr/bin/vllm me/x serve m --port 1",
        "me/x python3 -m vllm.entrypoints.openai.api_server --model m --port 1",
    ],
)
def test_docker_run_of_another_image(rest: str) -> None:
    command = one("run.sh", f"docker run --rm {rest}\n")
    assert command.model == "m"
    assert [w.text for w in command.words][-2:] == ["--port", "1"]


@pytest.mark.parametrize("prefix", ["exec", "sudo", "env VLLM_A=1", "nohup"])
def test_command_behind_another_one(prefix: str) -> None:
    assert one("x.sh", f"{prefix} vllm serve m --port 1\n").model == "m"
    assert one("x.sh", f"{prefix} docker run me/x vllm serve m --port 1\n").model == "m"


def test_other_commands_are_no_serve_commands() -> None:
    text = "docker pull vllm/vllm-openai:v0.33.0\ndocker run --rm alpine ls\necho vllm serve\nls\n"
    assert not read_commands("x.sh", text)
    assert not read_commands("x.sh", "docker run --rm alpine ls\ncurl localhost\n")


def test_compose_file() -> None:
    text = """\
services:
  a:
    image: vllm/vllm-openai:v0.33.0
    command: ["--model", "m",
              "--port", "1"]
    environment:
      VLLM_A: "1"
  b:
    image: redis
    command: redis-server
"""
    command = one("compose.yaml", text)
    assert words(command) == [("--model", 4), ("m", 4), ("--port", 5), ("1", 5)]
    assert env(command) == {"VLLM_A": "1"}


def test_kubernetes_manifest() -> None:
    text = """\
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
        - name: vllm
          image: me/x@sha256:0
          command: ["vllm", "serve"]
          args: ["m", "--port", "1"]
          env:
            - name: VLLM_A
              value: "1"
            - name: HF_TOKEN
              valueFrom: {secretKeyRef: {name: s, key: k}}
"""
    command = one("k8s.yml", text)
    assert command.model == "m"
    assert env(command) == {"VLLM_A": "1", "HF_TOKEN": UNKNOWN}


def test_recipe_is_filled_in_from_its_defaults() -> None:
    text = """\
recipe_version: "1"
name: x
container: me/x
env: {VLLM_A: 1}
defaults: {port: 8000, gpu_memory_utilization: 0.9}
command: |
  vllm serve m --port {port} \\
    --gpu-memory-utilization {gpu_memory_utilization} \\
    --max-model-len {other} --speculative-config '{{"a": 1}}'
"""
    command = one("r.yaml", text)
    texts = [word.text for word in command.words]
    assert texts[:6] == [
        "m",
        "--port",
        "8000",
        "--gpu-memory-utilization",
        "0.9",
        "--max-model-len",
    ]
    assert texts[6:] == [UNKNOWN, "--speculative-config", '{"a": 1}']
    assert [word.line for word in command.words][:4] == [7, 7, 7, 8]


def test_dockerfile() -> None:
    text = """\
FROM vllm/vllm-openai:v0.33.0
# a comment
ENV VLLM_A=1 \\
    VLLM_B=2
ENV VLLM_C the value
CMD ["--model", "m"]
"""
    command = one("Dockerfile", text)
    assert env(command) == {"VLLM_A": "1", "VLLM_B": "2", "VLLM_C": "the value"}
    assert words(command) == [("--model", 6), ("m", 6)]
    assert command.image_line == 1


def test_yaml_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"x\.yaml(:\d+)?: not valid YAML"):
        read_commands("x.yaml", "a: [1\nb")


def test_yaml_that_is_nested_too_deeply_is_an_error() -> None:
    with pytest.raises(UsageError, match="nested too deeply"):
        read_commands("x.yaml", "[" * 1000)


def test_aliases_of_yaml_are_read_once() -> None:
    text = "a0: &a0 {image: x}\n"
    text += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 13))
    assert read_commands("x.yaml", text) == []
