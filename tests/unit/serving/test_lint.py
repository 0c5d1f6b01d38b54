"""Every rule finds what it is for, and nothing where it does not hold."""

import sys
from pathlib import Path

import pytest
from msgspec import structs

from builder.errors import UsageError
from builder.serving import lint as lint_run
from builder.serving.lint import Finding, Linter, lint, read_file, sarif
from builder.serving.lintrules import RULES
from builder.serving.models import Models
from builder.serving.serveflags import Flag, Key, ServeInterface
from tests.unit.caller import Call

SUPER = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"
QWEN = "nvidia/Qwen3.6-35B-A3B-NVFP4"
MTP = """--speculative-config '{"method":"mtp"%s}'"""
OWN = MTP % ',"moe_backend":"triton"'
BACKENDS = ("auto", "b12x", "cutlass", "flashinfer_b12x", "flashinfer_cutlass", "marlin")


def key(name: str) -> Key:
    return Key(name=name)


def flag(name: str, takes: object = "one", kind: str = "text", *choices: str) -> Flag:
    return Flag(names=(name,), takes=takes, kind=kind, choices=choices)  # type: ignore[arg-type]


FLAGS = (
    flag("--port", "one", "integer"),
    flag("--model"),
    flag("--linear-backend", "one", "text", *BACKENDS),
    flag("--moe-backend", "one", "text", *BACKENDS),
    flag("--reasoning-parser"),
    flag("--reasoning-parser-plugin"),
    flag("--tool-call-parser"),
    flag("--max-num-batched-tokens", "one", "size"),
    flag("--max-model-len", "one", "size-or-auto"),
    flag("--gpu-memory-utilization", "one", "number"),
    flag("--enforce-eager", "nothing", "true-or-false"),
    flag("--tensor-parallel-size", "one", "integer"),
    flag("--nnodes", "one", "integer"),
    structs.replace(
        flag("--optimization-level", "one", "text", "0", "3"), names=("--optimization-level", "-O")
    ),
    flag("--compilation-config", "one", "object"),
    structs.replace(flag("--quantization"), names=("--quantization", "-q"), known=("modelopt",)),
    flag("--distributed-executor-backend", "one", "text", "mp", "ray"),
    structs.replace(
        flag("--speculative-config", "one", "json"),
        keys=tuple(map(key, ("method", "num_speculative_tokens", "moe_backend"))),
    ),
)


class FakeLinter(Linter):
    """A release with a few flags and variables."""

    def interface(self, command: object) -> ServeInterface:
        vllm = self.release or "0.33.0"
        old = vllm < "0.24"
        names = ["VLLM_NVFP4_GEMM_BACKEND", "VLLM_FLASHINFER_MOE_BACKEND",
                 "VLLM_USE_FLASHINFER_MOE_FP4"] if old else []  # fmt: skip
        variables: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())
        variables["VLLM_CHOICE"] = ("a", "b")
        return ServeInterface(
            vllm=vllm, flags=FLAGS, variables=variables, reasoning_parsers=("nemotron_v3", "qwen3"),
            tool_parsers=("qwen3_coder",),
        )  # fmt: skip


def found(text: str, release: str = "0.33.0", name: str = "x.sh") -> list[Finding]:
    report = lint([(name, text)], FakeLinter(release=release), Models.discover())
    return list(report.findings)


