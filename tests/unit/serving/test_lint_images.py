"""Images of the field: what is known of them decides what ``lint`` says, and how sure it is."""

import re
from pathlib import Path

import pytest

from builder.serving import lint as lint_run
from builder.serving.knownimages import KnownImage, known_image, release_in_tag
from builder.serving.lint import Finding, Linter, LintReport, lint
from builder.serving.lintrules import RULES
from builder.serving.models import Models
from builder.serving.serveflags import ServeInterface
from tests.unit.serving.test_lint import FakeLinter

B12X = "eugr/spark-vllm-b12x:latest"


class Field(FakeLinter):
    """A release with few flags, and an index of some releases."""

    def _newest(self, most: str = "") -> str:
        return "0.28.0" if most else "0.33.0"

    def interface(self, command: object) -> ServeInterface:
        self.held = self._vllm(command)[0]  # type: ignore[arg-type]
        return super().interface(command)


def reported(text: str, name: str = "x.sh", release: str | None = None) -> LintReport:
    return lint([(name, text)], Field(release=release), Models.discover())


def found(text: str, name: str = "x.sh", release: str | None = None) -> list[Finding]:
    return list(reported(text, name, release).findings)


@pytest.mark.parametrize(
    ("image", "release", "fork"),
    [
        ("vllm/vllm-openai:v0.33.0-cu130", "0.33.0", False),
        ("docker.io/vllm/vllm-openai:v0.29.0rc1", "0.29.0rc1", False),
        ("vllm/vllm-openai:qwen38-flash-next", "", True),
        ("vllm/vllm-openai:nightly-0123abc", "", False),
        ("nvcr.io/nvidia/vllm:26.05.post1-py3@sha256:00", "0.20.1", True),
        ("nvcr.io/nvidia/vllm:26.08-py3", "0.27.1", True),
        ("nvcr.io/nvidia/vllm:27.12-py3", "", True),
        (B12X, "", True),
        ("vllm-node-tf5", "", True),
        ("ghcr.io/spark-arena/dgx-vllm-eugr-nightly-tf5:latest", "", True),
    ],
)
def test_a_known_image(image: str, release: str, fork: bool) -> None:
    known = known_image(image)
    assert known is not None
    assert (known.release(image), bool(known.fork)) == (release, fork)


@pytest.mark.parametrize("image", ["me/vllm:1", "lmsysorg/sglang:latest", "", "nvidia/cuda:13"])
def test_an_image_that_is_not_known(image: str) -> None:
    assert known_image(image) is None


@pytest.mark.parametrize(
    ("image", "release"),
    [
        ("me/vllm-deepseek-v4-sm89:0.28.1rc0-sm89", "0.28.1"),
        ("me/vllm:v0.30.0", "0.30.0"),
        ("me/vllm:cu130-0.30.0", "0.30.0"),
        ("me/other:0.30.0", ""),
        ("me/vllm:latest", ""),
    ],
)
def test_a_release_in_a_tag(image: str, release: str) -> None:
    assert release_in_tag(image) == release


def test_what_a_fork_adds_is_no_finding() -> None:
    more = "-e VLLM_USE_B12X_MOE=1 -e VLLM_PLE_TABLE_MEMORY=disk"
    flags = "--moe-backend b12x --linear-backend b12x --prefill-policy x"
    report = reported(f"docker run {more} {B12X} vllm serve m {flags}")
    assert report.findings == ()
    (note,) = report.notes
    assert "eugr/spark-vllm-b12x:latest is local-inference-lab/vllm: held against vLLM" in note


@pytest.mark.parametrize("image", [B12X, "me/vllm:0.28.1rc0", "nvcr.io/nvidia/vllm:26.08-py3"])
@pytest.mark.parametrize(
    "words",
    ["--of-a-fork 1", "--moe-backend fork", "--reasoning-parser fork", "--quantization fork"],
)
def test_what_only_a_fork_may_know_is_a_note(image: str, words: str) -> None:
    (finding,) = found(f"docker run {image} vllm serve m {words}")
    assert finding.severity == "note"
    assert "which may differ" in finding.message
    (finding,) = found(f"docker run -e VLLM_OF_A_FORK=1 {image} vllm serve m")
    assert (finding.rule, finding.severity) == ("unknown-variable", "note")


