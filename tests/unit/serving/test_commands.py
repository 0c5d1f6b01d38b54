"""Serve commands are found in every kind of file, each word with its line."""

import re
from functools import partial

import pytest

from builder.errors import UsageError
from builder.layers.shell import UNKNOWN
from builder.serving import commands
from builder.serving.commands import ServeCommand, open_quotes, read_commands


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
        'me/x bash -c -i "vllm serve m --port 1"',
        "me/x serve --model m --port 1",
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


def test_a_recipe_names_its_model() -> None:
    """sparkrun fills in ``{model}`` from the recipe, not from its defaults."""
    text = "recipe_version: '2'\nmodel: me/m\ncontainer: x\n"
    command = one("r.yaml", f"{text}command: |\n  vllm serve {{model}} --port {{port}}\n")
    assert command.model == "me/m"
    assert [word.text for word in command.words] == ["me/m", "--port", UNKNOWN]
    plain = one("r.yaml", "model: me/m\nimage: x\ncommand: vllm serve --model {model}\n")
    assert plain.model == "{model}", "compose fills in nothing like it"


def test_the_braces_of_a_default_stay() -> None:
    """Only those of the command are doubled: an override ended with one brace less."""
    text = (
        "recipe_version: '2'\nmodel: m\ndefaults:\n  overrides: '{\"a\": {\"b\": {}}}'\n"
        "command: |\n  vllm serve {model} --hf-overrides '{overrides}' --x '{{\"c\": {{}}}}'\n"
    )
    words = [word.text for word in one("r.yaml", text).words]
    assert words == ["m", "--hf-overrides", '{"a": {"b": {}}}', "--x", '{"c": {}}']


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


# ------------------------------------------------------------------------------- as a shell does it


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('A="--moe-backend marlin"; vllm serve m $A', "m --moe-backend marlin"),
        ('A="--port  1 "; vllm serve m "$A"', "m|--port  1 "),
        ("A=; vllm serve m $A --port 1", "m --port 1"),
        ('A="b c"; vllm serve m --x=$A"d e"', "m|--x=b|cd e"),
        ('ARGS=(--a "b c"); ARGS+=(--d); vllm serve m "${ARGS[@]}"', "m|--a|b c|--d"),
        ('ARGS=(--a "b c"); vllm serve m ${ARGS[@]}', "m --a b c"),
        ('ARGS=(); vllm serve m "${ARGS[@]}"', "m"),
        ('ARGS=(--a b); vllm serve m ${ARGS[@]+"${ARGS[@]}"} --c', "m --a b --c"),
        ('ARGS=(--a b); vllm serve m "${ARGS[1]}" x', "m b x"),
        ('CMD=(vllm serve m); CMD+=(--port 1); exec "${CMD[@]}"', "m --port 1"),
        ('CMD="vllm serve m"; CMD+=" --port 1"; eval "$CMD"', "m --port 1"),
        ('CMD="vllm serve m"; $CMD --port 1', "m --port 1"),
        ("vllm serve ${1:-m} --port ${PORT:-8000}", "m --port 8000"),
        ('P="${P:-7}"; vllm serve m --port "$P"', "m --port 7"),
        ("vllm serve m --port ${P:-$Q}", f"m --port {UNKNOWN}"),
        ('A=1; A=2 ls; vllm serve m --port "$A"', "m --port 1"),
        ("bash -c 'vllm serve m --port 1 | tee -a log'", "m --port 1"),
        ('bash -lc "pip install x && \\\n vllm serve m \\\n --port 1"', "m --port 1"),
        ("ssh -p 22 me@host docker run --rm me/x vllm serve m --port 1", "m --port 1"),
        ("ssh host \"docker run --rm me/x bash -c 'vllm serve m --port 1'\"", "m --port 1"),
        ("docker exec -it c bash -c 'vllm serve m --port 1'", "m --port 1"),
        ("tmux new-session -d 'vllm serve m --port 1'", "m --port 1"),
        ("cat > run.sh <<'EOF'\nvllm serve m --port 1\nEOF\n", "m --port 1"),
        ("P=1\nssh host <<EOF\nvllm serve m --port $P\nEOF\n", "m --port 1"),
        ("P=1\nssh host <<'EOF'\nvllm serve m --port $P\nEOF\n", f"m --port {UNKNOWN}"),
        ("cat <<EOF | ssh host bash -s\nvllm serve m --port 1\nEOF\n", "m --port 1"),
        ("cat <<EOF | sudo tee /opt/run.sh\nvllm serve m --port 1\nEOF\n", "m --port 1"),
        (
            "cat > c.yaml <<EOF\na:\n  image: me/x\n  command: vllm serve m\nEOF\n",
            "m",
        ),
    ],
)
def test_words_as_a_shell_splits_them(script: str, expected: str) -> None:
    split = expected.split("|") if "|" in expected else expected.split(" ")
    assert [word for word, _ in words(one("x.sh", script))] == split


