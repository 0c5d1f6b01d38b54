"""Recipes: every word is one that the release knows, and says where it comes from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from builder.errors import UsageError
from builder.serving.lint import linted_recipe
from builder.serving.models import Models
from builder.serving.recipe import Place, recipe_of
from builder.serving.recipeformats import rendered
from builder.serving.release import refuse_old, refuse_unpatched, served_profile
from builder.serving.serveflags import replaced

from .served import TWO, interface, request, served

if TYPE_CHECKING:
    from builder.serving.recipe import Recipe


def flags(recipe: Recipe) -> dict[str, str | None]:
    return {flag.name: flag.value for flag in recipe.flags}


def left_out(recipe: Recipe) -> dict[str, str]:
    return {one.name: one.reason for one in recipe.left_out}


def test_a_recipe_has_what_model_and_profile_ask_for() -> None:
    made = recipe_of(request())
    assert made.command(made.nodes[0])[:3] == [
        "vllm", "serve", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
    ]  # fmt: skip
    assert flags(made) == {
        "--trust-remote-code": None, "--dtype": "auto", "--max-num-batched-tokens": "4096",
        "--enable-prefix-caching": None, "--max-model-len": "200000", "--kv-cache-dtype": "fp8",
        "--gpu-memory-utilization": "0.85", "--reasoning-parser": "nemotron_v3",
        "--tool-call-parser": "qwen3_coder", "--enable-auto-tool-choice": None,
        "--linear-backend": "flashinfer_b12x", "--moe-backend": "flashinfer_b12x",
        "--host": "0.0.0.0", "--port": "8000",
    }  # fmt: skip
    assert made.variables(made.nodes[0]) == {"CUTE_DSL_ARCH": "sm_121a"}
    assert all(one.origin for one in (*made.flags, *made.env))
    assert not made.left_out


def test_what_the_release_does_not_know_is_left_out_with_the_reason() -> None:
    older = interface("0.33.0", without=("--enable-prefix-caching", "--linear-backend"))
    made = recipe_of(request(served=served(interface=older)))
    assert {"--enable-prefix-caching", "--linear-backend"}.isdisjoint(flags(made))
    assert "has no flag --linear-backend" in left_out(made)["--linear-backend"]


def test_a_variable_that_is_gone_becomes_the_flag_that_replaced_it() -> None:
    made = recipe_of(request(served=served(env={"VLLM_NVFP4_GEMM_BACKEND": "marlin"}, flags=())))
    assert flags(made)["--linear-backend"] == "marlin"
    assert "--linear-backend marlin replaces it" in left_out(made)["VLLM_NVFP4_GEMM_BACKEND"]
    assert not made.env


def test_a_parser_that_the_release_lacks_comes_with_the_checkpoint() -> None:
    older = interface("0.17.0", reasoning_parsers=("qwen3",))
    made = recipe_of(request(served=served("0.17.0", interface=older)))
    assert flags(made)["--reasoning-parser"] == "super_v3"
    assert flags(made)["--reasoning-parser-plugin"] == "/app/super_v3_reasoning_parser.py"
    assert [plugin.name for plugin in made.plugins] == ["super_v3_reasoning_parser.py"]
    assert left_out(made)["--reasoning-parser"] == "vLLM 0.17.0 has no parser nemotron_v3"


def test_no_parser_at_all_is_no_flag() -> None:
    older = interface("0.33.0", tool_parsers=("hermes",))
    made = recipe_of(request(served=served(interface=older)))
    assert {"--tool-call-parser", "--enable-auto-tool-choice"}.isdisjoint(flags(made))


@pytest.mark.parametrize(
    ("model", "vllm", "given"),
    [
        ("nemotron-3-super", "0.24.0", False),
        ("nemotron-3-super", "0.25.0", True),
        ("qwen3-30b-a3b", "0.22.1", True),
        ("qwen3.6-35b-a3b", "0.23.0", False),
        ("qwen3.6-35b-a3b", "0.33.0", False),
        ("nemotron-3-nano-w4a16", "0.33.0", False),
        ("nemotron-3-nano", "0.33.0", True),
        ("gemma-4-31b", "0.33.0", False),
        ("gpt-oss-120b", "0.33.0", False),
    ],
)
def test_b12x_experts_are_asked_for_where_the_release_has_those_of_the_model(
    model: str, vllm: str, given: bool
) -> None:
    made = recipe_of(request(model, served=served(vllm, interface=interface(vllm))))
    assert ("--moe-backend" in flags(made)) == given
    assert ("--moe-backend" in left_out(made)) != given


def test_experts_of_which_nobody_knows_are_left_to_vllm(tmp_path: Any) -> None:
    (tmp_path / "mine.toml").write_text(
        'summary = "x"\n[id]\nvalue = "me/x"\nsource = "me"\n', "utf-8"
    )
    made = recipe_of(request(Models.discover([tmp_path]).model("mine")))
    assert left_out(made)["--moe-backend"].startswith("the activation of the experts is unknown")
    assert flags(made)["--linear-backend"] == "flashinfer_b12x"
    assert len([note for note in made.notes if "unknown" in note]) == 3


def test_a_profile_that_does_not_serve_a_layer_of_the_model_is_refused() -> None:
    narrow = served("0.24.0", refused={"fp8-linear": "no 'flashinfer_b12x' kernel exists"})
    with pytest.raises(UsageError, match="does not serve fp8-linear layers") as failure:
        recipe_of(request(served=narrow))
    assert "quant_algo=FP8" in str(failure.value)
    assert "marlin" in failure.value.hint
    assert recipe_of(request("qwen3-30b-a3b", served=narrow))


@pytest.mark.parametrize(
    ("model", "releases"),
    [("qwen3.6-35b-a3b", ("0.23.0", "0.33.0")), ("nemotron-3-nano-w4a16", ("0.25.0", "0.33.0"))],
)
def test_w4a16_experts_keep_their_activations(model: str, releases: tuple[str, ...]) -> None:
    for vllm in releases:
        recipe = recipe_of(request(model, served=served(vllm, interface=interface(vllm))))
        assert "rounds the activations of W4A16 experts to FP4" in left_out(recipe)["--moe-backend"]
        chosen = linted_recipe(request(model, chosen=("moe-backend=FLASHINFER-B12X",)))
        assert len([note for note in chosen.notes if "rounds the activations" in note]) == 1
        assert "--moe-backend" not in left_out(chosen)


@pytest.mark.parametrize(
    ("model", "vllm", "text", "why"),
    [
        ("nemotron-3-super", "0.24.0", "moe-backend=flashinfer_b12x", "the model's have relu2"),
        ("nemotron-3-super", "0.24.0", "moe-backend=FlashInfer-B12X", "the model's have relu2"),
        ("gemma-4-31b", "0.33.0", "moe-backend=flashinfer_b12x", "has no NVFP4 experts"),
        ("gpt-oss-120b", "0.33.0", "moe-backend=flashinfer_b12x", "has no NVFP4 experts"),
        ("gpt-oss-120b", "0.33.0", "linear-backend=marlin", "has no linear layers of these kinds"),
    ],
)
def test_what_does_not_suit_the_model_cannot_be_set(
    model: str, vllm: str, text: str, why: str
) -> None:
    with pytest.raises(UsageError, match=f"--set {text}: .*{why}") as refused:
        recipe_of(request(model, chosen=(text,), served=served(vllm, interface=interface(vllm))))
    assert text in refused.value.hint


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("nemotron-3-super", "moe-backend=marlin"),
        ("gpt-oss-120b", "moe-backend=marlin"),
        ("gemma-4-31b", "linear-backend=flashinfer_b12x"),
        ("qwen3.6-35b-a3b", "linear-backend=flashinfer_b12x"),
    ],
)
def test_what_suits_the_model_can_be_set_and_is_not_left_out(model: str, text: str) -> None:
    old = served("0.24.0", interface=interface("0.24.0"))
    recipe = recipe_of(request(model, chosen=(text,), served=old))
    name, value = f"--{text}".split("=")
    assert flags(recipe)[name] == value
    assert name not in left_out(recipe)


def test_an_unknown_activation_does_not_refuse_what_the_user_sets(tmp_path: Any) -> None:
    (tmp_path / "mine.toml").write_text(
        'summary = "x"\n[id]\nvalue = "me/x"\nsource = "me"\n'
        '[[holds]]\nkind = "nvfp4-moe"\nsource = "me"\n', "utf-8"
    )  # fmt: skip
    mine = Models.discover([tmp_path]).model("mine")
    assert "--moe-backend" in left_out(recipe_of(request(mine)))
    recipe = recipe_of(request(mine, chosen=("moe-backend=flashinfer_b12x",)))
    assert flags(recipe)["--moe-backend"] == "flashinfer_b12x"


CHANGED = ("flashinfer-b12x-moe-barrier", "flashinfer-w4a16-store-wait", "vllm-b12x-experts-scales")


@pytest.mark.parametrize(
    ("model", "changed", "patched"),
    [
        ("nemotron-3-super", CHANGED, True),
        ("gpt-oss-120b", CHANGED, False),
        ("gpt-oss-120b", ("vllm-b12x-backend", "flashinfer-b12x"), False),
        ("gemma-4-31b", CHANGED, False),
        ("gemma-4-31b", (*CHANGED, "flashinfer-b12x-store-wait"), True),
        ("gemma-4-31b", (*CHANGED, "some-other-layer"), True),
        ("qwen3.6-35b-a3b", CHANGED, False),
    ],
)
def test_an_image_is_patched_only_for_the_kernels_that_a_recipe_uses(
    model: str, changed: tuple[str, ...], patched: bool
) -> None:
    recipe = recipe_of(request(model, served=served(changed=changed)))
    assert bool(recipe.image.build) == bool(recipe.image.mod) == patched
    if patched:
        assert recipe.image.ref == "spark-build/b12x-full:0.33.0"
    else:
        assert recipe.image.ref == "vllm/vllm-openai:v0.33.0"
        assert any("the official image serves the same" in note for note in recipe.notes)
    mine = served(changed=changed, named_image=True, image="me/x", build="", mod="")
    assert recipe_of(request(model, served=replace(mine, unread=True))).image.ref == "me/x"
    if patched:
        with pytest.raises(UsageError, match="me/x is not patched: b12x-full changes files"):
            recipe_of(request(model, served=mine))
    else:
        assert recipe_of(request(model, served=mine)).image.ref == "me/x"


def test_a_model_without_layers_of_a_profile_gets_none_of_its_variables() -> None:
    known = interface("0.33.0", variables={"VLLM_NVFP4_GEMM_BACKEND": ("flashinfer-b12x",)})
    chosen = served(env={"VLLM_NVFP4_GEMM_BACKEND": "flashinfer-b12x"}, interface=known)
    assert recipe_of(request(served=chosen)).env
    recipe = recipe_of(request("gpt-oss-120b", served=chosen))
    assert not recipe.env, "an unpatched image refuses this value"
    assert "VLLM_NVFP4_GEMM_BACKEND" in left_out(recipe)


@pytest.mark.parametrize(
    ("model", "vllm", "value", "patched"),
    [
        ("nemotron-3-super", "0.19.1", "0", False),
        ("nemotron-3-super", "0.23.0", "0", False),
        ("nemotron-3-super", "0.24.0", "1", True),
        ("nemotron-3-super", "0.27.1", "1", True),
        ("nemotron-3-super", "0.28.0", "0", False),
        ("nemotron-3-nano", "0.23.0", "1", False),
        ("nemotron-3-nano", "0.28.0", "1", False),
    ],
)
def test_fp8_layers_are_marlin_only_where_they_would_have_no_kernel(
    model: str, vllm: str, value: str, patched: bool
) -> None:
    name = "VLLM_TEST_FORCE_FP8_MARLIN"
    marlin = served(
        vllm, name="marlin", env={name: "1"}, flags=(), moe_flags=("--moe-backend", "marlin"),
        interface=interface(vllm, variables={name: ()}), changed=("vllm-marlin-fp8",),
    )  # fmt: skip
    recipe = recipe_of(request(model, served=marlin))
    assert recipe.variables(recipe.nodes[0])[name] == value
    assert flags(recipe)["--moe-backend"] == "marlin"
    assert bool(recipe.image.build) == patched


def test_a_model_without_a_file_gets_a_recipe_that_says_so() -> None:
    model = Models.discover().model_or_generic("me/Some-Model_X")
    recipe = recipe_of(request(model))
    assert (recipe.model, recipe.id) == ("some-model-x", "me/Some-Model_X")
    assert recipe.notes[0].startswith("unverified: spark-build has no file of this model")
    assert "--models DIR" in recipe.notes[0]
    assert recipe.made_by.startswith("spark-build recipe me/Some-Model_X --profile")
    near = Models.discover().model_or_generic("nvidia/Qwen3-30B-A3B-NVFP")
    assert "did you mean 'nvidia/Qwen3-30B-A3B-NVFP4'" in recipe_of(request(near)).notes[0]
    assert Models.discover().model_or_generic("nvidia/Qwen3-30B-A3B-NVFP4").name == "qwen3-30b-a3b"
    for name in ("nothing", "me/..", "me/x/y", "me/$(x)", "/etc/x", "me/x\n"):
        with pytest.raises(UsageError, match="unknown model"):
            Models.discover().model_or_generic(name)


def test_measurements_are_those_of_the_selected_kernels() -> None:
    def profiles(model: str) -> set[str | None]:
        return {one.profile for one in recipe_of(request(model)).measured}

    assert profiles("nemotron-3-nano") == {"b12x-full"}
    assert profiles("qwen3.6-35b-a3b") == {None}


@pytest.mark.parametrize("model", ["gpt-oss-120b", "gemma-4-31b"])
def test_no_recipe_leaves_the_share_of_the_memory_to_vllm(model: str) -> None:
    recipe = recipe_of(request(model))
    assert flags(recipe)["--gpu-memory-utilization"] == "0.85"
    assert "--gpu-memory-utilization" not in flags(
        recipe_of(request(model, chosen=("gpu-memory-utilization=",)))
    )


def test_experts_that_the_profiles_flag_is_refused_for_are_left_to_vllm() -> None:
    narrow = served(refused={"w4a16-moe": "'FLASHINFER_B12X' does not support"})
    made = recipe_of(request("nemotron-3-nano-w4a16", served=narrow))
    assert "--moe-backend" not in flags(made)
    assert "refuses it for w4a16-moe layers" in left_out(made)["--moe-backend"]
    assert "--moe-backend" in flags(recipe_of(request("nemotron-3-nano", served=narrow)))


@pytest.mark.parametrize("vllm", ["0.16.0", "0.16.0rc2", "0.9.2", "0.16.9+cu130"])
def test_a_release_that_no_profile_was_tested_with_is_refused(vllm: str) -> None:
    with pytest.raises(UsageError, match=r"are for vLLM 0\.17\.0 and later, and this is"):
        served_profile("marlin", vllm, None)


@pytest.mark.parametrize("vllm", ["0.17.0", "0.17.0rc1", "0.33.0", "0.1.dev1+gabc"])
def test_other_releases_are_not_too_old(vllm: str) -> None:
    refuse_old(vllm, "me/x has", "")


def test_a_release_that_is_too_old_for_the_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"gemma-4-31b needs vLLM >=0.19.0, and this is"):
        recipe_of(request("gemma-4-31b", served=served("0.18.1")))


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("max-model-len=1000", "--max-model-len", "1000"),
        ("--max_model_len=1000", "--max-model-len", "1000"),
        ("enforce-eager", "--enforce-eager", None),
        ("moe-backend=marlin", "--moe-backend", "marlin"),
        ("VLLM_NVFP4_MOE_BACKEND=marlin", "--moe-backend", "marlin"),
        ("VLLM_TEST_FORCE_FP8_MARLIN=1", "--linear-backend", "marlin"),
        ("-tp=1", "--tensor-parallel-size", "1"),
    ],
)
def test_what_the_user_sets_wins(text: str, name: str, value: str | None) -> None:
    made = recipe_of(request(chosen=(text,)))
    found = {
        (served_flag.names[0] if served_flag else n): v
        for n, v in flags(made).items()
        for served_flag in [interface("x").flag(n)]
    }
    assert found[name] == value
    assert len(found) == len(made.flags)  # none twice


def test_an_empty_value_takes_it_out() -> None:
    made = recipe_of(request(chosen=("trust-remote-code=", "CUTE_DSL_ARCH=")))
    assert "--trust-remote-code" not in flags(made)
    assert not made.env


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu-memory-utilization=2", "takes a fraction of 1, not 2"),
        ("gpu-memory-utilization=0", "takes a fraction of 1, not 0"),
        ("gpu-memory-utilization=nan", "takes a fraction of 1, not nan"),
        ("model=x", "it cannot be set here, because other parts of the recipe repeat it"),
        ("tensor-parallel-size=4", "that needs 4 GPUs, and topology solo has 1 GPU for a server"),
        ("-tp=2", "that needs 2 GPUs"),
        ("pipeline_parallel_size=2", "that needs 2 GPUs"),
        ("max-model-lenn=1", "did you mean '--max-model-len'?"),
        ("moe-backend=b12", "--moe-backend of vLLM 0.33.0 has no value 'b12'"),
        ("enforce-eager=yes", "takes no value"),
        ("VLLM_HOST_IPP=1", "did you mean 'VLLM_HOST_IP'?"),
        ("VLLM_HOST_IP", "a variable needs a value"),
        ("VLLM_NVFP4_GEMM_BACKEND=b13x", "does not read the variable VLLM_NVFP4_GEMM_BACKEND"),
        ("max-num-seqs=", "the recipe has no --max-num-seqs to remove"),
        ("reasoning-parser=qwen33", "no parser 'qwen33' for --reasoning-parser; did you mean"),
        ("tool-call-parser=super_v3", "no parser 'super_v3' for --tool-call-parser"),
    ],
)
def test_what_the_release_does_not_take_cannot_be_set(text: str, message: str) -> None:
    with pytest.raises(UsageError) as failure:
        recipe_of(request(chosen=(text,)))
    assert message in str(failure.value)


@pytest.mark.parametrize(
    ("topology", "chosen", "needed"),
    [
        ("tp2", ("pipeline-parallel-size=2", "tensor-parallel-size=1"), 0),
        ("tp2", ("tensor-parallel-size=2",), 0),
        ("tp2", ("tensor-parallel-size=4",), 4),
        ("tp2", ("pipeline-parallel-size=2",), 4),
        ("tp2", ("data-parallel-size=2",), 4),
        ("two-solos", ("tensor-parallel-size=2",), 2),
        ("two-solos", ("tensor-parallel-size=1",), 0),
    ],
)
def test_the_gpus_of_the_topology_are_enough(
    topology: Any, chosen: tuple[str, ...], needed: int
) -> None:
    more = {"addresses": TWO["addresses"]} if topology == "two-solos" else TWO
    asked = request(place=Place(topology=topology, **more), chosen=chosen)
    if not needed:
        assert recipe_of(asked)
        return
    with pytest.raises(UsageError, match=f"needs {needed} GPUs, and topology {topology} has"):
        recipe_of(asked)


@pytest.mark.parametrize(
    ("vllm", "chosen"),
    [
        ("0.33.0", ("reasoning-parser=qwen3",)),
        ("0.33.0", ("reasoning-parser=mine", "reasoning-parser-plugin=/app/mine.py")),
        ("0.33.0", ("reasoning-parser-plugin=/app/mine.py", "reasoning-parser=mine")),
        ("0.20.1", ("reasoning-parser=super_v3",)),  # which the checkpoint brings
    ],
)
def test_a_parser_that_is_there_can_be_set(vllm: str, chosen: tuple[str, ...]) -> None:
    has = () if vllm == "0.20.1" else ("qwen3", "nemotron_v3")
    there = served(vllm, interface=interface(vllm, reasoning_parsers=has))
    made = recipe_of(request(served=there, chosen=chosen))
    wanted = next(c for c in chosen if c.startswith("reasoning-parser="))
    assert flags(made)["--reasoning-parser"] == wanted.partition("=")[2]


def test_draft_tokens_are_for_those_who_ask() -> None:
    assert "--speculative-config" not in flags(recipe_of(request()))
    value = flags(recipe_of(request(speculate=True)))["--speculative-config"]
    assert json.loads(value or "") == {
        "method": "mtp", "num_speculative_tokens": 3, "moe_backend": "triton",
    }  # fmt: skip
    with pytest.raises(UsageError, match="nemotron-3-nano is not known to draft tokens"):
        recipe_of(request("nemotron-3-nano", speculate=True))
    with pytest.raises(UsageError, match=r"with vLLM >=0.19.0, and this is 0.17.1"):
        recipe_of(request(served=served("0.17.1"), speculate=True))


# --------------------------------------------------------------------------------- topologies


def test_two_nodes_without_ray() -> None:
    made = recipe_of(request(place=Place(topology="tp2", **TWO)))
    head, other = (made.command(node) for node in made.nodes)
    assert "--tensor-parallel-size 2" in " ".join(head)
    assert " ".join(head).endswith(
        "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29501"
    )
    assert " ".join(other).endswith(
        "--node-rank 1 --master-addr 10.0.0.1 --master-port 29501 --headless"
    )
    for node in made.nodes:
        assert made.variables(node) == {
            "CUTE_DSL_ARCH": "sm_121a", "GLOO_SOCKET_IFNAME": "enp1s0f0np0",
            "NCCL_SOCKET_IFNAME": "enp1s0f0np0", "VLLM_HOST_IP": node.address,
        }  # fmt: skip


def test_ray_only_where_there_is_ray() -> None:
    place = Place(topology="tp2-ray", **TWO)
    with pytest.raises(UsageError, match=r"vLLM 0.33.0 does not include Ray") as failure:
        recipe_of(request(place=place))
    assert "--topology tp2" in failure.value.hint
    made = recipe_of(request(place=place, served=served(has_ray=True)))
    assert flags(made)["--distributed-executor-backend"] == "ray"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            Place(topology="tp2", interface="x"),
            r"two nodes on the fast link, as `ip -4 addr` shows them, not 0",
        ),
        (Place(topology="tp2", addresses=("a", "b")), "needs the network interface"),
        (Place(topology="tp2", addresses=("a", "a"), interface="x"), "both nodes have"),
        (Place(topology="two-solos", addresses=("a",)), "not 1"),
        (Place(topology="solo", addresses=("a",)), "are for several nodes"),
        (Place(topology="two-solos", addresses=("a", "b\nrm -rf /")), "not an IP address"),
        (Place(topology="tp2", addresses=("a", "b; c"), interface="x"), "not an IP address"),
        (
            Place(topology="tp2", addresses=("a", "b"), interface="eth 0"),
            "not the name of a network",
        ),
    ],
)
def test_addresses_are_asked_for_and_not_guessed(place: Place, message: str) -> None:
    with pytest.raises(UsageError) as failure:
        recipe_of(request(place=place))
    assert message in str(failure.value)


def test_an_image_that_was_not_looked_at_is_a_note() -> None:
    mine = served(image="me/x:1", named_image=True, unread=True, build="", mod="")
    made = recipe_of(request(served=mine))
    assert "me/x:1 was not checked: it must contain b12x-full on vLLM 0.33.0" in made.notes
    assert "--release 0.33.0 --image me/x:1" in made.made_by
    assert not [note for note in recipe_of(request()).notes if "looked at" in note]


def test_an_image_that_lacks_the_patches_is_refused() -> None:
    refuse_unpatched("me/x:1", "marlin", [])
    with pytest.raises(UsageError, match="me/x:1 is not patched") as failure:
        refuse_unpatched("me/x:1", "b12x-full", ["flashinfer-b12x-moe"])
    assert "--base me/x:1" in failure.value.hint


def test_the_command_that_makes_it_again() -> None:
    place = Place(topology="tp2", **TWO)
    made = recipe_of(request(place=place, chosen=("max-num-seqs=4",), port=9000))
    assert made.made_by == (
        "spark-build recipe nemotron-3-super --profile b12x-full --release 0.33.0 --topology tp2 "
        "--address 10.0.0.1 --address 10.0.0.2 --interface enp1s0f0np0 --port 9000 "
        "--set max-num-seqs=4"
    )


def test_every_replacement_names_its_source() -> None:
    assert "VLLM_NVFP4_GEMM_BACKEND" in replaced()
    assert all(one.source.startswith("vllm/envs.py") for one in replaced().values())


@pytest.mark.parametrize("text", ["port=99", "host=127.0.0.1", "served-model-name=x"])
def test_flags_that_the_recipe_repeats_elsewhere_are_not_set(text: str) -> None:
    with pytest.raises(
        UsageError, match="it cannot be set here, because other parts of the recipe repeat it"
    ):
        recipe_of(request(chosen=(text,)))


@pytest.mark.parametrize(
    ("topology", "nodes", "flag"),
    [("pp3", 3, "--pipeline-parallel-size"), ("tp4", 4, "--tensor-parallel-size")],
)
def test_one_model_over_three_or_four_sparks(topology: Any, nodes: int, flag: str) -> None:
    addresses = tuple(f"10.0.0.{n}" for n in range(nodes))
    place = Place(topology=topology, addresses=addresses, interface="enp1s0f0np0")
    recipe = recipe_of(request(place=place))
    assert flags(recipe)[flag] == str(nodes)
    assert [node.address for node in recipe.nodes] == list(addresses)
    words = [recipe.command(node) for node in recipe.nodes]
    for rank, command in enumerate(words):
        assert command[command.index("--nnodes") + 1] == str(nodes)
        assert command[command.index("--node-rank") + 1] == str(rank)
        assert command[command.index("--master-addr") + 1] == addresses[0]
        assert ("--headless" in command) == bool(rank)
    files = rendered(recipe, "docker")
    assert list(files) == [f"run-{rank}.sh" for rank in range(nodes)]
    with pytest.raises(UsageError, match=f"addresses of .* nodes .* not {nodes - 1}") as missing:
        recipe_of(request(place=replace(place, addresses=addresses[1:])))
    assert missing.value.hint == "--address OTHER"
    with pytest.raises(UsageError, match=r"two nodes have the address 10\.0\.0\.0"):
        recipe_of(request(place=replace(place, addresses=(addresses[0], *addresses[:-1]))))
    for form in ("sparkrun", "eugr", "kubernetes"):
        with pytest.raises(UsageError, match=f"cannot describe topology {topology}"):
            rendered(recipe, form)
