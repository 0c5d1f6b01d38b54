"""The registry of recipes: the profile of each model, stale files, images by digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from builder.errors import Exit, NotServed, SparkBuildError, UsageError
from builder.serving import recipefiles
from builder.serving.asked import RecipeRefused
from builder.serving.models import KnownCount, Models
from builder.serving.recipe import selects_for
from builder.serving.recipefiles import (
    FOLDERS,
    MANIFEST,
    MARK,
    Export,
    ExportedRecipes,
    export_recipes,
    images_of,
    make_export,
    may_fit,
    newest_release,
)
from tests.documents import validated

from .served import served

if TYPE_CHECKING:
    from builder.serving.recipe import Recipe, RecipeRequest
    from builder.serving.release import ServedProfile

ROOT = Path(__file__).resolve().parents[3]
SUPER = "recipes/sparkrun/nemotron-3-super.yaml"
DIGEST = "sha256:" + "ab" * 32


def profile(name: str, release: str = "0.33.0", image: str | None = None) -> ServedProfile:
    """A profile as it is served: marlin needs no change of the official image."""
    known: dict[str, Any] = {"name": name, "vllm": release}
    if name == "marlin":
        known |= {
            "env": {}, "flags": ("--linear-backend", "marlin"),
            "moe_flags": ("--moe-backend", "marlin"), "build": "", "mod": "",
            "image": f"vllm/vllm-openai:v{release}",
        }  # fmt: skip
    if image is not None:
        known |= {"image": image, "build": "", "named_image": True}
    return served(**known)


def made(**changed: Any) -> Export:
    """A registry of our models."""
    b12x = served(**changed)
    return make_export(Models.discover(), "0.33.0", [b12x, profile("marlin")])


def export(folder: Path, **changed: Any) -> ExportedRecipes:
    """Export with profiles that are not planned."""
    known: dict[str, Any] = {
        "release": "0.33.0", "directory": folder, "tags": None, "check": False, "served": profile,
    }  # fmt: skip
    return export_recipes(Models.discover(), **{**known, **changed})


def test_every_model_has_both_forms() -> None:
    files = made().files
    names = [
        f"{name}{'' if place.topology == 'solo' else '-tp2'}"
        for name in Models.discover().files
        for place in recipefiles.PLACES
        if may_fit(Models.discover().model(name), place)
    ]
    wanted = {f"{folder}/{name}.yaml" for folder in FOLDERS.values() for name in names}
    assert set(files) == {MANIFEST, *wanted}
    assert all(data.startswith(MARK.encode()) for data in files.values())
    assert made().files == files


@pytest.mark.parametrize(
    ("size", "fits"), [(None, [True, True]), (10**11, [True, True]), (2 * 10**11, [False, True])]
)
def test_a_model_that_does_not_fit_has_no_recipe(size: int | None, fits: list[bool]) -> None:
    model = Models.discover().model("nemotron-3-super")
    known = None if size is None else KnownCount(value=size, source="x")
    model = structs.replace(model, weight_bytes=known)
    assert [may_fit(model, place) for place in recipefiles.PLACES] == fits
    without = {one.model: one.reason for one in made().without}
    assert without["minimax-m3"] == "its weights do not fit into 2 Sparks"


def test_a_model_gets_the_first_profile_that_serves_it() -> None:
    chosen = {one.model: (one.profile, one.mod) for one in made().recipes}
    models = Models.discover()
    others = {name for name in chosen if not selects_for(models.model(name))}
    assert "gpt-oss-120b" in others, "no layer that a profile is about"
    assert {chosen.pop(name) for name in others} == {("marlin", "")}
    assert set(chosen.values()) == {("b12x-full", "sm121-b12x-full-enable")}
    refusing = made(refused={"fp8-linear": "no kernel"})
    assert {one.model: one.profile for one in refusing.recipes}["nemotron-3-super"] == "marlin"


def test_a_model_that_nothing_serves_is_named() -> None:
    old = [profile(name, "0.18.0") for name in recipefiles.PROFILES]
    found = make_export(Models.discover(), "0.18.0", old)
    assert {"gemma-4-31b", "qwen3.6-35b-a3b"} <= {one.model for one in found.without}
    assert "needs vLLM" in found.without[0].reason
    with pytest.raises(UsageError, match="no model has a recipe"):
        make_export(Models.discover(), "0.18.0", [])


def test_a_model_without_a_configuration_is_not_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipefiles, "asked_recipe", None)
    text = 'summary = "x"\n[id]\nvalue = "me/plain"\nsource = "x"\n'
    (tmp_path / "plain.toml").write_text(text)
    models = Models({"plain": tmp_path / "plain.toml"})
    done = export_recipes(
        models, release="0.33.0", directory=tmp_path / "out", tags=None, check=False,
        served=profile, ask=True,
    )  # fmt: skip
    assert {one.model for one in done.recipes} == {"plain"}
    assert "plain: the release was not asked" in capsys.readouterr().err


def test_what_a_release_refuses_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each model with a configuration is asked about, with each profile until one is taken."""
    asked: list[tuple[str, str]] = []

    def taken(request: RecipeRequest, recipe: Recipe) -> Recipe:
        asked.append((recipe.model, recipe.profile))
        if recipe.model == "qwen3-30b-a3b" and recipe.profile == "b12x-full":
            raise RecipeRefused("no b12x")
        if recipe.model == "nemotron-3-super":
            raise RecipeRefused("not at all")
        if recipe.model == "nemotron-3-nano" and recipe.topology == "tp2":
            raise RecipeRefused("576 does not divide")
        return recipe

    monkeypatch.setattr(recipefiles, "asked_recipe", taken)
    done = export(tmp_path, ask=True)
    profiles = {one.model: one.profile for one in done.recipes}
    assert profiles["qwen3-30b-a3b"] == "marlin"
    assert {one.model: one.reason for one in done.without}["nemotron-3-super"] == "not at all"
    assert not (tmp_path / SUPER).exists()
    nano = [one.topology for one in done.recipes if one.model == "nemotron-3-nano"]
    assert nano == ["solo"], "what is refused on two Sparks may start on one"
    assert ("nemotron-3-nano", "tp2: 576 does not divide") in {
        (one.model, one.reason) for one in done.without
    }
    assert capsys.readouterr().err == "", "each model has a configuration"
    assert ("nemotron-3-super", "marlin") in asked
    with pytest.raises(SparkBuildError) as stale:
        export(tmp_path, check=True)
    assert "--ask" not in (stale.value.hint or "")
    assert not export(tmp_path, check=True, ask=True).written


