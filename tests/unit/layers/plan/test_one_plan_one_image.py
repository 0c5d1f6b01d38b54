"""Everything that an image's bytes depend on is in its plan's digest, and nothing else is used."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.values import canonical_json, sha256_hex
from builder.common import paths
from builder.common.plan import PLAN_SCHEMA
from builder.common.programs import APPLIER, VERIFIER
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.diagnose.entries import load_entries
from builder.errors import UsageError
from builder.images.bases.identify import identify
from builder.images.engines import devicedata
from builder.images.engines import maker as maker_module
from builder.images.engines.baked import read_plan
from builder.images.engines.maker import maker, programs, written
from builder.images.engines.model import BuildRequest
from builder.images.engines.oci import OciEngine
from builder.images.subject import BaseRequest
from builder.layers.catalog import Expectation, Profile, Selection
from builder.layers.planner import make_plan
from builder.pipeline.rebuild import replan
from builder.probes import TERMS
from builder.publishing.subject import Baked
from tests.unit.fakes import (
    BACKEND,
    FakeSources,
    copy_op,
    env_op,
    fake_base,
    make_layer,
    vllm_files,
)
from tests.unit.imagefiles import CONFIG, SITE, Item, put_vllm
from tests.unit.plans import PULL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from builder.common.plan import BuildPlan

LINE = Expectation(when={}, kind="nvfp4-linear", line="MarlinNvFp4LinearKernel")
PROFILE = Profile(
    name="test", summary="", layers=(), image="", pypi="", pins={}, needs={}, needs_reason="",
    expect=(LINE,),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a plan is made of: a base in a layout, layers and a profile, and options."""

    folder: Path
    edit: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(BACKEND))
    file: bytes = b"N = 1\n"
    variable: str = "marlin"
    profile: Profile = PROFILE
    single_layer: bool = False
    base: tuple[Item, ...] = ()
    user: str = ""

    def __call__(self, then: Callable[[], object] = lambda: None) -> tuple[str, str]:
        """Plan and build; ``then`` comes between.  Gives the digests of plan and image."""
        shutil.rmtree(self.folder, ignore_errors=True)
        base = self.folder / "base"
        put_vllm(base, items=self.base, config={**CONFIG, "User": self.user})
        found = identify(BaseRequest(ref=Ref(f"oci:{base}"), pins={}, index=PackageIndex()))
        layers = (
            make_layer("fix", self.edit, copy_op("vllm/new.py", self.file)),
            make_layer("set", env_op("VLLM_NVFP4_GEMM_BACKEND", self.variable)),
        )
        selection = Selection(layers, (self.profile,))
        try:
            plan = make_plan(found, selection, FakeSources(), single_layer=self.single_layer)
            then()
            plan = self.said(plan)
            request = BuildRequest(plan=plan, tag="x:1", output=self.folder / "out", base=found)
            return plan.digest, OciEngine().build(request).digest
        finally:
            found.close()

    def said(self, plan: BuildPlan) -> BuildPlan:
        """The plan with what is told to people; none here."""
        return plan


class Talkative(Asked):
    """Hints and reports on pull requests, which change from day to day."""

    def said(self, plan: BuildPlan) -> BuildPlan:
        return dataclasses.replace(plan, hints=("a newer release is out",), pulls=(PULL,))


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of what spark-build itself puts into images; it is the one that is used."""
    own = paths.package_file()
    for name in ("applier", "probes", "data"):
        shutil.copytree(own / name, tmp_path / "tool" / name)
    for name in TERMS:
        shutil.copy(paths.project_file(name), tmp_path / name)
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "tool")
    forget()
    yield tmp_path / "tool"
    forget()


def forget() -> None:
    """Read the tool's own files anew, as another process does."""
    for cached in (
        maker,
        written,
        programs,
        load_entries,
        devicedata._kernels,
        devicedata._markers,
    ):
        cached.cache_clear()
    for program in (APPLIER, VERIFIER):
        for name in ("sources", "data", "digest"):
            vars(program).pop(name, None)