def test_on_a_release_the_same_is_an_error() -> None:
    (finding,) = found("docker run vllm/vllm-openai:v0.33.0 --model m --of-a-fork 1")
    assert finding.severity == "error"
    (finding,) = found("docker run -e VLLM_USE_B12X_MOE=1 vllm/vllm-openai:v0.33.0 --model m")
    assert (finding.rule, finding.severity) == ("unknown-variable", "warning")
    (finding,) = found("docker run vllm/vllm-openai:v0.33.0 --model m --moe-backend b12x")
    assert (finding.rule, finding.severity) == ("b12x-name", "warning")


@pytest.mark.parametrize(
    ("model", "name", "help_"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "moe", "--moe-backend flashinfer_b12x"),
        ("openai/gpt-oss-120b", "moe", "leave it out"),
        ("deepseek-ai/DeepSeek-V4-Flash", "moe", "leave it out"),
        ("deepseek-ai/DeepSeek-V4-Flash", "linear", "leave it out"),
        ("me/other", "moe", "leave it out"),
    ],
)
def test_the_other_b12x_is_advised_only_where_it_starts(model: str, name: str, help_: str) -> None:
    """FlashInfer's kernels of this name are for NVFP4: MXFP4 experts are refused."""
    (finding,) = found(f"vllm serve {model} --{name}-backend b12x", release="0.33.0")
    assert finding.rule == "b12x-name"
    assert finding.help.startswith(help_)


def test_a_mod_may_add_anything() -> None:
    recipe = """\
recipe_version: "1"
container: vllm/vllm-openai:v0.33.0
mods: [mods/install-ray]
command: |
  vllm serve m --distributed-executor-backend ray --gpu-memory-utilization 0.85
"""
    (finding,) = found(recipe, "x.yaml")
    assert (finding.rule, finding.severity) == ("no-ray", "note")
    (finding,) = found(recipe.replace("mods: [mods/install-ray]\n", ""), "x.yaml")
    assert (finding.rule, finding.severity) == ("no-ray", "error")


def test_findings_of_forks_do_not_fail(call: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint_run, "interface_of", lambda _: FakeLinter().interface(None))
    Path("x.sh").write_text("docker run me/vllm vllm serve m --of-a-fork\n")
    done = call("lint", "x.sh", "--release", "0.33.0", "--strict")  # type: ignore[operator]
    assert done.code == 0
    assert "x.sh:1: note: vLLM 0.33.0 has no flag --of-a-fork" in done.out
    assert "note: x.sh:1: me/vllm is not known: held against vLLM 0.33.0" in done.err


# ------------------------------------------------------------------------------ where the server is


@pytest.mark.parametrize(
    "words",
    [
        "me/vllm-sm89:0.28.1rc0 /models/m --tensor-parallel-size 8",
        "me/vllm-sm89:0.28.1rc0 \\\n  --model m \\\n  --served-model-name m",
        "me/vllm-sm89:0.28.1rc0 org/m --max-model-len 8k",
    ],
)
def test_an_entrypoint_of_another_that_serves(words: str) -> None:
    report = reported(f"docker run --gpus all -e VLLM_X=1 {words}")
    assert report.commands == 1
    assert [one.rule for one in report.findings if "VLLM_X" in one.message] == ["unknown-variable"]


@pytest.mark.parametrize(
    "words",
    [
        "me/vllm /opt/start.sh --max-model-len 1",
        "me/vllm python3 bench.py --max-model-len 1",
        "me/tgi --model-id org/m --max-model-len 1",
        "me/vllm ls /models",
        "me/vllm",
    ],
)
def test_what_is_no_server_is_none(words: str) -> None:
    served = lint_run.serve_commands("x.sh", f"docker run {words}")
    assert served == []


def test_variables_of_a_launcher() -> None:
    text = (
        "./launch-cluster.sh -t vllm-node-b12x --apply-mod mods/a \\\n"
        "  -e VLLM_NO_SUCH=1 -e NCCL_SOCKET_IFNAME=a --env=VLLM_USE_B12X_MOE=1 \\\n"
        "  exec vllm serve m --port 1\n"
    )
    (command,) = lint_run.serve_commands("x.sh", text)
    assert (command.image, command.mods) == ("vllm-node-b12x", ("mods/a",))
    assert [one.name for one in command.env] == [
        "VLLM_NO_SUCH", "NCCL_SOCKET_IFNAME", "VLLM_USE_B12X_MOE",
    ]  # fmt: skip
    (finding,) = found(text)
    assert (finding.line, finding.rule, finding.severity) == (2, "unknown-variable", "note")
    text = f'VLLM_SPARK_EXTRA_DOCKER_ARGS="-v a:b -e VLLM_NO_SUCH=1" {text}'
    rules = [(one.line, one.rule) for one in found(text)]
    assert rules == [(1, "unknown-variable"), (2, "unknown-variable")]
    (solo,) = lint_run.serve_commands("x.sh", "./launch-cluster.sh --solo exec vllm serve m")
    assert solo.image == "vllm-node"


