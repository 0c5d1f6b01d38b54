"""A layer is necessary when something else fails without it, and nothing less will do."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.receipts import RECEIPTS, STATE_DIR
from builder.applier.trees import Content, DirTree, OverlayTree
from builder.common.document import plain
from builder.errors import SparkBuildError
from builder.images.subject import Subject
from builder.probes.dispatch_expect import Answer
from builder.proof.checks import LEVELS, PROOF_LEVELS
from builder.proof.kernels import Replies, Reply
from builder.proof.necessity import prove, whole
from builder.proof.replies import DispatchReply, DispatchRequest
from builder.proof.run import verify
from builder.proof.runners import (
    link_out,
    net_changes,
    unsetting,
    write_tar,
)
from builder.proof.target import (
    CannotTakeApart,
    Origin,
    VerifyTarget,
    of_backup,
    of_tree,
    without_layers,
)
from builder.ptx.findings import Ran, Run
from tests.unit.fakes import (
    BACKEND,
    FakeRunner,
    FakeSources,
    apply_to,
    copy_op,
    dist_files,
    env_op,
    fake_base,
    identity_of,
    make_layer,
    make_plan_of,
    make_wheel,
    of_files,
    replace_op,
    snapshot,
    subject_of,
    vllm_files,
    write_tree,
)
from tests.unit.plans import planned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import InputPin, Layer
    from builder.applier.trees import Tree
    from builder.proof.checks import Necessity

#: What vLLM says here when the file and the variable are both right.
LINE = "Using MarlinKernel"
SETTING = "VLLM_NVFP4_GEMM_BACKEND"
PATCH = make_layer("patch", BACKEND)
SET = make_layer("set", env_op(SETTING, "marlin"))
IDLE = make_layer("idle", copy_op("vllm/extra.py", b"x = 1\n"))


def answers(tree: Tree, env: Mapping[str, str]) -> FakeRunner:
    """A vLLM that looks at one file and one variable, and a compiler that is never needed."""

    def ask(request: DispatchRequest) -> DispatchReply:
        text = (tree.read("vllm/core.py") or b"").decode()
        good = "b12x" in text and request.env.get(SETTING) == "marlin"
        return _says(LINE if good else "Using cutlass", request)

    return FakeRunner(ask=ask, why="no compiler")


def _says(line: str, request: DispatchRequest) -> DispatchReply:
    answer = Answer(lines=(line,), selected=line)
    return DispatchReply(answers=(answer,) * len(request.ask))


def silent(tree: Tree, env: Mapping[str, str]) -> FakeRunner:
    """No vLLM can be asked here."""
    return FakeRunner(why="no CPU torch")


def target_of(
    *layers: Layer,
    files: Mapping[str, bytes] | None = None,
    asking: Any = answers,
    line: str = LINE,
    patched: bool = True,
    wheels: Sequence[Any] = (),
) -> VerifyTarget:
    """Layers on a small vLLM that is expected to say one line."""
    base = fake_base(files or vllm_files())
    plan = make_plan_of(base, *layers, wheels=wheels)
    tree = OverlayTree(base.tree)
    tree.update(plan.changes if patched else {})
    expect = [{"kind": "nvfp4-linear", "line": line}] if line else []
    return VerifyTarget(
        name="oci:out",
        subject=subject_of(tree, env=plan.env),
        plan=planned(plan, expect=expect),
        layers=layers,
        runner=dataclasses.replace(asking(tree, plan.env), others=asking),
        origin=Origin(subject=base, sources=FakeSources(*wheels)),
    )


def proven(
    target: VerifyTarget, levels: Sequence[str] = ("static", "imports", "dispatch")
) -> dict[str, Necessity]:
    """Verdicts by layer."""
    with whole(target) as (full, apart):
        report = verify(full, levels)
        verdicts = prove(full, apart, report)
    assert [v.layer for v in verdicts] == [layer.name for layer in target.plan.layers]
    return {verdict.layer: verdict for verdict in verdicts}


def words(verdict: Necessity) -> tuple[Any, str, str]:
    """The verdict and the check that proves it."""
    return verdict.necessary, verdict.level, verdict.check


# --------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("patched", [True, False])
def test_each_layer_with_a_failing_check_is_necessary(patched: bool) -> None:
    """A base without any layer is proven as planned."""
    verdicts = proven(target_of(PATCH, SET, IDLE, patched=patched))
    assert words(verdicts["patch"]) == (True, "dispatch", "nvfp4-linear")
    assert words(verdicts["set"]) == (True, "dispatch", "nvfp4-linear")
    assert words(verdicts["idle"]) == (False, "", "")
    shown = plain(verdicts["patch"])
    assert (shown["expected"], shown["seen"]) == (LINE, "Using cutlass")
    assert shown["where"].endswith("without patch")
    assert verdicts["idle"].reason == "no check fails without it (static, imports, dispatch)"


def test_as_planned_says_so() -> None:
    with whole(target_of(PATCH, patched=False)) as (full, _):
        assert full.name == "oci:out as planned"
    with whole(target_of(PATCH)) as (full, _):
        assert full.name == "oci:out"


def test_a_missing_layer_and_an_unset_variable_prove_nothing_by_themselves() -> None:
    """Files alone would call every layer necessary, because it is missed."""
    verdicts = proven(target_of(PATCH, SET, IDLE), ("static", "imports"))
    for verdict in verdicts.values():
        assert words(verdict) == ("unknown", "", "")
        assert "dispatch was not requested (--level dispatch)" in verdict.reason


def test_a_check_that_could_not_run_proves_nothing() -> None:
    for verdict in proven(target_of(PATCH, SET, asking=silent)).values():
        assert words(verdict) == ("unknown", "", "")
        assert "dispatch nvfp4-linear did not run: no CPU torch" in verdict.reason


def test_a_check_that_runs_only_on_the_full_set_proves_nothing() -> None:
    """The files without the layer must have been asked as well."""
    target = target_of(PATCH)
    runner = dataclasses.replace(answers(target.tree, target.env), others=silent)
    target = dataclasses.replace(target, runner=runner)
    target = dataclasses.replace(target, plan=planned(target.plan, expect=EXPECT_DEFAULT))
    verdict = proven(target)["patch"]
    assert verdict.necessary == "unknown"
    assert "did not run: no CPU torch" in verdict.reason


EXPECT_DEFAULT = [{"kind": "nvfp4-linear", "line": "Using cutlass"}]


def test_codegen_is_suggested_if_kernels_are_compiled_at_run_time() -> None:
    def b12x(tree: Tree, env: Mapping[str, str]) -> FakeRunner:
        return FakeRunner(ask=lambda request: _says("Using b12x", request), why="no compiler")

    verdict = proven(target_of(IDLE, asking=b12x, line="Using b12x"))["idle"]
    assert verdict.necessary == "unknown"
    assert verdict.reason.endswith("but codegen was not requested (--level codegen)")
    asked = proven(target_of(IDLE, asking=b12x, line="Using b12x"), PROOF_LEVELS)["idle"]
    assert asked.necessary == "unknown"
    assert "but codegen NVFP4 warp MMA did not run: no compiler" in asked.reason


KERNEL = {"vllm/kernel.py": b"@cute.kernel\ndef scatter():\n    read()\n"}
READ, WAIT = "    read()", "    wait()\n    read()"
BARRIER = make_layer("barrier", replace_op(READ, WAIT, "vllm/kernel.py"))


def kernels(tree: Tree, env: Mapping[str, str]) -> FakeRunner:
    """A kernel that gives wrong values unless it waits; which one is selected, nobody asks."""
    right = b"wait()" in (tree.read("vllm/kernel.py") or b"")
    run = Run(launch="scatter", schedule="lazy", values=4, wrong=0 if right else 2, said="2 wrong")
    ran = Ran(kernel="scatter", ptx="f" * 64, blocks=1, runs=(run,))

    def launch(request: Mapping[str, Any]) -> Replies:
        reply = Reply(error="", stage="", ran=(ran,))
        return Replies(replies=(reply,) * len(request["kernels"]), versions={}, simulated=())

    def ask(request: DispatchRequest) -> DispatchReply:
        return _says("Using b12x", request)

    return FakeRunner(ask=ask, launcher=launch)


def of_a_kernel(*layers: Layer) -> VerifyTarget:
    """Layers on a release that selects b12x and has a kernel's source."""
    return target_of(*layers, files={**vllm_files(), **KERNEL}, asking=kernels, line="Using b12x")