@pytest.mark.parametrize(
    "script",
    [
        "pkill -f 'vllm serve m'",
        "pgrep -f 'vllm serve m --port 1'",
        'echo "starting: vllm serve m --port 1"',
        "cat <<EOF\nusage: vllm serve MODEL\nEOF\n",
        "python3 - <<EOF\nprint('vllm serve m')\nEOF\n",
    ],
)
def test_a_text_about_a_command_is_none(script: str) -> None:
    assert read_commands("x.sh", script) == []


def test_scripts_within_scripts_keep_their_lines() -> None:
    text = "export VLLM_A=1\nssh host docker run \\\n  -e VLLM_B=2 \\\n  me/x \\\n"
    text += "  vllm serve m \\\n  --port 1\n"
    command = one("x.sh", text)
    assert words(command) == [("m", 5), ("--port", 6), ("1", 6)]
    assert env(command) == {"VLLM_B": "2"}
    text = 'docker run me/x bash -c "\nexport VLLM_A=1\nvllm serve m \\\n --port 1"\n'
    command = one("x.sh", text)
    assert words(command) == [("m", 3), ("--port", 4), ("1", 4)]
    assert (env(command), command.image) == ({"VLLM_A": "1"}, "me/x")
    text = "x\ncat > run.sh <<EOF\nvllm serve m \\\n  --port 1\nEOF\n"
    assert words(one("x.sh", text)) == [("m", 3), ("--port", 4), ("1", 4)]
    text = "a: 1\nb:\n  image: me/x\n  entrypoint: [bash, -c]\n  command:\n    - |\n"
    text += "      set -e\n      vllm serve m \\\n        --port 1\n"
    assert words(one("x.yaml", text)) == [("m", 8), ("--port", 9), ("1", 9)]


def test_a_mark_of_ours_in_a_file_is_no_line_break() -> None:
    command = one("x.sh", "bash -c 'echo \ue001\ue001\nvllm serve m\ue001 --port 1'\n")
    assert words(command) == [("m\ufffd", 2), ("--port", 2), ("1", 2)]


def test_compose_and_kubernetes_fill_in_variables() -> None:
    text = "image: me/x:${TAG:-1}\ncommand: [vllm, serve, m, --port, '${PORT:-8000}', '$HOST']\n"
    text += "environment:\n  VLLM_A: ${A:-1}\n  VLLM_B: $B\n  VLLM_C: a$$b\n"
    command = one("x.yaml", text)
    assert [word for word, _ in words(command)] == ["m", "--port", "8000", UNKNOWN]
    assert env(command) == {"VLLM_A": "1", "VLLM_B": UNKNOWN, "VLLM_C": "a$b"}
    assert command.image == "me/x:1"
    text = "image: me/x\ncommand: [vllm]\nargs: [serve, m, --port, $(PORT)]\n"
    assert words(one("x.yaml", text))[-1] == (UNKNOWN, 3)