def test_a_container_that_is_entered_is_not_known() -> None:
    """Its image is nowhere in the command."""
    (finding,) = found("docker exec box vllm serve m --of-a-fork 1", release="0.33.0")
    assert finding.severity == "note"
    (finding,) = found("ssh host vllm serve m --of-a-fork 1", release="0.33.0")
    assert finding.severity == "error"


def test_a_unit_of_systemd() -> None:
    text = (
        "[Service]\nEnvironment=VLLM_NO_SUCH=1\nExecStartPre=-/usr/bin/docker rm -f v\n"
        "ExecStart=/usr/bin/docker run vllm/vllm-openai:v0.33.0 \\\n  --model m --ports 1\n"
    )
    assert [(one.line, one.rule) for one in found(text, "v.service")] == [(5, "unknown-flag")]
    text = "[Service]\nEnvironment=VLLM_NO_SUCH=1\nExecStart=-/opt/bin/vllm serve m\n"
    rules = [(one.line, one.rule) for one in found(text, "v.service", "0.33.0")]
    assert rules == [(2, "unknown-variable")]


@pytest.mark.parametrize(
    "program", ["vllm.entrypoints.cli.main serve", "vllm.entrypoints.openai.api_server"]
)
def test_modules_of_vllm_serve(program: str) -> None:
    text = f"/opt/env/bin/python3 -m {program} --model m --ports 1"
    assert [one.rule for one in found(text, release="0.33.0")] == ["unknown-flag"]


def test_json_without_its_quotes_is_said_so() -> None:
    (finding,) = found('vllm serve m --compilation-config {"mode":3}', release="0.33.0")
    assert finding.help == "the shell took its quotes: --compilation-config '{...}'"


def test_variables_of_docker_exec() -> None:
    text = "docker exec -e VLLM_NO_SUCH=1 -it box vllm serve m"
    (finding,) = found(text, release="0.33.0")
    assert finding.rule == "unknown-variable"


BYPASSED = "entrypoint-bypassed"
NGC = "nvcr.io/nvidia/vllm:26.08-py3"
POD = f"""\
apiVersion: v1
kind: Pod
spec:
  containers:
    - name: vllm
      image: {NGC}
      command: ["vllm", "serve", "m"]
"""


@pytest.mark.parametrize(
    ("name", "text", "rules"),
    [
        ("x.yaml", POD, [BYPASSED]),
        ("x.yaml", POD.replace("command: [", "args: ["), []),
        ("x.yaml", POD.replace('"vllm", "serve"', '"sh", "-c", "vllm serve m"'), [BYPASSED]),
        ("x.yaml",
         POD.replace('"vllm", "serve"', '"/opt/nvidia/nvidia_entrypoint.sh", "vllm", "serve"'), []),
        ("x.sh", f"docker run --entrypoint '' {NGC} vllm serve m", [BYPASSED]),
        ("x.sh", f"docker run {NGC} vllm serve m", []),
        ("x.yaml", f"services:\n  a:\n    image: {NGC}\n    command: vllm serve m\n", []),
        ("x.yaml", f"a:\n  image: {NGC}\n  entrypoint: [vllm]\n  command: serve m\n", [BYPASSED]),
        ("Dockerfile", f'FROM {NGC}\nENTRYPOINT ["vllm", "serve", "m"]\n', [BYPASSED]),
        ("Dockerfile", f'FROM {NGC}\nCMD ["vllm", "serve", "m"]\n', []),
        ("x.sh", "docker run vllm/vllm-openai:v0.33.0 vllm serve m", ["entrypoint-twice"]),
        ("x.sh", "docker run vllm/vllm-openai:v0.33.0 m", []),
        ("x.sh", "docker run --entrypoint vllm vllm/vllm-openai:v0.33.0 serve m", []),
        ("x.sh", f"docker run {B12X} vllm serve m", []),
        ("x.yaml", ("a:\n  image: vllm/vllm-openai:v0.33.0\n  entrypoint: []\n"
         "  command: vllm serve m\n"), []),
        ("x.yaml", ("a:\n  image: vllm/vllm-openai:v0.33.0\n  entrypoint: ''\n"
         "  command: vllm serve m\n"), []),
        ("x.yaml", "a:\n  image: vllm/vllm-openai:v0.33.0\n  command: vllm serve m\n",
         ["entrypoint-twice"]),
        ("Dockerfile", "FROM vllm/vllm-openai:v0.33.0\nENTRYPOINT []\nCMD vllm serve m\n", []),
        ("Dockerfile", "FROM vllm/vllm-openai:v0.33.0\nCMD vllm serve m\n", ["entrypoint-twice"]),
        ("x.yaml", POD.replace(NGC, "vllm/vllm-openai:v0.33.0"), []),
        ("x.yaml", POD.replace(NGC, "vllm/vllm-openai:v0.33.0").replace("command", "args"),
         ["entrypoint-twice"]),
    ],
)  # fmt: skip
def test_what_becomes_of_an_entrypoint(name: str, text: str, rules: list[str]) -> None:
    assert [one.rule for one in found(text, name)] == rules