@pytest.mark.parametrize(
    ("rule", "text", "release"),
    [
        ("unknown-flag", "vllm serve m --ports 1", "0.33.0"),
        ("bad-value", "vllm serve m --port many", "0.33.0"),
        ("bad-value", "vllm serve m --moe-backend fast", "0.33.0"),
        ("quantization-name", "vllm serve m --quantization fp4", "0.33.0"),
        ("unknown-parser", "vllm serve m --reasoning-parser nemotron", "0.33.0"),
        ("unknown-parser", "vllm serve m --tool-call-parser qwen", "0.33.0"),
        ("unknown-variable", "VLLM_NVFP4_MOE_BACKEND=marlin vllm serve m", "0.20.1"),
        ("unknown-variable", "VLLM_NVFP4_GEMM_BACKEND=marlin vllm serve m", "0.33.0"),
        ("variable-value", "VLLM_CHOICE=c vllm serve m", "0.33.0"),
        ("b12x-name", "vllm serve m --linear-backend b12x", "0.33.0"),
        ("b12x-unreachable", "vllm serve m --linear-backend flashinfer_b12x", "0.25.0"),
        ("b12x-mxfp4", "vllm serve openai/gpt-oss-120b --moe-backend flashinfer_b12x", "0.33.0"),
        ("w4a16-rounded", f"vllm serve {QWEN} --moe-backend flashinfer_b12x", "0.33.0"),
        ("batched-tokens", f"vllm serve {SUPER} --max-num-batched-tokens 1024", "0.33.0"),
        ("eager-autotune", f"vllm serve {SUPER} --enforce-eager", "0.17.1"),
        ("short-context", f"vllm serve {SUPER} --max-model-len 32768", "0.33.0"),
        ("memory-fraction", "vllm serve m --gpu-memory-utilization 0.95", "0.33.0"),
        ("memory-unset", "vllm serve m  # on a DGX Spark", "0.20.1"),
        ("many-batched-tokens", "vllm serve m --max-num-batched-tokens 65536", "0.33.0"),
        ("draft-experts", f"vllm serve {SUPER} --moe-backend marlin {MTP % ''}", "0.28.0"),
        ("no-ray", "docker run vllm/vllm-openai:v0.20.1 m --distributed-executor-backend ray",
         "0.20.1"),
        ("ray-needed", "vllm serve m --distributed-executor-backend ray", "0.20.1"),
        ("bad-value", "vllm serve m -Ofast", "0.33.0"),
        ("gloo-interface", "NCCL_SOCKET_IFNAME=eth0 vllm serve m", "0.33.0"),
        ("cuda-12-image", "docker run vllm/vllm-openai:v0.33.0-cu129 --model m-FP4", "0.33.0"),
        ("cuda-12-image", "docker run vllm/vllm-openai:v0.17.1 --model m-nvfp4", "0.17.1"),
        ("lost-flags", "vllm serve m\n--port 1", "0.33.0"),
        ("entrypoint-twice", "docker run vllm/vllm-openai:v0.33.0 vllm serve m", "0.33.0"),
        ("entrypoint-bypassed",
         "docker run --entrypoint vllm nvcr.io/nvidia/vllm:26.08-py3 serve m --port 1", "0.27.1"),
        ("driver", "docker run vllm-node-mxfp4 vllm serve m --port 1", "0.33.0"),
        ("other-parser", f"vllm serve {SUPER} --reasoning-parser qwen3", "0.33.0"),
        ("entrypoint-no-server",
         "docker run nvcr.io/nvidia/vllm:26.08-py3 --model m --max-model-len 9", "0.27.1"),
        ("no-effect", "VLLM_NVFP4_GEMM_BACKEND=marlin vllm serve m --linear-backend cutlass",
         "0.22.0"),
        ("no-effect", "VLLM_FLASHINFER_MOE_BACKEND=latency vllm serve m", "0.20.1"),
        ("no-effect", "VLLM_USE_FLASHINFER_MOE_FP4=1 vllm serve m --moe-backend marlin", "0.20.1"),
        ("given-twice", "vllm serve m --port 1 --port 2", "0.33.0"),
        ("open-quote", "vllm serve m --port 1 'x", "0.33.0"),
    ],
)  # fmt: skip
def test_rule_finds_its_case(rule: str, text: str, release: str) -> None:
    (finding,) = found(text, release)
    assert finding.rule == rule
    assert finding.severity == RULES[rule].severity
    assert finding.line == (2 if rule == "lost-flags" else 1)