def edited(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def at_another_time(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("SOURCE_DATE_EPOCH", "1234567890")


def by_another_version(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(maker_module, "__version__", "99.0")


def with_another_program(tool: Path, _: pytest.MonkeyPatch) -> None:
    edited(tool / "probes" / "spark_verify.py", "import json", "import json  # the same")


def with_another_applier(tool: Path, _: pytest.MonkeyPatch) -> None:
    edited(tool / "applier" / "values.py", "import json", "import json  # the same")


def with_another_kernel(tool: Path, _: pytest.MonkeyPatch) -> None:
    edited(tool / "data" / "kernels.toml", "marlin::Marlin<", "marlin::Other<")


def with_another_line_to_look_for(tool: Path, _: pytest.MonkeyPatch) -> None:
    edited(tool / "data" / "diagnose" / "no-kernel-image.toml", "A compiled", "Some compiled")


def with_another_notice(tool: Path, _: pytest.MonkeyPatch) -> None:
    edited(tool.parent / "NOTICE", "Copyright 2026", "Copyright 2026-2027")


@pytest.mark.parametrize(
    "change",
    [
        at_another_time, by_another_version, with_another_program, with_another_applier,
        with_another_kernel, with_another_line_to_look_for, with_another_notice,
    ],
)  # fmt: skip
def test_another_version_or_time_gives_another_plan_and_image(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    tool: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, image = Asked(tmp_path / "one")()
    change(tool, monkeypatch)
    forget()
    other_plan, other_image = Asked(tmp_path / "one")()
    assert other_plan != plan
    assert other_image != image


@pytest.mark.parametrize(
    "change",
    [
        {"edit": {**BACKEND, "new": "BACKEND = 'marlin'"}},
        {"file": b"N = 2\n"},
        {"variable": "cutlass"},
        {"profile": dataclasses.replace(PROFILE, name="other")},
        {"profile": dataclasses.replace(PROFILE, expect=())},
        {"single_layer": True},
        {"base": (Item(f"{SITE}/other.py", b"X = 1\n"),)},
        {"user": "vllm"},
    ],
    ids=["edit", "file", "variable", "profile", "expected", "single-layer", "base", "base-config"],
)
def test_another_request_gives_another_plan_and_image(
    change: dict[str, Any], tmp_path: Path
) -> None:
    plan, image = Asked(tmp_path / "one")()
    other_plan, other_image = Asked(tmp_path / "one", **change)()
    assert other_plan != plan
    assert other_image != image


def test_descriptions_are_in_neither_plan_nor_image(tmp_path: Path) -> None:
    assert Talkative(tmp_path / "one")() == Asked(tmp_path / "one")()


def test_after_the_plan_clock_and_environment_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later() -> None:
        names = [name for name in os.environ if name.startswith("SPARK_BUILD_")]
        for name in {*names, "SPARK_BUILD_PATCHES"} - {"SPARK_BUILD_CACHE"}:
            monkeypatch.setenv(name, "changed")
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "1234567890")
        monkeypatch.setenv("TZ", "Asia/Tokyo")
        monkeypatch.setattr("time.time", lambda: 4e9)
        monkeypatch.setattr("sys.argv", ["spark-build", "image", "--single-layer"])
        monkeypatch.setattr(maker_module, "__version__", "99.0")
        monkeypatch.chdir("/")

    before = Asked(tmp_path / "one")()
    assert Asked(tmp_path / "one")(later) == before


def older_plan() -> dict[str, Any]:
    """A plan as images of the schema before carry it."""
    base = fake_base(vllm_files())
    plan = make_plan(base, Selection((make_layer("fix", BACKEND),), (PROFILE,)), FakeSources())
    body = {**plan.body(), "schema": PLAN_SCHEMA - 1}
    del body["build"]
    digest = f"sha256:{sha256_hex(canonical_json(body))}"
    return {**body, "plan_digest": digest, "hints": []}


def test_an_older_plan_is_still_read() -> None:
    older = older_plan()
    assert read_plan(json.dumps(older).encode(), "image").digest == older["plan_digest"]


def test_an_image_with_an_older_plan_is_not_rebuilt() -> None:
    recorded = read_plan(json.dumps(older_plan()).encode(), "image")
    baked = Baked(version="0.0.9", recorded=recorded, layers=(), files={})
    with pytest.raises(
        UsageError, match=r"made by spark-build 0\.0\.9 with a plan of schema 1"
    ) as no:
        replan(baked, lambda _: pytest.fail("nothing is asked of the base"), None)  # type: ignore[arg-type]
    assert no.value.hint == "spark-build image --layers test --base pypi:vllm==0.20.1"