def test_a_layer_that_makes_a_kernel_right_is_necessary_by_its_values() -> None:
    verdicts = proven(of_a_kernel(BARRIER, IDLE), ("dispatch", "numbers"))
    assert words(verdicts["barrier"])[:2] == (True, "numbers")
    assert "wrong values in 1 run of 1 (lazy)" in verdicts["barrier"].seen
    assert verdicts["idle"].necessary == "unknown", "codegen was not requested"


def test_numbers_is_suggested_only_for_kernel_sources() -> None:
    """The values of a kernel hang on its source, and no other level looks at them."""
    verdicts = proven(of_a_kernel(BARRIER, IDLE), ("dispatch",))
    said = "but numbers was not requested (--level numbers)"
    assert said in verdicts["barrier"].reason
    assert said not in verdicts["idle"].reason
    assert {verdict.necessary for verdict in verdicts.values()} == {"unknown"}


def test_a_failing_full_set_proves_nothing() -> None:
    for verdict in proven(target_of(PATCH, SET, line="Using trtllm")).values():
        assert words(verdict) == ("unknown", "", "")
        assert verdict.reason == "verification of the full set already fails: dispatch nvfp4-linear"


def test_a_layer_that_changes_nothing_is_not_checked_again() -> None:
    verdicts = proven(target_of(PATCH, SET, make_layer("other", package="sglang")))
    assert verdicts["other"].necessary is False
    assert verdicts["other"].state == "not-applicable"
    assert "it changes nothing here (not-applicable)" in verdicts["other"].reason


