"""Which layers and profiles exist, and the order in which a selection is applied."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.paths import package_file
from builder.common.reference import NEWEST_VLLM
from builder.errors import SparkBuildError, UsageError
from builder.layers.catalog import Catalog, load_profile, order
from builder.layers.planner import epoch_for, hints, make_plan, refuse_nothing, refuse_plan
from tests.unit.fakes import (
    BACKEND,
    FakeSources,
    copy_op,
    env_op,
    fake_base,
    make_layer,
    make_plan_of,
    vllm_files,
)
from tests.unit.layers.test_layerfile import GOOD
from tests.unit.plans import PULL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from builder.applier.layers import Layer

SHIPPED = Catalog.discover()


def patches(root: Path, *names: str, text: str = GOOD) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "layer.toml").write_text(text)
    return root


# ---------------------------------------------------------------------------------------- shipped


@pytest.mark.parametrize("name", SHIPPED.folders)
def test_a_shipped_layer_loads_and_comes_after_layers_that_exist(name: str) -> None:
    layer = SHIPPED.layer(name)
    assert layer.summary
    assert not layer.summary.endswith(".")
    assert set(layer.after) <= set(SHIPPED.folders)


@pytest.mark.parametrize("name", SHIPPED.profile_files)
def test_a_shipped_profile_loads_and_its_layers_exist(name: str) -> None:
    profile = SHIPPED.profile(name)
    assert profile.layers
    selection = SHIPPED.select([name])
    assert {layer.name for layer in selection.layers} == set(profile.layers)
    assert selection.name == name
    assert profile.pypi.startswith("pypi:vllm==")
    assert profile.image.startswith("docker://")


def test_every_shipped_layer_is_used_by_a_profile() -> None:
    """But for those that are selected by name."""
    used = {layer for name in SHIPPED.profile_files for layer in SHIPPED.profile(name).layers}
    assert set(SHIPPED.folders) - used == {"ray", "vllm-marlin-scales"}


def test_profiles_and_layers_do_not_share_a_name() -> None:
    assert len(set(SHIPPED.names)) == len(SHIPPED.names)


def test_every_shipped_wheel_and_donor_op_is_pinned() -> None:
    for name in SHIPPED.folders:
        layer = SHIPPED.layer(name)
        kinds = {op.kind for op in layer.ops}
        assert bool(layer.pins.wheel) == ("wheel" in kinds), name
        assert bool(layer.pins.donor) == ("graft" in kinds), name


# --------------------------------------------------------------------------------------- discovery


def test_a_user_folder_is_enough(tmp_path: Path) -> None:
    catalog = Catalog.discover([patches(tmp_path, "mine")])
    assert catalog.layer("mine").name == "mine"
    assert set(SHIPPED.folders) < set(catalog.folders)


def test_a_user_layer_replaces_the_shipped_one(tmp_path: Path) -> None:
    root = patches(tmp_path, "marlin-env")
    assert Catalog.discover([root]).layer("marlin-env").summary == "a fix"


def test_directories_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = patches(tmp_path / "1", "a", "both"), patches(tmp_path / "2", "b", "both")
    monkeypatch.setenv("SPARK_BUILD_PATCHES", os.pathsep.join([str(one), str(two)]))
    folders = Catalog.discover().folders
    assert {"a", "b"} <= set(folders)
    assert folders["both"].parent == two
    assert Catalog.discover([one]).folders["both"].parent == one


def test_a_directory_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"patches directory .* does not exist"):
        Catalog.discover([tmp_path / "gone"])


def test_a_folder_of_any_number_of_layers_is_refused(tmp_path: Path) -> None:
    for number in range(1001):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "layer.toml").touch()
    with pytest.raises(UsageError, match="1001 layer folders, and 1000 is the limit"):
        Catalog.discover([tmp_path])


def test_a_malformed_layer_matters_only_when_selected(tmp_path: Path) -> None:
    catalog = Catalog.discover([patches(tmp_path, "broken", text="summary = ")])
    assert catalog.select(["marlin"]).layers
    with pytest.raises(UsageError, match=r"broken/layer\.toml: not valid TOML"):
        catalog.select(["broken"])


# --------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["marlinn"], "unknown layer or profile 'marlinn'; did you mean 'marlin'?"),
        (["marlin,b12x-evn"], "unknown layer or profile 'b12x-evn'; did you mean 'b12x-env'?"),
        (["zzz"], "unknown layer or profile 'zzz'"),
        ([""], "no layer named"),
        ([], "no layer named"),
        ([" , "], "no layer named"),
    ],
)
def test_an_unknown_name_is_an_error(words: Sequence[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        SHIPPED.select(words)
    assert str(caught.value) == message
    assert caught.value.hint == "spark-build layers list"


@pytest.mark.parametrize("kind", ["layer", "profile"])
def test_a_single_unknown_name(kind: str) -> None:
    with pytest.raises(UsageError, match=f"unknown {kind} 'marln'; did you mean 'marlin"):
        getattr(SHIPPED, kind)("marln")


def test_profiles_and_layers_may_be_mixed_and_repeated() -> None:
    once = SHIPPED.select(["b12x-full"])
    again = SHIPPED.select(["b12x-env, b12x-full", "b12x-full"])
    assert again.layers == once.layers
    both = SHIPPED.select(["b12x-full", "marlin"])
    assert both.name == "b12x-full-marlin"
    assert len(both.layers) == len(once.layers) + 2


def test_layers_without_a_profile_name_themselves() -> None:
    assert SHIPPED.select(["marlin-env,b12x-env"]).name == "b12x-env-marlin-env"


# ------------------------------------------------------------------------------------------- order


def named(*specs: tuple[str, int, list[str]]) -> list[Layer]:
    return [make_layer(name, order=band, after=after) for name, band, after in specs]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        pytest.param(named(("b", 1, []), ("a", 1, [])), "ab", id="by-name"),
        pytest.param(named(("a", 2, []), ("b", 1, [])), "ba", id="by-band"),
        pytest.param(named(("a", 1, ["b"]), ("b", 9, [])), "ba", id="after-wins"),
        pytest.param(named(("a", 1, ["gone"]), ("b", 0, [])), "ba", id="after-not-selected"),
        pytest.param(
            named(("a", 1, ["d"]), ("b", 2, []), ("c", 3, []), ("d", 4, [])), "bcda", id="released"
        ),
        pytest.param([], "", id="none"),
    ],
)
def test_order(layers: list[Layer], expected: str) -> None:
    for seed in range(4):
        shuffled = random.Random(seed).sample(layers, len(layers))
        assert "".join(layer.name for layer in order(shuffled)) == expected


@pytest.mark.parametrize(
    "layers",
    [
        named(("a", 1, ["b"]), ("b", 1, ["a"]), ("c", 1, [])),
        named(("a", 1, ["b"]), ("b", 1, ["a"])),
    ],
)
def test_a_cycle_is_an_error(layers: list[Layer]) -> None:
    with pytest.raises(UsageError, match="layers a, b: 'after' forms a cycle"):
        order(layers)


def test_a_layer_after_itself_is_a_cycle() -> None:
    with pytest.raises(UsageError, match="layers a: 'after' forms a cycle"):
        order(named(("a", 1, ["a"])))


# ------------------------------------------------------------------------------- profile and plan


def test_a_profile_refuses_a_base_that_it_does_not_support() -> None:
    selection = SHIPPED.select(["b12x-full"])
    plan = make_plan(fake_base(vllm_files("0.19.0")), selection, FakeSources())
    with pytest.raises(SparkBuildError, match=r"needs vllm >=0\.20\.0rc0; the base has") as e:
        refuse_nothing(plan, selection)
    assert e.value.code == 2


@pytest.mark.parametrize(
    ("matchers", "named"),
    [
        ("", "nothing"),
        ('lines = "Using"', "lines"),
        ('line = "Using"\nselected = "*"', "line, selected"),
    ],
)
def test_an_expectation_has_exactly_one_matcher(matchers: str, named: str, tmp_path: Path) -> None:
    text = package_file("profiles", "marlin.toml").read_text("utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(f'{text}\n[[expect]]\nwhen = {{}}\nkind = "fp8-linear"\n{matchers}\n')
    message = f"mine.toml: an expectation names one of line, selected, refused, not {named}"
    with pytest.raises(UsageError, match=message):
        load_profile(path)


def test_a_profile_expects_lines_by_release() -> None:
    profile = SHIPPED.profile("marlin")
    old, new = ({e.line for e in profile.expected({"vllm": v})} for v in ("0.19.1", "0.20.1"))
    assert "Using MarlinNvFp4LinearKernel for NVFP4 GEMM" in new - old


def test_a_plan_does_not_depend_on_place_or_time() -> None:
    selection = SHIPPED.select(["marlin"])
    files = vllm_files("0.20.1")
    plans = [make_plan(fake_base(files), selection, FakeSources()) for _ in range(2)]
    assert plans[0].digest == plans[1].digest
    assert plans[0].as_json() == plans[1].as_json()
    other = make_plan(fake_base(vllm_files("0.20.2")), selection, FakeSources())
    assert other.digest != plans[0].digest


def test_the_digest_of_a_directory_does_not_depend_on_where_it_is() -> None:
    selection = SHIPPED.select(["marlin"])
    places = ("/a/site-packages", "/b/site-packages")
    bases = [
        fake_base(vllm_files(), "dir", ref=f"dir:{p}", site_packages=p, digest="sha256:0")
        for p in places
    ]
    one, two = (make_plan(base, selection, FakeSources()).digest for base in bases)
    assert one == two


@pytest.mark.parametrize(
    ("op", "code"), [(BACKEND, None), ({"op": "compile"}, 10), ({**BACKEND, "old": "gone"}, 4)]
)
def test_a_plan_that_cannot_be_built_is_refused(op: dict[str, object], code: int | None) -> None:
    plan = make_plan_of(fake_base(vllm_files()), make_layer("fix", op))
    if code is None:
        refuse_plan(plan)
        return
    with pytest.raises(SparkBuildError) as caught:
        refuse_plan(plan)
    assert caught.value.code == code


def test_the_hint_is_for_the_first_layer_that_does_not_fit() -> None:
    """Of two, the first; and for a pull request, what makes a layer of it."""
    first, second = (make_layer(name, {**BACKEND, "old": "gone"}) for name in ("fix", "pr-1"))
    base = fake_base(vllm_files())
    for layers, hint in (
        ((first, second), "spark-build layers show fix"),
        ((second, first), "spark-build layers new NAME --from-pr 'o/r#1'"),
    ):
        plan = make_plan_of(base, *layers)
        with pytest.raises(SparkBuildError) as caught:
            refuse_plan(replace(plan, pulls=(PULL,)))
        assert caught.value.hint == hint
        assert ("adapt the pull request" in str(caught.value)) is (layers[0] is second)


@pytest.mark.parametrize(
    ("created", "seconds"),
    [
        ("1980-12-31T23:59:59Z", 1_767_225_600),
        ("1981-01-01T00:00:00Z", 347_155_200),
        ("2026-02-03T04:05:06.789Z", 1_770_091_506),
        ("yesterday", 1_767_225_600),
    ],
)
def test_the_time_of_files_is_that_of_the_base(created: str, seconds: int) -> None:
    """To the second; a base without a time of its own has that of the newest layer."""
    identity = replace(fake_base(vllm_files()).identity, created=created)
    layers = [make_layer(name, BACKEND) for name in ("fix", "other")]
    days = ("2026-01-01", "2025-12-31")
    layers = [
        replace(layer, provenance={**layer.provenance, "last-update": day})
        for layer, day in zip(layers, days, strict=True)
    ]
    assert epoch_for(identity, layers) == seconds


@pytest.mark.parametrize("state", ["upstream", "applied"])
def test_a_patched_base_does_not_report_that_no_patch_is_needed(state: str) -> None:
    outcome = SimpleNamespace(state=state, changes={}, pending=())
    decisions: Any = [SimpleNamespace(needed=False, outcome=outcome)]
    found = hints(SHIPPED.select(["b12x-full"]), decisions, {"vllm": "0.20.1"})
    said = ["vllm 0.20.1 needs no patch for b12x-full, only settings"]
    assert found == (said if state == "upstream" else [])


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin"), True),
        (BACKEND, False),
        (copy_op("vllm/new.py", b"NEW = 1\n"), False),
    ],
)
def test_a_layer_of_settings_is_no_patch(layer: dict[str, object], said: bool) -> None:
    """It is needed, and changes no file."""
    plan = make_plan_of(fake_base(vllm_files()), make_layer("set", layer))
    assert [decision.needed for decision in plan.decisions] == [True]
    found = hints(SHIPPED.select(["b12x-full"]), [*plan.decisions], {"vllm": "0.20.1"})
    assert bool(found) is said


def test_the_newest_release_of_a_profile() -> None:
    (profile,) = Catalog.discover().select(["b12x-full"]).profiles
    assert profile.newest == NEWEST_VLLM
    assert replace(profile, needs={"vllm": ">=99"}).newest == "0.20.1", "its own base"
    assert replace(profile, needs={"vllm": ">=0.17", "flashinfer-python": ">=0.6"}).newest == (
        NEWEST_VLLM
    )