@pytest.mark.parametrize(
    ("text", "release"),
    [
        (f"vllm serve {SUPER} --max-num-batched-tokens 4096 --max-model-len 200k", "0.33.0"),
        ("vllm serve m --reasoning-parser super_v3 --reasoning-parser-plugin /app/x.py", "0.33.0"),
        ("vllm serve m --reasoning-parser nemotron_v3 --tool-call-parser qwen3_coder", "0.33.0"),
        ("vllm serve m --linear-backend flashinfer_b12x", "0.28.0"),
        (f"vllm serve {QWEN} --moe-backend marlin", "0.33.0"),
        ("vllm serve openai/gpt-oss-120b --moe-backend marlin", "0.33.0"),
        (f"vllm serve {QWEN} --moe-backend flashinfer_b12x", "0.22.1"),
        (f"vllm serve {SUPER} --moe-backend flashinfer_b12x", "0.33.0"),
        ("docker run me/x vllm serve m --linear-backend flashinfer_b12x", "0.25.0"),
        ("docker run me/x vllm serve m --distributed-executor-backend ray", "0.33.0"),
        ("vllm serve m --distributed-executor-backend ray", "0.17.1"),
        ("vllm serve m --gpu-memory-utilization 0.9 --enforce-eager", "0.33.0"),
        ("NCCL_SOCKET_IFNAME=a GLOO_SOCKET_IFNAME=a vllm serve m", "0.33.0"),
        ("docker run vllm/vllm-openai:v0.17.1-cu130 --model m", "0.17.1"),
        ("docker run vllm/vllm-openai:v0.33.0 --model m", "0.33.0"),
        ('vllm serve m --port "$PORT" --moe-backend "$(cat x)"', "0.33.0"),
        ('VLLM_CHOICE="$X" HF_TOKEN=abc vllm serve m --port 1 --port 1', "0.33.0"),
        ("VLLM_NVFP4_GEMM_BACKEND=marlin vllm serve m --linear-backend auto", "0.22.0"),
        (f"vllm serve {SUPER} --enforce-eager", "0.33.0"),  # one write-up, about 0.17.1
        ("docker run vllm/vllm-openai:v0.33.0-cu129 --model m-FP4  # on an H100", "0.33.0"),
        (
f"vllm serve {SUPER} --max-model-len 8192 --tensor-parallel-size 4",
            "0.33.0",
        ),
        ("vllm serve m --max-num-batched-tokens 65536  # on an RTX 5090", "0.33.0"),
        ("vllm serve m --gpu-memory-utilization 0.95  # H100", "0.33.0"),
        ("vllm serve m  # GB10", "0.19.1"),
        ("vllm serve m --gpu-memory-utilization 0.85  # GB10", "0.33.0"),
        ("CUDA_VISIBLE_DEVICES=0,1 vllm serve m --gpu-memory-utilization 0.95", "0.33.0"),
        ("vllm serve m --max-num-batched 8192 --quant modelopt", "0.33.0"),
        (f"vllm serve m --moe-backend flashinfer_cutlass {MTP % ''}", "0.33.0"),
        (f"vllm serve m --moe-backend marlin {OWN}", "0.33.0"),
        (f"vllm serve m --moe-backend marlin {MTP.replace('mtp', 'ngram') % ''}", "0.33.0"),
        ("A='--port 1 --moe-backend marlin'; vllm serve m $A", "0.33.0"),
        ("vllm serve m -q modelopt --port ${PORT:-8000} -O3 -O 3 -O=3", "0.33.0"),
        ("export VLLM_OWN=$(docker ps -q)\ndocker exec $VLLM_OWN vllm serve m", "0.33.0"),
    ],
)  # fmt: skip
def test_what_is_right_is_not_reported(text: str, release: str) -> None:
    assert found(text, release) == []


def test_a_machine_of_several_nodes_is_a_spark() -> None:
    more = "--tensor-parallel-size 2 --nnodes 2 --gpu-memory-utilization 0.95"
    assert [one.rule for one in found(f"vllm serve m {more}")] == ["memory-fraction"]


