"""A recipe as files of other tools: all of it is there, and nothing twice."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from msgspec import structs

from builder.common.document import plain
from builder.errors import UsageError
from builder.serving.models import Models
from builder.serving.recipe import MASTER_PORT, Place, RecipeText, explanation, recipe_of
from builder.serving.recipeformats import Block, rendered, trtllm, yaml_text
from tests.documents import validated

from .served import HARD, TWO, interface, request, served, with_hard_values

if TYPE_CHECKING:
    from builder.serving.recipe import Recipe
    from tests.unit.caller import Call

PLACES = {
    "solo": Place(topology="solo"),
    "tp2": Place(topology="tp2", **TWO),
    "tp2-ray": Place(topology="tp2-ray", **TWO),
    "two-solos": Place(topology="two-solos", addresses=TWO["addresses"]),
}


def made(topology: str = "solo", **changed: Any) -> Recipe:
    profile = changed.pop("served", served(has_ray=True))
    return recipe_of(request(place=PLACES[topology], served=profile, **changed))


def words_of(script: str) -> list[str]:
    """The words of the command of a script, as a shell reads them."""
    lines = [line for line in script.splitlines() if not line.startswith(("#", "export "))]
    return shlex.split("\n".join(lines).replace("\\\n", " "))


def test_docker_runs_the_recipe() -> None:
    recipe = made()
    words = words_of(rendered(recipe, "docker")["run.sh"])
    image = words.index(recipe.image.ref)
    assert ["vllm", *words[image + 1 :]] == recipe.command(recipe.nodes[0])
    assert words[image - 2 : image] == ["--entrypoint", "vllm"]
    assert "CUTE_DSL_ARCH=sm_121a" in words
    assert words[words.index("--publish") + 1] == "8000:8000"
    assert "$HOME/.cache/huggingface:/root/.cache/huggingface" in words


@pytest.mark.parametrize("form", ["docker", "shell"])
@pytest.mark.parametrize("topology", list(PLACES))
def test_a_pasted_script_does_not_end_the_session(form: str, topology: str) -> None:
    scripts = [t for n, t in rendered(made(topology), form).items() if n.endswith(".sh")]
    assert scripts
    assert not any(line.startswith("exec") for text in scripts for line in text.splitlines())
    assert not rendered_trtllm().startswith("exec")


def rendered_trtllm() -> str:
    """The command of TensorRT-LLM."""
    text = trtllm(Models.discover().model("nemotron-3-super"), 9000)["run.sh"]
    return next(line for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("topology", list(PLACES))
def test_two_nodes_have_the_devices_of_rdma(topology: str) -> None:
    one_model = topology.startswith("tp2")
    for text in rendered(made(topology), "docker").values():
        words = words_of(text) if text.startswith("#!") else []
        assert (words[words.index("--device") + 1] == "/dev/infiniband" if one_model else
                "--device" not in words)  # fmt: skip
        assert ("IPC_LOCK" in words) == ("memlock=-1" in words) == one_model or not words
    for name, text in rendered(made(topology), "compose").items():
        if name == "litellm.yaml":
            continue
        (service,) = yaml.safe_load(text)["services"].values()
        devices = ["/dev/infiniband:/dev/infiniband"] if one_model else None
        assert service.get("devices") == devices
        assert service.get("cap_add") == (["IPC_LOCK"] if one_model else None)


def test_shell_runs_the_recipe() -> None:
    recipe = made(chosen=("VLLM_DISABLED_KERNELS=A B,C",))
    text = rendered(recipe, "shell")["serve.sh"]
    assert words_of(text) == recipe.command(recipe.nodes[0])
    assert "export VLLM_DISABLED_KERNELS='A B,C'\n" in text


def test_compose_runs_the_recipe() -> None:
    recipe = made()
    service = yaml.safe_load(rendered(recipe, "compose")["compose.yaml"])["services"][recipe.model]
    assert [*service["entrypoint"], *service["command"]] == recipe.command(recipe.nodes[0])
    assert service["image"] == recipe.image.ref
    assert service["ports"] == ["8000:8000"]
    assert service["environment"] == {"HF_TOKEN": "${HF_TOKEN:-}", "CUTE_DSL_ARCH": "sm_121a"}


@pytest.mark.parametrize("form", ["docker", "compose", "shell"])
def test_two_nodes_have_a_file_each(form: str) -> None:
    recipe = made("tp2")
    files = list(rendered(recipe, form).values())
    assert len(files) == 2
    for node, text in zip(recipe.nodes, files, strict=True):
        assert f"# on the node {node.address}\n" in text
        assert "GLOO_SOCKET_IFNAME" in text
    assert ["--headless" in text for text in files] == [False, True]


# ------------------------------------------------------------------------- sparkrun and eugr

WITH_BRACES: dict[str, Any] = {"speculate": True}


def loaded(form: str, topology: str = "solo", **changed: Any) -> dict[str, Any]:
    (text,) = rendered(made(topology, **changed), form).values()
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def test_sparkrun_fills_in_the_whole_command() -> None:
    recipe = made(**WITH_BRACES)
    document = loaded("sparkrun", **WITH_BRACES)
    assert document["defaults"] == {
        "tensor_parallel": 1, "max_model_len": 200000, "gpu_memory_utilization": 0.85,
        "kv_cache_dtype": "fp8", "host": "0.0.0.0", "port": 8000,
    }  # fmt: skip
    command = document["command"]
    for name, value in {**document["defaults"], "model": document["model"]}.items():
        assert f"{{{name}}}" in command
        command = command.replace(f"{{{name}}}", str(value))
    words = shlex.split(command.replace("\\\n", " "))
    assert words == [*recipe.command(recipe.nodes[0]), "--tensor-parallel-size", "1"]


def test_sparkrun_takes_the_official_image_and_the_mod_where_files_change() -> None:
    document = loaded("sparkrun")
    assert document["container"] == "vllm/vllm-openai:v0.33.0"
    assert document["mods"] == ["@spark-build/sm121-b12x-full-enable"]
    assert document["executor_config"] == {"entrypoint": ""}
    assert "name" not in document
    assert document["env"] == {}
    (text,) = rendered(made(), "sparkrun").values()
    assert "# env: sparkrun sets CUTE_DSL_ARCH itself on a GB10\n" in text
    mine = loaded("sparkrun", served=served(image="me/x:1", build="", named_image=True))
    assert mine["container"] == "me/x:1"
    assert "mods" not in mine


@pytest.mark.parametrize(("topology", "nodes"), [("solo", 1), ("tp2", 2)])
def test_sparkrun_and_eugr_join_the_nodes_themselves(topology: str, nodes: int) -> None:
    for form in ("sparkrun", "eugr"):
        document = loaded(form, topology)
        assert document["defaults"]["tensor_parallel"] == nodes
        words = {"--nnodes", "--node-rank", "--master-addr", "--headless"}
        assert words.isdisjoint(document["command"].split())
        assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(document["env"])
    document = loaded("sparkrun", topology)
    assert (document.get("min_nodes", 1), document["max_nodes"]) == (nodes, nodes)
    assert document["runtime"] == "vllm-distributed"
    assert ("cluster_only" in loaded("eugr", topology)) == (nodes == 2)


def test_eugr_formats_the_command() -> None:
    """It is given to ``str.format`` with the defaults: every other brace is doubled."""
    recipe = made(**WITH_BRACES)
    document = loaded("eugr", **WITH_BRACES)
    assert {"name", "recipe_version", "container", "command"} <= set(document)
    assert document["recipe_version"] == "1"
    words = shlex.split(document["command"].format(**document["defaults"]).replace("\\\n", " "))
    assert words == [*recipe.command(recipe.nodes[0]), "--tensor-parallel-size", "1"]


def test_sparkrun_starts_ray_itself() -> None:
    document = loaded("sparkrun", "tp2-ray")
    assert document["runtime"] == "vllm-ray"
    assert (document["min_nodes"], document["max_nodes"]) == (2, 2)
    assert document["defaults"]["tensor_parallel"] == 2
    assert "--distributed-executor-backend" not in document["command"]


@pytest.mark.parametrize("topology", ["tp2", "tp2-ray"])
def test_a_launcher_is_told_no_addresses(topology: Any) -> None:
    place = Place(topology=topology, launcher="sparkrun")
    recipe = recipe_of(request(place=place, served=served(has_ray=True)))
    given = recipe_of(request(place=PLACES[topology], served=served(has_ray=True)))
    (text,), (other,) = (rendered(one, "sparkrun").values() for one in (recipe, given))
    assert yaml.safe_load(text) == yaml.safe_load(other)
    assert "10.0.0.1" not in text
    assert [node.address for node in recipe.nodes] == ["", ""]
    with pytest.raises(UsageError, match="sparkrun finds the nodes") as refused:
        recipe_of(request(place=replace(place, interface="eth0"), served=served(has_ray=True)))
    assert refused.value.hint == "leave --address and --interface out"
    if topology == "tp2-ray":
        with pytest.raises(UsageError, match="does not include Ray"):
            recipe_of(request(place=place))


@pytest.mark.parametrize(
    ("form", "topology", "hint"),
    [
        ("sparkrun", "two-solos", "--format docker"),
        ("eugr", "two-solos", "--format docker"),
        ("eugr", "tp2-ray", "--topology tp2"),
        ("kubernetes", "tp2-ray", "--format compose"),
    ],
)
def test_what_a_tool_cannot_start_is_refused(form: str, topology: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"cannot describe topology {topology}") as refused:
        rendered(made(topology), form)
    assert refused.value.hint == hint


def test_a_topology_is_refused_before_its_addresses_are_asked_for(call: Call) -> None:
    for form, topology in (("sparkrun", "two-solos"), ("kubernetes", "tp2")):
        words = ["recipe", "nemotron-3-super", "--release", "0.33.0", "--topology", topology]
        result = call(*words, "--format", form)
        assert result.code == 2
        assert f"cannot describe topology {topology}" in result.err
        assert "--address" not in result.err


@pytest.mark.parametrize("form", ["sparkrun", "eugr", "kubernetes"])
def test_a_chosen_file_that_a_tool_cannot_mount(form: str) -> None:
    chosen = ("reasoning-parser-plugin=mine.py", "reasoning-parser=mine")
    with pytest.raises(UsageError, match=r"cannot mount mine\.py, which --set names") as refused:
        rendered(made(chosen=chosen), form)
    assert refused.value.hint == "--format docker"


def test_a_chosen_plugin_is_mounted(tmp_path: Path) -> None:
    chosen = ("reasoning-parser-plugin=files/mine.py", "reasoning-parser=mine")
    recipe = made(chosen=chosen)
    words = words_of(rendered(recipe, "docker")["run.sh"])
    assert "$PWD/files/mine.py:/app/mine.py:ro" in words
    assert words[words.index("--reasoning-parser-plugin") + 1] == "/app/mine.py"
    assert "./files/mine.py is not here: put it there before the server starts" in recipe.notes
    service = yaml.safe_load(rendered(recipe, "compose")["compose.yaml"])["services"]
    assert "./files/mine.py:/app/mine.py:ro" in service[recipe.model]["volumes"]
    assert "./files/mine.py" in words_of(rendered(recipe, "shell")["serve.sh"])

    (tmp_path / "own.py").touch()
    here = made(chosen=(f"reasoning-parser-plugin={tmp_path}/own.py", "reasoning-parser=mine"))
    assert f"{tmp_path}/own.py:/app/own.py:ro" in words_of(rendered(here, "docker")["run.sh"])
    odd = made(chosen=('chat-template=it\'s "$(x)".jinja', "reasoning-parser-plugin=`y`$z.py"))
    script = rendered(odd, "docker")["run.sh"]
    assert '--volume "$PWD/\\`y\\`\\$z.py:/app/`y`$z.py:ro"' not in script, "both sides are quoted"
    assert '--volume "$PWD/\\`y\\`\\$z.py:/app/\\`y\\`\\$z.py:ro"' in script
    assert [plugin.name for plugin in odd.plugins] == ["`y`$z.py"], "the template is no file here"
    assert sum("is not on this machine: the image must have it" in n for n in odd.notes) == 1
    inline = made(chosen=("chat-template={{ messages }}",))
    assert not any("not on this machine" in note for note in inline.notes)
    assert not any("not here" in note for note in here.notes)

    gone = made(chosen=("reasoning-parser-plugin=/opt/in-the-image.py", "reasoning-parser=mine"))
    assert not gone.plugins
    assert "/opt/in-the-image.py is not on this machine: the image must have it" in gone.notes
    with pytest.raises(UsageError, match="is a folder"):
        made(chosen=(f"reasoning-parser-plugin={tmp_path}",))


@pytest.mark.parametrize("form", ["sparkrun", "eugr", "kubernetes"])
def test_a_file_that_a_tool_cannot_mount(form: str) -> None:
    older = served("0.17.0", interface=interface("0.17.0", reasoning_parsers=()))
    with pytest.raises(UsageError, match="cannot mount super_v3_reasoning_parser"):
        rendered(made(served=older), form)


# -------------------------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize(("topology", "replicas"), [("solo", 1), ("two-solos", 2)])
def test_kubernetes_runs_the_recipe(topology: str, replicas: int) -> None:
    recipe = made(topology)
    (text,) = rendered(recipe, "kubernetes").values()
    assert ("# the Service gives each connection to one of them" in text) == (replicas > 1)
    deployment, service = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [*container["command"], *container["args"]] == recipe.command(recipe.nodes[0])
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert {"name": "CUTE_DSL_ARCH", "value": "sm_121a"} in container["env"]
    assert pod["enableServiceLinks"] is False
    assert deployment["spec"]["replicas"] == replicas
    assert ("affinity" in pod) == (replicas > 1)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels


def test_the_page_on_two_sparks_has_the_files_and_names_of_its_recipes() -> None:
    page = (Path(__file__).parents[3] / "docs/two-sparks.md").read_text("utf-8")
    recipes = [made(topology) for topology in ("tp2", "two-solos")]
    files = {name for recipe in recipes for name in rendered(recipe, "docker")}
    assert set(re.findall(r"\b(?:run-\d\.sh|\w+\.yaml)\b", page)) == files
    assert set(re.findall(r"\bnemotron-3-super-\d\b", page)) == {
        "nemotron-3-super-0", "nemotron-3-super-1",
    }  # fmt: skip
    assert f"192.168.177.11 {MASTER_PORT}" in page
    for name in ("VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        assert name in recipes[0].variables(recipes[0].nodes[0])
        assert f"`{name}`" in page


def test_a_name_with_a_dot_is_one_that_kubernetes_takes() -> None:
    recipe = recipe_of(request("qwen3.6-35b-a3b"))
    assert list(rendered(recipe, "kubernetes")) == ["qwen3-6-35b-a3b.yaml"]


def test_ray_is_started_first() -> None:
    files = rendered(made("tp2-ray"), "docker")
    head, other = (words_of(text)[-1] for text in files.values())
    assert head.startswith("ray start --head --port 6379 --node-ip-address 10.0.0.1 && exec vllm")
    assert other.startswith("exec ray start --block --address 10.0.0.1:6379")
    assert "vllm serve" not in other


def test_two_solos_are_behind_a_balancer_that_shares_out_evenly() -> None:
    files = rendered(made("two-solos"), "docker")
    assert list(files) == ["run-0.sh", "run-1.sh", "litellm.yaml"]
    config = yaml.safe_load(files["litellm.yaml"])
    assert config["router_settings"] == {"routing_strategy": "simple-shuffle"}
    bases = [one["litellm_params"]["api_base"] for one in config["model_list"]]
    assert bases == ["http://10.0.0.1:8000/v1", "http://10.0.0.2:8000/v1"]
    assert {one["model_name"] for one in config["model_list"]} == {"nemotron-3-super"}


def test_a_plugin_file_is_mounted_where_the_flag_says() -> None:
    older = interface("0.17.0", reasoning_parsers=())
    recipe = made(served=served("0.17.0", interface=older))
    words = words_of(rendered(recipe, "docker")["run.sh"])
    assert "$PWD/super_v3_reasoning_parser.py:/app/super_v3_reasoning_parser.py:ro" in words
    script = words_of(rendered(recipe, "shell")["serve.sh"])
    assert "./super_v3_reasoning_parser.py" in script


def test_comments_say_what_was_left_out_and_what_is_unknown() -> None:
    text = rendered(recipe_of(request("gemma-4-31b")), "docker")["run.sh"]
    assert "# left out: --moe-backend flashinfer_b12x: the model has no NVFP4 experts\n" in text
    assert "# note: the context is unknown" in text
    assert "# the image: spark-build image --layers b12x-full" in text


def test_the_explanation_is_as_wide_as_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "me/" + "x" * 70
    recipe = made(chosen=(f"dtype={long}-{long}",), topology="tp2")
    for columns, width in (("200", 100), ("72", 72), ("20", 40)):
        monkeypatch.setenv("COLUMNS", columns)
        text = explanation(recipe)
        kept = [line for line in text.splitlines() if len(line) > width]
        whole = [line for line in kept if " " in line.strip()]
        assert all(line.lstrip().startswith(("--", "spark-build ")) for line in whole)
        assert f"  --dtype {long}-{long}\n" in text
        assert "  spark-build image --layers b12x-full --base vllm/vllm-openai:v0.33.0" in text


def test_the_explanation_says_where_each_value_comes_from() -> None:
    text = explanation(made("tp2"))
    assert "  --max-model-len 200000\n      model: write-up of one GB10" in text
    assert "  --linear-backend flashinfer_b12x\n      profile b12x-full on vLLM 0.33.0\n" in text
    assert "node 1, 10.0.0.2\n" in text
    assert "known failure: --enforce-eager crashes" in text
    assert "no measurement is known" in text
    other = explanation(recipe_of(request("nemotron-3-nano")))
    assert "  58.27 tokens/s at 1: vLLM 0.20.1" in other


@pytest.mark.parametrize("topology", PLACES)
def test_the_document_is_as_its_schema_says(topology: str) -> None:
    recipe = made(topology)
    document = RecipeText(format="docker", recipe=recipe, files=rendered(recipe, "docker"))
    assert validated("recipe", plain(document))["recipe"]["topology"] == topology
    with pytest.raises(AssertionError, match="recipe"):
        validated("recipe", {**plain(document), "recipe": {"topology": topology}})


def test_an_unknown_format() -> None:
    with pytest.raises(UsageError, match="did you mean 'docker'"):
        rendered(made(), "dokcer")


@pytest.mark.parametrize(
    "value",
    [
        {"a": "yes", "b": 1, "c": None, "d": True, "e": 0.5, "f": "0x10", "g": "", "h": "a: b # c"},
        {"list": ["no", ["x", "y"], {"k": "v", "m": {"n": []}}], "8000": "x", "a.b/c": "d"},
        {"text": Block("one\n  two: {x}\n# three\n")},
    ],
)
def test_yaml_is_read_as_it_was_given(value: Any) -> None:
    assert yaml.safe_load(yaml_text(value)) == value


@pytest.mark.parametrize(
    "text",
    ["on", "No", "y", "~", "null", "1e6", "1_000", "0x10", "0o7", "017", ".inf", "12:30:00",
     "2026-11-23", "=", "<<", "- x", "a: b", "# no", "", " x ", "{}", "x\ty", "\u00e9"],
)  # fmt: skip
def test_no_reader_takes_a_text_for_another_value(text: str) -> None:
    """In quotes it is a text in YAML 1.1, in YAML 1.2 and, where that has it, in JSON."""
    written = yaml_text({"key": text, text or "-": "value"})
    value, key = written.splitlines()
    assert value.startswith('key: "')
    assert value.endswith('"')
    assert key[0] in "\"'"
    assert yaml.safe_load(written) == {"key": text, text or "-": "value"}


def test_yaml_stays_readable() -> None:
    twice = {"name": "x", "list": [1, 0.5, True, None]}
    long = "word " * 40
    assert yaml_text(
        {"a": twice, "b.c/d": [twice], "e": {}, "f": long, "g": Block("x \\\n  y\n")}
    ) == (
        'a:\n  name: "x"\n  list:\n    - 1\n    - 0.5\n    - true\n    - null\n'
        'b.c/d:\n  - name: "x"\n    list:\n      - 1\n      - 0.5\n      - true\n      - null\n'
        f'e: {{}}\nf: "{long}"\ng: |\n  x \\\n    y\n'
    )


# ------------------------------------------------------------------------------- TensorRT-LLM


def test_tensorrt_llm_has_what_the_models_file_says() -> None:
    files = trtllm(Models.discover().model("nemotron-3-super"), 9000)
    words = words_of(files["run.sh"])
    serve = words[words.index("trtllm-serve") :]
    assert serve[1:6] == [
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "--host", "0.0.0.0", "--port", "9000",
    ]  # fmt: skip
    assert serve[serve.index("--reasoning_parser") + 1] == "nano-v3"
    assert serve[-2:] == ["--extra_llm_api_options", "/app/trtllm-options.yaml"]
    assert f"$PWD/trtllm-options.yaml:{serve[-1]}:ro" in words
    options = yaml.safe_load(files["trtllm-options.yaml"])
    assert options["kv_cache_config"]["mamba_ssm_philox_rounds"] == 5
    assert options["enable_attention_dp"] is False
    with pytest.raises(
        UsageError, match="the file of gpt-oss-120b has no settings for TensorRT-LLM"
    ):
        trtllm(Models.discover().model("gpt-oss-120b"), 8000)


def test_the_command_of_tensorrt_llm_needs_no_release(call: Call) -> None:
    words = ("recipe", "nemotron-3-super", "--format", "trtllm")
    done = call(*words, "-o", "run.sh", "--json").json
    assert list(done["files"]) == ["run.sh", "trtllm-options.yaml"]
    assert done["written"] == ["run.sh", "trtllm-options.yaml"]
    assert os.access("run.sh", os.X_OK)
    assert not os.access("trtllm-options.yaml", os.X_OK)
    refused = call(*words, "--release", "0.33.0")
    assert refused.code == 2
    assert "--release is for vLLM" in refused.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "neither --release nor --image is given"),
        (["--format", "dokcer", "--release", "0.33.0"], "did you mean 'docker'"),
        (["--topology", "tp3", "--release", "0.33.0"], "unknown topology 'tp3'"),
        (["--image", "oci:out"], "--image 'oci:out' is not a name that a container engine can run"),
        (["--profile", "marlin-env", "--release", "0.33.0"], "'marlin-env' is not a profile"),
    ],
)
def test_a_request_that_cannot_be_met(call: Call, words: list[str], message: str) -> None:
    done = call("recipe", "nemotron-3-super", *words)
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "b12x-full"], "--profile is for vLLM"),
        (["--release", "0.33.0"], "--release is for vLLM"),
        (["--patches", "."], "--patches is for vLLM"),
        (["--interface", "eth0"], "--interface is for vLLM"),
    ],
)
def test_tensorrt_llm_ignores_no_option(call: Call, words: list[str], message: str) -> None:
    done = call("recipe", "nemotron-3-super", "--format", "trtllm", *words)
    assert (done.code, message in done.err) == (2, True)
    assert "try: spark-build recipe nemotron-3-super --format trtllm\n" in done.err


def test_other_files_are_replaced_only_by_force(call: Call) -> None:
    words = ("recipe", "nemotron-3-super", "--format", "trtllm", "-o", "mine.sh")
    assert call(*words).code == 0
    assert call(*words).code == 0  # the same content
    other = Path("trtllm-options.yaml")
    other.write_text("mine: true\n")
    refused = call(*words)
    assert (refused.code, other.read_text()) == (2, "mine: true\n")
    assert "already exists with other content: trtllm-options.yaml; --force" in refused.err
    assert "-o mine.sh --force\n" in refused.err
    assert call(*words, "--force").code == 0
    assert "mine" not in other.read_text()


def test_a_folder_that_is_not_there_is_not_made(call: Call) -> None:
    done = call("recipe", "nemotron-3-super", "--format", "trtllm", "-o", "a/b/run.sh")
    assert (done.code, Path("a").exists()) == (2, False)
    assert "-o a/b/run.sh is in a folder that does not exist" in done.err


def test_two_servers_have_no_interface_between_them() -> None:
    place = replace(PLACES["two-solos"], interface="eth0")
    with pytest.raises(UsageError, match="two-solos does not use --interface") as caught:
        recipe_of(request(place=place))
    assert caught.value.hint == "leave --interface out"


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("docker", "the image: spark-build image --layers b12x-full"),
        ("kubernetes", "the image: spark-build image --layers b12x-full"),
        ("shell", "the environment: spark-build apply SITE_PACKAGES --layers b12x-full\n"),
        ("sparkrun", "the mod: sm121-b12x-full-enable changes {official} when it starts\n"),
        ("eugr", "the mod: sm121-b12x-full-enable changes {official} when it starts\n"),
    ],
)
def test_the_comment_says_what_changes_files(form: str, said: str) -> None:
    recipe = made()
    text = next(iter(rendered(recipe, form).values()))
    assert f"# {said.format(official=recipe.image.official)}" in text
    assert sum(text.count(f"# the {what}:") for what in ("image", "environment", "mod")) == 1
    unchanged = made(served=served(build="", mod=""))
    text = next(iter(rendered(unchanged, form).values()))
    assert not any(f"# the {what}:" in text for what in ("image", "environment", "mod"))


@pytest.mark.parametrize("form", ["docker", "shell", "sparkrun"])
def test_the_comment_has_the_command_that_makes_it_again(form: str) -> None:
    recipe = made(models=(Path("my models"),), patches=(Path("own"),))
    text = next(iter(rendered(recipe, form).values()))
    (line,) = [line for line in text.splitlines() if line.startswith("# made by: ")]
    assert line.endswith(f" --models 'my models' --patches own --format {form}")


def test_a_folder_is_no_file_to_write(call: Call) -> None:
    done = call("recipe", "nemotron-3-super", "--format", "trtllm", "-o", ".")
    assert (done.code, "--format trtllm -o run.sh" in done.err) == (2, True)


# ------------------------------------------------------------------- values that a format can break

#: What a reader of some format would take for its own.
EACH = [*"${}()'\"\\\n:#`!%&|;<>*?~\t=", "$$", "$(PORT)", "$$(PORT)", "${PORT}", "$PORT", "{port}",
        "{{port}}", "{config.port}", "{{launch.node_rank}}", "}}", "PLACE_OF_port", "007", "0.850",
        "1e5", "on", "", " a ", "\\\n", "\\1", "--x", "'''", "\u00e9"]  # fmt: skip


def kubernetes_value(text: str) -> str:
    """A text as Kubernetes expands it, and compose interpolates it: ``$$`` is a dollar sign."""
    assert not re.search(r"(?<!\$)(?:\$\$)*\$(?!\$)", text), f"a variable in {text!r}"
    return text.replace("$$", "$")


def read_back(form: str, recipe: Recipe) -> tuple[list[str], dict[str, str]]:
    """The command and the variables that the file of a format says."""
    (text,) = rendered(recipe, form).values()
    if form in ("docker", "shell"):
        words = shlex.split(text.replace(" \\\n    ", " "), comments=True)
        env = dict(word.split("=", 1) for word in words if re.match(r"\w+=", word))
        if form == "shell":
            return words[words.index("vllm") :], env
        return ["vllm", *words[words.index(recipe.image.ref) + 1 :]], env
    document = next(yaml.safe_load_all(text))
    if form == "compose":
        service = document["services"][recipe.model]
        words = [*service["entrypoint"], *service["command"]]
        env = {k: v for k, v in service["environment"].items() if k != "HF_TOKEN"}
    else:
        (container,) = document["spec"]["template"]["spec"]["containers"]
        words = [*container["command"], *container["args"]]
        env = {one["name"]: one["value"] for one in container["env"][1:]}
    return list(map(kubernetes_value, words)), {k: kubernetes_value(v) for k, v in env.items()}


@pytest.mark.parametrize("value", [HARD, *EACH])
@pytest.mark.parametrize("form", ["docker", "shell", "compose", "kubernetes"])
def test_a_value_arrives_byte_for_byte(form: str, value: str) -> None:
    recipe = with_hard_values(made(), value)
    words, env = read_back(form, recipe)
    assert words == recipe.command(recipe.nodes[0])
    assert {name: env[name] for name in recipe.variables(recipe.nodes[0])} == recipe.variables(
        recipe.nodes[0]
    )


@pytest.mark.parametrize("value", [HARD, *EACH])
def test_eugr_formats_a_value_byte_for_byte(value: str) -> None:
    recipe = with_hard_values(made(), value)
    (text,) = rendered(recipe, "eugr").values()
    document = yaml.safe_load(text)
    command = document["command"].format(**document["defaults"])
    words = [*recipe.command(recipe.nodes[0]), "--tensor-parallel-size", "1"]
    assert shlex.split(command.replace(" \\\n  ", " ")) == words
    written = document["env"]["VLLM_DISABLED_KERNELS"]
    assert re.sub(r"\\([\\\"$`])", r"\1", written) == value
    assert not re.search(r'(?<!\\)(?:\\\\)*["$`]', written), "a shell reads it in double quotes"


@pytest.mark.parametrize("value", [HARD, "a b", "x'$(y)", "--x: {a}"])
def test_tensorrt_llm_has_a_value_byte_for_byte(value: str) -> None:
    model = Models.discover().model("nemotron-3-super")
    assert model.tensorrt_llm is not None
    known = structs.replace(
        model.tensorrt_llm, variables={"A": value}, flags={"--a": value}, options={"a": value}
    )
    files = trtllm(structs.replace(model, tensorrt_llm=known), 9000)
    words = words_of(files["run.sh"])
    assert f"A={value}" in words
    assert words[words.index("--a") + 1] == value
    assert yaml.safe_load(files["trtllm-options.yaml"]) == {"a": value}


MARLIN: dict[str, Any] = {
    "name": "marlin", "env": {"VLLM_DISABLED_KERNELS": "X"},
    "flags": ("--linear-backend", "marlin"), "moe_flags": ("--moe-backend", "marlin"),
    "build": "", "mod": "",
    "image": "vllm/vllm-openai:v0.33.0",
}  # fmt: skip


def for_vllm(model: str = "nemotron-3-super", topology: str = "solo", **changed: Any) -> Any:
    """The document of vllm-project/recipes for one of our models."""
    place = Place(topology=topology, launcher="vllm")  # type: ignore[arg-type]
    known = Models.discover().model(model)
    profile = served(**{**MARLIN, **changed})
    recipe = recipe_of(request(known, place=place, served=profile, speculate=True))
    ((name, text),) = rendered(recipe, "vllm", known).items()
    assert name == f"{recipe.id.partition('/')[2]}.yaml"
    return yaml.safe_load(text), recipe


def test_a_recipe_of_vllm_has_the_settings_of_a_gb10(monkeypatch: pytest.MonkeyPatch) -> None:
    """All flags and variables are there once; what its command builder adds is not."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1800000000")
    document, recipe = for_vllm()
    own = document["variants"]["default"]["hardware_overrides"]["dgx_spark_gb10"]
    features = [word for one in document["features"].values() for word in one["args"]]
    given = [word for flag in recipe.flags for word in flag.words]
    for name in ("--host", "--port", "--tensor-parallel-size"):
        if name in given:
            del given[given.index(name) : given.index(name) + 2]
    assert sorted([*own["extra_args"], *features, *document["model"]["base_args"]]) == sorted(given)
    assert own["extra_args"][-4:] == ["--linear-backend", "marlin", "--moe-backend", "marlin"]
    assert own["extra_env"]["VLLM_DISABLED_KERNELS"] == "X"
    assert own["docker_image"] == "vllm/vllm-openai:v0.33.0"
    assert "install" not in own
    assert document["features"]["spec_decoding"]["args"][0] == "--speculative-config"
    assert document["opt_in_features"] == ["spec_decoding"]
    assert document["compatible_strategies"] == ["single_node_tp"]
    assert document["meta"]["date_added"] == "2027-01-15"
    assert "hardware" not in document["meta"], "nobody ran exactly this on a GB10"
    model = document["model"]
    assert (model["model_id"], model["architecture"]) == (recipe.id, "moe")
    assert model["active_parameters"] == "12B"
    assert document["variants"]["default"]["precision"] == "nvfp4"
    measured = recipe.measured[0]
    assert f"{measured.tokens_per_second:g} tokens/s" in document["guide"]
    assert measured.source in document["guide"]