@pytest.mark.parametrize("rest", ["5", "null", "true", "{}", "[1]", '"vllm"', "[" * 100_000])
def test_a_dockerfile_with_other_json(rest: str) -> None:
    assert read_commands("Dockerfile", f"FROM x\nCMD {rest}\n") == []


# -------------------------------------------------------------------------------------- its bounds

DOUBLING = "A=aaaaaaaa\n" + "A=$A$A\n" * 34 + "vllm serve $A\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("x.sh", DOUBLING, "its variables expand to more than 4 MiB"),
        ("x.sh", DOUBLING.replace("$A$A", "${A}${A:-x}"), "its variables expand"),
        ("x.sh", "A=(x)\n" + 'A+=("${A[@]}")\n' * 40 + 'vllm serve "${A[@]}"', "expand to more"),
        ("x.sh", "A=('')\n" + 'A+=("${A[@]}")\n' * 40, "expand to more"),
        ("x.sh", "a && " * 20_000 + "vllm serve m", "nested too deeply"),
        ("x.sh", "if a; then " * 2000 + "vllm serve m", None),
        ("x.sh", "(" * 20_000, None),
        ("x.sh", '"$(' * 5_000, None),
        ("x.sh", "".join(f"export A{n}=\n" for n in range(900)) + "vllm serve m\n" * 900, "200000"),
        ("x.sh", "bash -c " * 30 + "'vllm serve m'", None),
        (
            "r.yaml",
            "recipe_version: '1'\nimage: x\ndefaults:\n  a: '" + "x" * 20_000
            + "'\ncommand: vllm serve " + "{a}" * 9000,
            "larger than 8 MiB",
        ),
        ("x.yaml", "[" * 5000, "nested too deeply"),
        ("x.yaml", "- " * 5000, "nested too deeply"),
        ("x.yaml", BOMB, None),
        ("x.yaml", "a: &a\n  image: x\n  command: *a\n", None),
        ("x.yaml", "a: &a [*a]\n", None),
        ("x.yaml", 'image: x\ncommand: [bash, -c, "vllm serve m \\ud800"]\n', None),
        ("x.yaml", 'a: "\\U00110000"\n', "not valid YAML"),
        ("x.yaml", "image: x\ncommand: vllm serve m\nenv: {[a]: b, {c: d}: e}\n", None),
        ("x.yaml", "image: {a: b}\ncommand: {c: d}\nentrypoint: [[x]]\n", None),
    ],
)  # fmt: skip
def test_what_would_take_all_memory_or_time_is_refused(
    name: str, text: str, why: str | None
) -> None:
    for read in (read_commands, open_quotes):
        try:
            read(name, text)
            said = ""
        except UsageError as error:
            said = str(error)
            assert said.startswith(name)
        if why is not None and read is read_commands:
            assert re.search(why, said)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("x.sh", "vllm serve " + "a " * 210, "more than 200000 words"),
        (
            "x.yaml",
            "x: &s 'vllm serve " + "m " * 20 + "'\n"
            + "".join(f"a{n}: {{image: x, command: *s}}\n" for n in range(20)),
            "more than 200000 words",
        ),
        (
            "x.yaml",
            "x: &s 'vllm serve " + "m" * 900 + "'\n"
            + "".join(f"a{n}: {{image: x, command: *s}}\n" for n in range(20)),
            "larger than 8 MiB",
        ),
    ],
)  # fmt: skip
def test_words_and_repeated_texts_count(
    name: str, text: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousandth of the bounds: two of the tests above reach those themselves."""
    assert len(text) < 8000
    assert read_commands(name, text)
    monkeypatch.setattr(commands, "_File", partial(commands._File, words=200, letters=8000))
    with pytest.raises(UsageError, match=why):
        read_commands(name, text)