# -------------------------------------------------------------------------------- a lost backslash


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("vllm serve m --port 1\n  --enforce-eager \\\n  --port 2\n", 2),
        ("vllm serve m \\ \n  --port 2\n", 2),
        ("vllm serve m \\\n  --port 1 \\\n\n  --enforce-eager\n", 4),
        ("vllm serve m \\\n  # --port 1 \\\n  --enforce-eager\n", 3),
        ("docker run vllm/vllm-openai:v0.33.0 \\\n  --model m\n  --port 1\n", 3),
        ("docker run --gpus all\n  -p 1:1 vllm/vllm-openai:v0.33.0 --model m\n", 2),
        ("ssh a <<EOF\nvllm serve m\n  --port 1\nEOF\n", 3),
        ("bash -c 'vllm serve m\n  --port 1'\n", 2),
    ],
)
def test_flags_that_a_missing_backslash_cuts_off(text: str, line: int) -> None:
    lost = [one for one in found(text, release="0.33.0") if one.rule == "lost-flags"]
    assert [one.line for one in lost] == [line]
    assert lost[0].severity == "error"


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m \\\n  --port 1 \\\n  --enforce-eager\necho --port\n",
        "vllm serve m &\n- x\n",
        "vllm serve m -- --port\n",
        "ls\n--port 1\nvllm serve m\n",
    ],
)
def test_no_flag_is_lost(text: str) -> None:
    assert not [one for one in found(text, release="0.33.0") if one.rule == "lost-flags"]


def test_flags_are_lost_in_a_recipe() -> None:
    text = "recipe_version: '1'\ncontainer: vllm-node\ncommand: |\n  vllm serve m\n    --port 1\n"
    assert [(one.line, one.rule) for one in found(text, "r.yaml")] == [
        (4, "memory-unset"), (5, "lost-flags"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------- the table


def test_every_rule_says_where_it_begins_and_ends() -> None:
    """An error or a warning without a source for both ends is a note."""
    for rule in RULES.values():
        if rule.severity != "note":
            assert rule.first, rule.id
            assert rule.last, rule.id


def test_a_rule_is_a_note_outside_its_releases() -> None:
    rule = RULES["no-ray"]
    assert (rule.severity_for("0.33.0"), rule.severity_for("0.17.1")) == ("error", "note")
    eager = RULES["eager-autotune"]
    assert (eager.severity_for("0.17.1"), eager.severity_for("0.33.0")) == ("note", None)
    assert RULES["b12x-name"].severity_for("0.29.0rc1") == "warning"


def test_rows_of_the_table_of_images() -> None:
    from builder.serving.knownimages import _images

    for one in _images():
        assert re.compile(one.image)
        assert one.source
        assert one.near or one.releases or "(?P<vllm>" in one.image, one.name
        assert isinstance(one, KnownImage)


def test_the_interface_is_that_of_the_images_release(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def read(ref: str) -> ServeInterface:
        asked.append(ref)
        return FakeLinter().interface(None)

    monkeypatch.setattr(lint_run, "interface_of", read)
    monkeypatch.setattr(lint_run, "vllm_releases", lambda _: ["0.28.0", "0.29.0", "0.33.0"])
    known = {
        NGC: "0.27.1", B12X: "0.33.0", "me/vllm:0.28.1rc0": "0.28.0", "vllm-node-eugr022": "0.22.1",
        "me/x": "0.33.0", "scitrera/dgx-spark-vllm:0.29.0-t5": "0.29.0",
    }  # fmt: skip
    for image in known:
        lint([("x.sh", f"docker run {image} vllm serve m")], Linter(), Models.discover())
    assert [one.partition("==")[2] for one in asked] == list(known.values())