def test_a_recipe_of_vllm_for_two_sparks() -> None:
    document, _ = for_vllm(topology="tp2")
    assert document["compatible_strategies"] == ["multi_node_tp"]
    assert "--tensor-parallel-size" not in str(document["variants"])


def test_an_image_of_ones_own_has_no_wheel() -> None:
    document, _ = for_vllm(image="me/vllm:1", named_image=True)
    own = document["variants"]["default"]["hardware_overrides"]["dgx_spark_gb10"]
    assert (own["docker_image"], own["install"]) == ("me/vllm:1", {"pip": False})


def test_what_a_recipe_of_vllm_cannot_say_is_refused() -> None:
    known = Models.discover().model("nemotron-3-super")
    patched = made()
    with pytest.raises(UsageError, match="an image that everybody can pull"):
        rendered(patched, "vllm", known)
    official = structs.replace(patched, image=structs.replace(patched.image, build=""))
    for field in ("parameters", "maximum_context"):
        unknown = structs.replace(known, config=None, **{field: None})
        with pytest.raises(UsageError, match="is not known, and vllm-project/recipes needs it"):
            rendered(official, "vllm", unknown)
    with pytest.raises(UsageError, match="cannot describe topology two-solos"):
        rendered(structs.replace(official, topology="two-solos"), "vllm", known)
    other = structs.replace(known, config=None, needs=None)
    (text,) = rendered(official, "vllm", other).values()
    assert yaml.safe_load(text)["model"]["min_vllm_version"] == "0.33.0"