def test_a_change_in_the_base_is_not_removed() -> None:
    files = vllm_files()
    files["vllm/core.py"] = files["vllm/core.py"].replace(b"cutlass", b"b12x")
    files = dist_files("vllm", "0.20.1", _modules(files))
    verdicts = proven(target_of(PATCH, SET, files=files))
    assert verdicts["patch"].state == "applied"
    assert verdicts["patch"].necessary is False
    assert verdicts["patch"].reason.startswith("nothing changes without it")
    assert verdicts["set"].necessary is True


def _modules(files: Mapping[str, bytes]) -> dict[str, str | bytes]:
    return {path: data for path, data in files.items() if ".dist-info/" not in path}


# ------------------------------------------------------------------------- layers on other layers

FIRST = make_layer("first", copy_op("vllm/new.py", b"STATE = 'raw'\n"), order=10)
SECOND = make_layer("second", replace_op("raw", "b12x", "vllm/new.py"), after=["first"], order=20)


def looks_at(tree: Tree, env: Mapping[str, str], path: str = "vllm/new.py") -> FakeRunner:
    """A vLLM for which only what the second layer does matters."""

    def ask(request: DispatchRequest) -> DispatchReply:
        good = b"b12x" in (tree.read(path) or b"")
        return _says(LINE if good else "Using cutlass", request)

    return FakeRunner(ask=ask)


def test_a_layer_that_a_necessary_one_builds_on_is_necessary() -> None:
    verdicts = proven(target_of(FIRST, SECOND, asking=looks_at))
    assert words(verdicts["second"]) == (True, "dispatch", "nvfp4-linear")
    assert words(verdicts["first"]) == (True, "static", "layer second")
    assert verdicts["first"].seen.startswith("drift: ")
    assert verdicts["first"].reason == "layer second builds on it"


def test_a_layer_that_only_an_unnecessary_one_builds_on_is_not() -> None:
    verdicts = proven(target_of(PATCH, SET, FIRST, SECOND))
    assert [verdicts[name].necessary for name in ("first", "second")] == [False, False]
    assert [verdicts[name].necessary for name in ("patch", "set")] == [True, True]


def test_a_layer_that_needs_the_package_of_another() -> None:
    """Without the wheel the package is not there, and its layer does not apply."""
    wheel = make_wheel("lib", "2.0", {"lib/__init__.py": "STATE = 'raw'\n"})
    brings = make_layer(
        "brings", {"op": "wheel", "distribution": "lib", "version": "2.0"}, wheels=[wheel], order=10
    )
    edits = make_layer(
        "edits", replace_op("raw", "b12x", "lib/__init__.py"), package="lib", order=20
    )

    asking = partial(looks_at, path="lib/__init__.py")
    verdicts = proven(target_of(brings, edits, asking=asking, wheels=[wheel]))
    assert words(verdicts["edits"]) == (True, "dispatch", "nvfp4-linear")
    assert words(verdicts["brings"]) == (True, "static", "layer edits")
    assert "not-applicable: lib is not in the base" in verdicts["brings"].seen