@pytest.mark.parametrize(
    ("variable", "release", "help_"),
    [
        ("VLLM_FLASHINFER_MOE_BACKEND=latency", "0.33.0", "use the flag --moe-backend flashinfer"),
        ("VLLM_NVFP4_GEMM_BACKEND=flashinfer-b12x", "0.24.0", "with an image with the profile b12"),
        ("VLLM_NVFP4_GEMM_BACKEND=flashinfer-b12x", "0.28.0", "use the flag --linear-backend fl"),
        ("VLLM_NVFP4_GEMM_BACKEND=flashinfer-cutlass", "0.27.1", "leave it out: FlashInfer's"),
    ],
)
def test_advice_starts(
    monkeypatch: pytest.MonkeyPatch, variable: str, release: str, help_: str
) -> None:
    """Not TensorRT-LLM's kernels, and on 0.24.0 to 0.27.1 no flag that FP8 layers refuse."""
    backends = (*BACKENDS, "flashinfer_cutlass", "flashinfer_trtllm")
    both = [flag(f"--{kind}-backend", "one", "text", *backends) for kind in ("linear", "moe")]
    kept = [one for one in FLAGS if not one.names[0].endswith("-backend")]
    monkeypatch.setattr(sys.modules[__name__], "FLAGS", (*kept, *both))
    (finding,) = found(f"{variable} vllm serve m", release)
    assert help_ in finding.help
    assert "trtllm" not in finding.help


def test_every_rule_has_a_case() -> None:
    marks = test_rule_finds_its_case.pytestmark  # type: ignore[attr-defined]
    cases = {case[0] for mark in marks for case in mark.args[1]}
    # the release's own answers: test_asked.py
    of_answers = {"refused", "kernel-trouble", "does-not-fit", "transformers-version"}
    # test_lint_containers.py
    of_containers = {"shell-entrypoint", "mounted-over", "processors-speculation"}
    assert cases | {"least-busy"} | of_answers | of_containers == set(RULES)


def test_least_busy_of_a_litellm_file() -> None:
    (finding,) = found("router_settings:\n  routing_strategy: least-busy\n", name="litellm.yaml")
    assert (finding.rule, finding.line) == ("least-busy", 2)
    assert finding.help == "routing_strategy: simple-shuffle"


def test_replacement_of_a_variable_is_named() -> None:
    (finding,) = found("VLLM_NVFP4_GEMM_BACKEND=flashinfer-b12x vllm serve m")
    assert finding.help == "use the flag --linear-backend flashinfer_b12x"


def test_plugin_of_the_checkpoint_is_named() -> None:
    (finding,) = found(f"vllm serve {SUPER} --reasoning-parser super_v3")
    assert "--reasoning-parser-plugin super_v3_reasoning_parser.py" in finding.help


@pytest.mark.parametrize(
    "comment", ["# spark-build: ignore[unknown-flag]", "# spark-build: ignore", ""]
)
@pytest.mark.parametrize("place", ["same", "above"])
def test_comment_switches_a_rule_off(comment: str, place: str) -> None:
    line = "vllm serve m --ports 1"
    text = f"{line}  {comment}\n" if place == "same" else f"{comment}\n{line}\n"
    report = lint([("x.sh", text)], FakeLinter(release="0.33.0"), Models.discover())
    assert (len(report.findings), report.ignored) == ((0, 1) if comment else (1, 0))


def test_comment_of_another_rule_does_not() -> None:
    assert found("vllm serve m --ports 1  # spark-build: ignore[bad-value, no-ray]\n")