STRANGE = ("me/a\n  touch x", "me/$(touch x)", "me/`x`", "me/a; x", "me/a b", "me/'a", "me/{x}")


@pytest.mark.parametrize("id_", STRANGE)
@pytest.mark.parametrize("form", ["docker", "shell", "eugr"])
def test_an_id_is_one_word_of_every_command(form: str, id_: str) -> None:
    """Models' files are checked; a recipe made otherwise is quoted."""
    strange = structs.replace(made(), id=id_)
    text = "".join(rendered(strange, form).values())
    if form == "eugr":
        filled = yaml.safe_load(text)["command"].format(**yaml.safe_load(text)["defaults"])
        assert shlex.split(filled.replace("\\\n", " "))[:3] == ["vllm", "serve", id_]
    else:
        assert id_ in words_of(text)


def test_a_source_of_several_lines_is_one_comment() -> None:
    """A line behind the first would be a command of the script."""
    model = Models.discover().model("nemotron-3-super")
    known = model.tensorrt_llm
    assert known is not None
    own = structs.replace(
        model, tensorrt_llm=structs.replace(known, source="a page\ntouch pwned\rx")
    )
    for text in trtllm(own, 9000).values():
        head = [line for line in text.splitlines() if "touch pwned" in line]
        assert head == ["# source: a page touch pwned x"]