def test_stale_files_are_named_and_mended(tmp_path: Path) -> None:
    assert export(tmp_path).written
    assert not export(tmp_path, check=True).written
    own = tmp_path / "recipes" / "sparkrun" / "own.yaml"
    own.write_text("model: mine\n")
    gone = own.with_name("gone.yaml")
    gone.write_text(f"{MARK}model: a model that is no longer known\n")
    (tmp_path / SUPER).write_text(f"{MARK}edited\n")
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(SparkBuildError) as failed:
        export(tmp_path, check=True)
    assert failed.value.code == Exit.STALE
    assert str(failed.value).endswith(f"{MANIFEST}, recipes/sparkrun/gone.yaml, {SUPER}")
    assert failed.value.hint == (f"spark-build recipes export --release 0.33.0 --in {tmp_path}")
    export(tmp_path)
    assert not export(tmp_path, check=True).written
    assert own.is_file()
    assert not gone.exists()


def test_a_profile_that_the_release_does_not_have_is_passed_over(tmp_path: Path) -> None:
    def only_marlin(name: str, release: str, image: str | None) -> ServedProfile:
        if name != "marlin":
            raise NotServed(f"{name} needs a newer one")
        return profile(name, release, image)

    def nothing(name: str, _release: str, _image: str | None) -> ServedProfile:
        raise NotServed(f"{name} needs a newer one")

    assert {one.profile for one in export(tmp_path, served=only_marlin).recipes} == {"marlin"}
    with pytest.raises(NotServed, match="marlin needs a newer one"):
        export(tmp_path, served=nothing)


@pytest.mark.parametrize("place", ["file/below", "n" * 300])
@pytest.mark.parametrize("check", [True, False])
def test_a_bad_folder_is_named(tmp_path: Path, place: str, check: bool) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SparkBuildError, match=str(tmp_path)) as failed:
        export(tmp_path / place, check=check)
    assert failed.value.code in (Exit.USAGE, Exit.STALE)


def row(**changed: Any) -> dict[str, Any]:
    """An image as ``tags --json`` lists it."""
    return {
        "digest": DIGEST, "tags": [{"tag": "a", "kind": "immutable"}], "plan_digest": None,
        "plans": {"linux/arm64": None}, "version": "0.33.0", "profiles": ["b12x-full"],
        "layers": [], "base": "", "created": None, "published": None, "verified": True,
        "levels": [], "signed": False, "overlay": False, "added_bytes": None, **changed,
    }  # fmt: skip


def listed(folder: Path, *rows: dict[str, Any]) -> Path:
    """What ``tags --json`` printed."""
    document = {"schema": 1, "repository": "ghcr.io/me/vllm", "images": list(rows)}
    path = folder / "tags.json"
    path.write_text(json.dumps(validated("tags", document)))
    return path


def test_published_images_are_named_by_digest(tmp_path: Path) -> None:
    tags = listed(tmp_path, row(), row(digest="sha256:" + "cd" * 32))
    ref = f"ghcr.io/me/vllm@{DIGEST}"
    assert images_of(tags, "0.33.0") == {"b12x-full": ref}
    found = {one.model: one for one in export(tmp_path, tags=tags).recipes}
    assert (found["nemotron-3-super"].container, found["nemotron-3-super"].mod) == (ref, "")
    assert found["gpt-oss-120b"].container == "vllm/vllm-openai:v0.33.0"
    assert {one.topology for one in made().recipes} == {"solo", "tp2"}
    text = (tmp_path / SUPER).read_text()
    assert f'container: "{ref}"' in text
    assert "mods:" not in text
    with pytest.raises(SparkBuildError) as failed:
        export(tmp_path, check=True)
    assert failed.value.code == Exit.STALE


@pytest.mark.parametrize(
    "changed",
    [
        {"verified": False},
        {"verified": None},
        {"overlay": True},
        {"version": "0.32.0"},
        {"profiles": ["b12x-full", "marlin"]},
        {"profiles": ["cutlass-sm12x"]},
        {"plans": {"linux/amd64": None}},
        {"tags": [{"tag": "a-previous", "kind": "previous"}]},
    ],
)
def test_other_images_are_not_taken(tmp_path: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="none of the 1 images"):
        images_of(listed(tmp_path, row(**changed)), "0.33.0")


@pytest.mark.parametrize("text", ["", "[]", "{}", "\xff", '{"images": 3}'])
def test_what_is_no_list_of_tags_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tags.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="is not what `tags --json` prints"):
        images_of(path, "0.33.0")
    with pytest.raises(UsageError, match="cannot read"):
        images_of(tmp_path / "absent", "0.33.0")


def test_the_newest_recorded_release_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    committed = (ROOT / SUPER).read_text()
    assert f"vLLM {newest_release()}" in committed
    monkeypatch.setattr(recipefiles, "in_checkout", lambda: False)
    with pytest.raises(UsageError, match="release is not given"):
        newest_release()