def test_findings_as_sarif() -> None:
    report = lint([("x.sh", "vllm serve m --ports 1")], FakeLinter(), Models.discover())
    (run,) = sarif(report)["runs"]
    (result,) = run["results"]
    assert result["ruleId"] == run["tool"]["driver"]["rules"][0]["id"] == "unknown-flag"
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 1}


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("x.sh", 'vllm serve m --max-model-len "8192\n', 1),
        ("x.sh", "vllm serve m \\\n  --dtype auto \\\n  --seed '1\n  --port 1\n", 3),
        ("x.sh", 'echo ok\nif true; then\n  vllm serve m "\nfi\n', 3),
        ("x.sh", 'vllm serve m \\\n --dtype "auto" \\\n --seed "2\n --port 3\n', 3),
        ("Dockerfile", "FROM x\nCMD vllm serve m --seed '1\n", 2),
        ("x.yaml", "image: x\ncommand: vllm serve m --seed '1\n", 2),
        ("x.yaml", "image: x\ncommand: |\n  vllm serve m \\\n    --seed '1\n", 4),
        ("x.sh", "sh -c 'vllm serve m --seed \"1'\n", 1),
        ("x.sh", 'docker run x \\\n  bash -lc "vllm serve m \\\n  --seed \'1"\n', 3),
        ("Dockerfile", 'FROM x\nCMD ["sh", "-c", "vllm serve m --seed \'1"]\n', 2),
        ("Dockerfile", "FROM x\nCMD sh -c 'vllm serve m --seed \"1'\n", 2),
        ("x.yaml", 'image: x\ncommand: [sh, -c]\nargs:\n  - "vllm serve m \'1"\n', 4),
        ("x.yaml", "image: x\ncommand: sh -c 'vllm serve m \"1'\n", 2),
        ("x.sh", "sh -c 'vllm serve m --seed \"1\"'\n", None),
        ("x.sh", "python -c 'print(\"it)' && vllm serve m\n", None),
        ("x.sh", "sh -c 'echo \"it' && vllm serve m\n", None),
        ("Dockerfile", 'FROM x\nCMD ["sh", "-c", "vllm serve m --seed \'1\'"]\n', None),
        ("x.sh", 'vllm serve m --seed "1" \'{"a": 1}\' "it\'s" \\" --port 1\n', None),
        ("x.sh", "cat <<EOF\nit's\nEOF\nvllm serve m # it's mine\n", None),
        ("x.sh", "vllm serve m $(date\n", None),
        ("Dockerfile", 'FROM x\nRUN echo it\'s\nCMD ["vllm", "serve", "it\'s"]\n', None),
        ("x.yaml", "image: x\ncommand: [vllm, serve, \"it's\"]\nsays: it's\n", None),
        ("x.yaml", "a: {image: x, command: vllm serve m}\nb:\n  command: it's\n", None),
    ],
)
def test_a_quote_that_is_not_closed(name: str, text: str, line: int | None) -> None:
    lines = [one.line for one in found(text, name=name) if one.rule == "open-quote"]
    assert lines == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("x.sh", "--json", "--sarif"), "--json and --sarif print different documents"),
        (("--rules", "x.sh"), "--rules prints the rules and lints no file"),
        (("--rules", "--sarif"), "--rules is not printed as SARIF"),
        (("x.sh", "--release", ""), "Invalid value for '--release': it is empty"),
        (("x.sh", "--image", ""), "Invalid value for '--image': it is empty"),
    ],
)
def test_no_option_is_ignored(call: Call, words: tuple[str, ...], said: str) -> None:
    Path("x.sh").write_text("vllm serve m\n")
    done = call("lint", *words)
    assert done.code == 2
    text = done.json["error"]["message"] if "--json" in words else done.err
    assert said in text


def test_release_comes_from_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def read(ref: str) -> ServeInterface:
        asked.append(ref)
        return FakeLinter().interface(None)

    monkeypatch.setattr(lint_run, "interface_of", read)
    texts = ["docker run vllm/vllm-openai:v0.22.1-cu130 --model m"] * 2
    lint([("a.sh", texts[0]), ("b.sh", texts[1])], Linter(), Models.discover())
    assert asked == ["pypi:vllm==0.22.1"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("vllm serve m", "the vLLM release is unknown; the command names no image"),
        ("ls", "contains no vllm serve command"),
    ],
)
def test_file_that_cannot_be_judged_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why.replace("?", r"\?")):
        lint([("x.sh", text)], Linter(), Models.discover())


def test_command_prints_findings_and_exits_5(
    spark_build: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lint_run, "interface_of", lambda _: FakeLinter().interface(None))
    (tmp_path / "work/x.sh").write_text("vllm serve m --ports 1\n")
    call = spark_build
    result = call("lint", "x.sh", "--release", "0.33.0")  # type: ignore[operator]
    assert result.code == 5
    assert "x.sh:1: error: vLLM 0.33.0 has no flag --ports" in result.out
    assert call("lint", "x.sh", "--release", "0.33.0", "--json").code == 5  # type: ignore[operator]
    (tmp_path / "work/x.sh").write_text("NCCL_SOCKET_IFNAME=a vllm serve m\n")
    assert call("lint", "x.sh", "--release", "0.33.0").code == 0  # type: ignore[operator]
    assert call("lint", "x.sh", "--release", "0.33.0", "--strict").code == 5  # type: ignore[operator]
    assert call("lint").code == 2  # type: ignore[operator]
    assert "least-busy" in call("lint", "--rules").out  # type: ignore[operator]