# ------------------------------------------------------------------------------- what is in the way


def test_a_target_without_receipts_is_unknown() -> None:
    target = dataclasses.replace(target_of(PATCH, SET), origin=None)
    for verdict in proven(target).values():
        assert words(verdict) == ("unknown", "", "")
        assert verdict.reason == "the contents of this target are unknown"


def test_a_target_without_an_available_base_is_unknown() -> None:
    class Gone(Origin):
        def before(self) -> Subject:
            raise SparkBuildError("image base is not there", hint="docker pull base")

    target = target_of(PATCH, SET)
    target = dataclasses.replace(target, origin=Gone(subject=target.subject, sources=FakeSources()))
    for verdict in proven(target).values():
        assert verdict.reason == "image base is not there; try: docker pull base"


def test_a_target_that_differs_from_its_layers_is_unknown() -> None:
    """An edit that static does not see would be taken away together with any layer."""
    target = target_of(PATCH, SET)
    other = OverlayTree(target.tree)
    files = {"vllm/core.py": b"BACKEND = 'b12x'  # by hand\n"}
    other.update({path: _content(data) for path, data in files.items()})
    verdicts = proven(of_files(target, other), ("dispatch",))
    for verdict in verdicts.values():
        assert verdict.necessary == "unknown"
        assert verdict.reason.startswith("vllm/core.py does not match the output of these layers")


def _content(data: bytes) -> Any:
    return Content.of(data)


class FailingSources(FakeSources):
    """An index that does not answer any more."""

    def member(self, pin: InputPin, path: str) -> bytes:
        raise SparkBuildError("the index does not answer")

    def members(self, pin: InputPin) -> Any:
        raise SparkBuildError("the index does not answer")


def test_an_input_that_disappeared_is_unknown() -> None:
    wheel = make_wheel("lib", "2.0", {"lib/__init__.py": ""})
    op = {"op": "wheel", "distribution": "lib", "version": "2.0"}
    target = target_of(PATCH, SET, make_layer("lib", op, wheels=[wheel]), wheels=[wheel])
    origin = Origin(subject=fake_base(vllm_files()), sources=FailingSources())
    for verdict in proven(dataclasses.replace(target, origin=origin)).values():
        assert verdict.necessary == "unknown"
        assert "the index does not answer" in verdict.reason


def test_the_report_carries_the_verdicts() -> None:
    target = target_of(PATCH, SET)
    with whole(target) as (full, apart):
        report = verify(full, ("static", "dispatch"))
        assert "necessity" not in plain(report.document())
        report.necessity = prove(full, apart, report)
    value = plain(report.document())
    assert value["passed"] is True
    assert [(n["layer"], n["necessary"]) for n in value["necessity"]] == [
        ("patch", True),
        ("set", True),
    ]
    keys = {"layer", "state", "necessary", "check", "level", "expected", "seen", "reason"}
    assert all(keys <= n.keys() for n in value["necessity"])


def test_necessity_levels_are_levels() -> None:
    assert set(PROOF_LEVELS) <= set(LEVELS)


# ----------------------------------------------------------------------------- taking targets apart


def patched_directory(root: Path, *layers: Layer) -> Subject:
    """A directory as ``spark-build apply`` leaves it."""
    apply_to(root, *layers)
    tree = DirTree(root)
    env = {"OTHER": "1", SETTING: "marlin"}
    return Subject(identity_of(tree, "dir", site_packages=str(root), env=env), tree)


def test_layers_are_removed_from_a_directory_with_its_backups(site: Path) -> None:
    before = snapshot(site)
    base = patched_directory(site, PATCH, SET, IDLE, make_layer("late", replace_op("b12x", "x")))
    origin = without_layers(base, of_backup(site))
    for path, held in before.items():
        if held is not None:
            assert origin.tree.read(path) == held[2], path
    assert origin.tree.read("vllm/extra.py") is None
    assert origin.tree.children(RECEIPTS) == []
    assert "spark_build_env.pth" not in origin.tree.children("")
    assert origin.identity.env == {"OTHER": "1"}
    assert without_layers(base, of_backup(site), {"A": "b"}).identity.env == {"A": "b"}