def test_the_first_advice_is_the_fix(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint_run, "interface_of", lambda _: FakeLinter().interface(None))
    Path("x.sh").write_text("vllm serve m --ports 1 --linear-backend b12x\n")
    done = call("lint", "x.sh", "--release", "0.33.0", "--strict")
    assert done.code == 5
    assert "try: x.sh:1: leave it out, or take an image with the package" in done.err
    assert "ignore" not in done.err
    assert "to ask it: spark-build lint x.sh --release 0.33.0 --strict --ask" in done.err
    Path("x.sh").write_text("vllm serve m --ports 1\n")
    assert "try: spark-build lint --rules" in call("lint", "x.sh", "--release", "0.33.0").err


def test_files_without_a_command_are_skipped(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint_run, "interface_of", lambda _: FakeLinter().interface(None))
    Path("service.yaml").write_text("kind: Service\nspec: {ports: [{port: 1}]}\n")
    Path("x.sh").write_text("vllm serve m --ports 1\n")
    words = ("service.yaml", "x.sh", "--release", "0.33.0")
    done = call("lint", *words)
    assert done.code == 5
    assert "note: service.yaml has no serve command" in done.err
    assert "x.sh:1: error" in done.out
    assert call("lint", *words, "--json").json["skipped"] == ["service.yaml"]
    done = call("lint", "service.yaml", "service.yaml", "--release", "0.33.0")
    assert done.code == 2
    assert "none of 2 files contains a vllm serve command" in done.err


def test_a_file_of_recipe_names_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def plain(ref: str) -> ServeInterface:
        asked.append((ref,))
        return FakeLinter().interface(None)

    def patched(profile: str, ref: str) -> ServeInterface:
        asked.append((profile, ref))
        return FakeLinter(release="0.24.0").interface(None)

    monkeypatch.setattr(lint_run, "interface_of", plain)
    monkeypatch.setattr(lint_run, "patched_interface", patched)
    made = "#!/bin/sh\n# me/m on vLLM 0.24.0, profile b12x-full, solo\n# made by: x\n"
    served = "docker run me/vllm:1 vllm serve m --linear-backend flashinfer_b12x\n"
    report = lint([("run.sh", made + served)], Linter(), Models.discover())
    assert (report.vllm, report.findings) == ("0.24.0", ())
    recipe = """\
recipe_version: "2"
container: vllm/vllm-openai:v0.24.0
mods: ["@spark-build/sm121-b12x-full-enable"]
command: |
  vllm serve m --linear-backend flashinfer_b12x --gpu-memory-utilization 0.85
"""
    report = lint([("x.yaml", recipe)], Linter(), Models.discover())
    assert report.findings == ()
    assert asked == [("b12x-full", "pypi:vllm==0.24.0")] * 2
    other = recipe.replace("sm121-b12x-full-enable", "other-mod")
    lint([("x.yaml", other)], Linter(), Models.discover())
    assert asked[-1] == ("pypi:vllm==0.24.0",)


def test_a_variable_of_several_commands_is_reported_once() -> None:
    text = (
        "export VLLM_CHOICE=c\nvllm serve m --ports 1\n"
        "export VLLM_NVFP4_GEMM_BACKEND=x  # spark-build: ignore\nvllm serve m\nvllm serve m\n"
    )
    report = lint([("x.sh", text)], FakeLinter(release="0.33.0"), Models.discover())
    lines = [(one.line, one.rule) for one in report.findings]
    assert lines == [(1, "variable-value"), (2, "unknown-flag")]
    assert (report.commands, report.ignored) == (3, 1)