def test_missing_originals_are_reported(site: Path) -> None:
    base = patched_directory(site, PATCH)
    for kept in (site / STATE_DIR / "backup").iterdir():
        kept.unlink()
    with pytest.raises(CannotTakeApart, match=r"the original of vllm/core.py is missing"):
        without_layers(base, of_backup(site))


def test_a_replaced_wheel_is_restored(site: Path) -> None:
    """Versions too: the layers are judged again on what the base was."""
    wheel = make_wheel("lib", "2.0", {"lib/__init__.py": "v = 2\n"})
    write_tree(site, dist_files("lib", "1.0", {"lib/__init__.py": "v = 1\n", "lib/old.py": ""}))
    op = {"op": "wheel", "distribution": "lib", "version": "2.0"}
    apply_to(site, make_layer("lib", op, wheels=[wheel]), wheels=[wheel])
    tree = DirTree(site)
    base = Subject(identity_of(tree, "dir"), tree)
    assert base.identity.packages["lib"] == "2.0"
    origin = without_layers(base, of_backup(site))
    assert origin.identity.packages["lib"] == "1.0"
    assert origin.tree.read("lib/old.py") == b""


@pytest.mark.parametrize(("change", "raises"), [(b"", None), (b"x", CannotTakeApart)])
def test_files_of_another_base_are_not_used_as_originals(
    site: Path, change: bytes, raises: type[Exception] | None
) -> None:
    files = vllm_files()
    base = patched_directory(site, PATCH)
    former = fake_base({**files, "vllm/core.py": files["vllm/core.py"] + change})
    with pytest.raises(raises) if raises else nullcontext():
        origin = without_layers(base, of_tree(former.tree))
        assert origin.tree.read("vllm/core.py") == files["vllm/core.py"]


# --------------------------------------------------------------------------- where files are asked


def test_net_changes_omit_restored_files() -> None:
    base = fake_base(vllm_files())
    one, two = OverlayTree(base.tree), OverlayTree(base.tree)
    one.update({"vllm/core.py": _content(b"other"), "vllm/new.py": _content(b"n"), "a": None})
    two = OverlayTree(one)
    two.update({"vllm/core.py": _content(base.tree.read("vllm/core.py") or b"")})
    assert set(net_changes(two)) == {"vllm/new.py"}
    assert set(net_changes(one)) == {"vllm/core.py", "vllm/new.py"}
    assert net_changes(base.tree) == {}


def test_variables_of_the_environment_are_removed() -> None:
    request = DispatchRequest(env={"A": "1"}, choices=("x",))
    asked = unsetting(request, {"A": "0", "B": "0", "PATH": "/bin"}, {"PATH": "/bin"})
    assert asked == DispatchRequest(env={"A": "1", "B": None}, choices=("x",))
    assert request.env == {"A": "1"}


def test_a_changed_directory_is_made_of_links(site: Path, tmp_path: Path) -> None:
    (site / "gone").mkdir()
    (site / "gone" / "only.py").write_text("")
    into = tmp_path / "links"
    into.mkdir()
    changes = {
        "vllm/core.py": _content(b"new\n"),
        "vllm/deep/er.py": _content(b"deep\n"),
        "vllm/envs.py": None,
        "gone/only.py": None,
    }
    before = snapshot(site)
    link_out(site, changes, into)
    assert (into / "vllm" / "core.py").read_bytes() == b"new\n"
    assert (into / "vllm" / "deep" / "er.py").read_bytes() == b"deep\n"
    assert not (into / "vllm" / "envs.py").exists()
    assert not (into / "gone").exists()
    assert (into / "vllm" / "__init__.py").is_symlink()
    assert (into / "vllm-0.20.1.dist-info").is_symlink()
    assert snapshot(site) == before


def test_a_tar_of_changes_for_a_container(tmp_path: Path) -> None:
    out = io.BytesIO()
    write_tar(out, "/usr/site", {"a/b.py": _content(b"x\n"), "c.py": None})
    with tarfile.open(fileobj=out) as tar:
        (member,) = tar.getmembers()
        assert (member.name, member.size, member.mode) == ("usr/site/a/b.py", 2, 0o644)