def test_a_file_is_reported_in_the_order_of_its_lines() -> None:
    text = "vllm serve m --ports 1\nvllm serve m --ports 2\nrouting_strategy: least-busy\n"
    assert [one.line for one in found(text)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("variable", "flag"),
    [
        ("VLLM_NVFP4_GEMM_BACKEND=marlin", "--linear-backend cutlass"),
        ("VLLM_USE_FLASHINFER_MOE_FP4=1", "--moe-backend marlin"),
    ],
)
def test_a_flag_that_the_release_lacks_has_no_effect_on_a_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, flag: str
) -> None:
    text = f"{variable} vllm serve m {flag}"
    assert [one.rule for one in found(text, "0.22.0")] == ["no-effect"]
    wrong = f"{variable} vllm serve m {flag}-x"
    assert [one.rule for one in found(wrong, "0.22.0")] == ["bad-value"]
    kept = tuple(one for one in FLAGS if one.names[0] != flag.split(maxsplit=1)[0])
    monkeypatch.setattr(sys.modules[__name__], "FLAGS", kept)
    assert [one.rule for one in found(text, "0.22.0")] == ["unknown-flag"]


@pytest.mark.parametrize(
    ("value", "help_"), [("cutlass", "use the flag --linear-backend cutlass"), ("none", "")]
)
def test_a_wrong_value_of_a_variable_is_not_said_to_be_gone(
    monkeypatch: pytest.MonkeyPatch, value: str, help_: str
) -> None:
    known = FakeLinter(release="0.22.0").interface(None)
    choices = {**known.variables, "VLLM_NVFP4_GEMM_BACKEND": ("marlin",)}
    changed = structs.replace(known, variables=choices)
    monkeypatch.setattr(FakeLinter, "interface", lambda *_: changed)
    (finding,) = found(f"VLLM_NVFP4_GEMM_BACKEND={value} vllm serve m", "0.22.0")
    assert (finding.rule, finding.help) == ("variable-value", help_)


@pytest.mark.parametrize("value", ["5", "1.01", "0", "nan", "inf", "1e3"])
def test_what_is_no_fraction_is_a_bad_value(value: str) -> None:
    (finding,) = found(f"vllm serve m --gpu-memory-utilization {value}")
    assert finding.rule == "bad-value"
    assert finding.message == f"--gpu-memory-utilization takes a fraction of 1, not {value}"


def test_many_words_take_no_square_of_time() -> None:
    assert len(found("vllm serve m " + "--x " * 8000)) == 1


def test_many_findings_are_cut_and_said() -> None:
    text = "vllm serve m " + " ".join(f"--x{n}" for n in range(5000))
    report = lint([("x.sh", text)], FakeLinter(), Models.discover())
    assert (len(report.findings), report.cut) == (1000, ("x.sh",))


@pytest.mark.parametrize("value", ["x" * 100_000, "[" * 20_000, '{"a":' * 10_000, "1" * 9000])
def test_long_and_deep_values_are_shown_in_part(value: str) -> None:
    flags = (
        "--port",
        "--compilation-config",
        "--moe-backend",
        "--reasoning-parser",
    )
    for name in flags:
        (finding,) = found(f"vllm serve m {name} '{value}'")
        assert len(finding.message) < 1000
    (finding,) = found(f"vllm serve m --{value}")
    assert len(finding.message) < 1000


def test_a_file_of_many_commands_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the machine that it names; once for each command, 3,000 documents took two minutes."""
    searched = []

    def machine(text: str) -> str:
        searched.append(text)
        return "spark"

    monkeypatch.setattr(lint_run, "machine_of", machine)
    text = "---\nimage: a\ncommand: vllm serve m\n" * 50
    report = lint([("x.yaml", text)], FakeLinter(release="0.33.0"), Models.discover())
    assert (report.commands, len(searched)) == (50, 1)


@pytest.mark.parametrize("words", ["vllm/vllm-openai:v0.%s.0", "IMAGE --max-model-len %s"])
def test_a_number_that_python_does_not_read_is_named(words: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.sh"
    file.write_text(f"# a comment\ndocker run {words % ('9' * 5000)} --model a/b\n")
    with pytest.raises(UsageError, match=r"serve\.sh:2: a number of more than 1000 digits"):
        read_file(file)
