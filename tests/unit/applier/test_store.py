"""Writing a real directory: all or nothing, and back to the exact bytes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.commandline import main
from builder.applier.judging import judge_in_order
from builder.applier.receipts import RECEIPTS, STATE_DIR, receipts_of
from builder.applier.states import APPLIED, NEEDED
from builder.applier.store import Store
from builder.applier.trees import DirTree, find_site_packages
from builder.applier.values import EXIT_USAGE, ApplyError, sha256_hex
from tests.unit.chance import CASES
from tests.unit.fakes import (
    BACKEND,
    TARGET,
    FakeSources,
    Wheel,
    apply_to,
    copy_op,
    dist_files,
    env_op,
    make_layer,
    make_wheel,
    replace_op,
    revert_from,
    snapshot,
    vllm_files,
    write_tree,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.applier.layers import Layer

FIX = make_layer("fix", BACKEND, copy_op("vllm/new/kernel.py", b"K = 1\n"))
SET = make_layer("set", env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin"))
SECOND = make_layer("second", replace_op("'b12x'", "'b12x'  # second"))
CORE = "vllm/core.py"


def read(site: Path, path: str) -> str:
    return (site / path).read_text()


# ------------------------------------------------------------------------------------------ apply


def test_apply_writes_the_change_and_a_receipt(site: Path) -> None:
    before = sha256_hex((site / CORE).read_bytes())
    assert apply_to(site, FIX) == [NEEDED]
    assert "b12x" in read(site, CORE)
    (receipt,) = receipts_of(DirTree(site))
    entry = receipt.files[CORE]
    assert (entry.before, entry.ops) == (before, ["replace"])
    assert entry.after == sha256_hex((site / CORE).read_bytes())
    assert receipt.files["vllm/new/kernel.py"].before is None


def test_a_second_apply_changes_nothing(site: Path) -> None:
    apply_to(site, FIX, SECOND, SET)
    once = snapshot(site)
    assert apply_to(site, FIX, SECOND, SET) == [APPLIED] * 3
    assert snapshot(site) == once


def test_two_values_for_one_variable_are_an_error(site: Path) -> None:
    """Each apply would take the other's value away, for ever."""
    other = make_layer("other", env_op("VLLM_NVFP4_GEMM_BACKEND", "cutlass"))
    with pytest.raises(ApplyError, match="VLLM_NVFP4_GEMM_BACKEND"):
        apply_to(site, SET, other)


def test_one_failing_layer_stops_all_before_anything_is_written(site: Path) -> None:
    before = snapshot(site)
    drifted = make_layer("drifted", replace_op("not there", "never"))
    with pytest.raises(ApplyError, match="layer drifted: drift"):
        apply_to(site, FIX, drifted)
    assert snapshot(site) == before


def test_modes_are_kept(site: Path) -> None:
    (site / CORE).chmod(0o755)
    apply_to(site, FIX)
    assert (site / CORE).stat().st_mode & 0o777 == 0o755


def test_only_stale_compiled_files_are_removed(site: Path) -> None:
    cache = site / "vllm" / "__pycache__"
    cache.mkdir()
    for name in ("core.cpython-312.pyc", "core.cpython-312.opt-1.pyc", "corex.cpython-312.pyc"):
        (cache / name).write_bytes(b"old")
    apply_to(site, FIX)
    assert [path.name for path in cache.iterdir()] == ["corex.cpython-312.pyc"]


def test_a_removed_package_leaves_no_directory_behind(site: Path) -> None:
    """An empty directory would still be importable, as a namespace package."""
    write_tree(site, dist_files("lib", "1", {"lib/__init__.py": "", "lib/sub/x.py": ""}))
    write_tree(site, {"lib/__pycache__/__init__.cpython-312.pyc": b""})
    apply_to(site, make_layer("clean", {"op": "remove", "distribution": "lib"}))
    assert not (site / "lib").exists()
    assert not (site / "lib-1.dist-info").exists()


def test_the_site_packages_of_an_interpreter(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that a variable names, then those of this Python; never the working directory."""
    other = write_tree(tmp_path / "other", vllm_files())
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.delenv("VLLM_SITE_PACKAGES", raising=False)
    monkeypatch.setattr(sys, "path", ["", str(empty), str(site), str(other)])
    assert find_site_packages() == site.resolve()
    monkeypatch.setenv("VLLM_SITE_PACKAGES", str(other))
    assert find_site_packages() == other.resolve()
    monkeypatch.setenv("VLLM_SITE_PACKAGES", str(empty))
    monkeypatch.setattr(sys, "path", ["", str(empty)])
    monkeypatch.chdir(site)
    with pytest.raises(ApplyError, match="vllm is not installed for"):
        find_site_packages()


# ----------------------------------------------------------------------------------------- revert


@pytest.mark.parametrize("other", [False, True])
def test_compiled_files_alone_keep_no_directory(site: Path, other: bool) -> None:
    """Of another Python, or of a module that is gone; beside a module they stay."""
    layer = make_layer("fix", copy_op("vllm/more/new.py", b"NEW = 1\n"))
    apply_to(site, layer)
    cache = "vllm/more/__pycache__/gone.cpython-399.pyc"
    write_tree(site, {cache: b"", **({"vllm/more/own.py": b""} if other else {})})
    assert revert_from(site) == ["fix"]
    assert (site / cache).exists() is other
    assert (site / "vllm" / "more").exists() is other
    assert (site / "vllm" / "core.py").exists()


def test_reverting_everything_leaves_no_files(site: Path) -> None:
    before = snapshot(site)
    apply_to(site, FIX, SECOND, SET)
    assert snapshot(site) != before
    assert revert_from(site) == ["set", "second", "fix"]
    assert snapshot(site) == before


def test_a_layer_that_another_depends_on_is_not_reverted_alone(site: Path) -> None:
    apply_to(site, FIX, SECOND)
    applied = snapshot(site)
    with pytest.raises(ApplyError, match=r"second was applied on top of fix \(vllm/core\.py\)"):
        revert_from(site, "fix")
    assert snapshot(site) == applied
    assert revert_from(site, "second") == ["second"]
    assert read(site, CORE).startswith("BACKEND = 'b12x'\n")


def test_an_edited_file_is_only_overwritten_by_force(site: Path) -> None:
    before = snapshot(site)
    apply_to(site, FIX)
    (site / CORE).write_text("edited by hand\n")
    with pytest.raises(ApplyError, match=r"vllm/core\.py was changed after layer fix"):
        revert_from(site)
    assert read(site, CORE) == "edited by hand\n"
    assert revert_from(site, force=True) == ["fix"]
    assert snapshot(site) == before


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_missing_original_is_reported_before_anything_changes(site: Path, damage: str) -> None:
    apply_to(site, FIX)
    (receipt,) = receipts_of(DirTree(site))
    kept = site / STATE_DIR / "backup" / str(receipt.files[CORE].before)
    if damage == "missing":
        kept.unlink()
    else:
        kept.write_bytes(b"something else")
    applied = snapshot(site)
    with pytest.raises(ApplyError, match=r"core\.py"):
        revert_from(site)
    assert snapshot(site) == applied


def test_reverting_an_absent_layer_does_nothing(site: Path) -> None:
    before = snapshot(site)
    assert revert_from(site) == []
    assert revert_from(site, "fix") == []
    assert snapshot(site) == before


def test_an_empty_directory_still_exists_after_revert(site: Path) -> None:
    (site / "vllm" / "new").mkdir()
    before = snapshot(site)
    apply_to(site, FIX)
    revert_from(site)
    assert snapshot(site) == before


def test_a_symbolic_link_is_restored(site: Path) -> None:
    """Some installers link site-packages to their cache."""
    shared = site.parent / "cache" / "core.py"
    shared.parent.mkdir()
    (site / CORE).rename(shared)
    (site / CORE).symlink_to("../../cache/core.py")
    before, cached = read(site, CORE), shared.read_text()
    apply_to(site, FIX)
    assert "b12x" in read(site, CORE)
    assert shared.read_text() == cached
    revert_from(site)
    assert read(site, CORE) == before


# ----------------------------------------------------- a layer again, after the files changed below


def version_of_fix(number: int) -> Layer:
    """A layer that lays out another wheel in each of its versions."""
    wheel = lib_wheel(number)
    op = {"op": "wheel", "distribution": "lib", "version": wheel.version}
    return make_layer("lib", op, wheels=[wheel])


def lib_wheel(number: int) -> Wheel:
    return make_wheel("lib", f"{number}.0", {"lib/__init__.py": f"v = {number}\n"})


def test_a_newer_layer_version_is_reverted_to_the_first_original(site: Path) -> None:
    write_tree(site, dist_files("lib", "1.0", {"lib/__init__.py": "v = 1\n"}))
    before = snapshot(site)
    for number in (2, 3):
        apply_to(site, version_of_fix(number), wheels=[lib_wheel(number)])
        assert read(site, "lib/__init__.py") == f"v = {number}\n"
    revert_from(site)
    assert snapshot(site) == before


def test_reverting_after_a_reinstallation_keeps_the_new_release(site: Path) -> None:
    """A package manager replaced the files; an old original must not come back over them."""
    ranges = [{"vllm": "<0.21.0rc0"}, {"vllm": ">=0.21.0rc0"}]
    in_old = [BACKEND, replace_op("FLAG = 0", "FLAG = 1", "vllm/flags.py")]
    variants = [
        {"name": f"v{number}", "when": when, "ops": ops}
        for number, (when, ops) in enumerate(zip(ranges, (in_old, [BACKEND]), strict=True))
    ]
    layer = make_layer("fix", variants=variants)
    write_tree(site, vllm_files("0.20.1", flags="FLAG = 0\n"))
    apply_to(site, layer)
    for path in (site / "vllm-0.20.1.dist-info").iterdir():
        path.unlink()
    (site / "vllm-0.20.1.dist-info").rmdir()
    write_tree(site, vllm_files("0.21.0", flags="NEW_RELEASE = True\n"))
    apply_to(site, layer)
    revert_from(site)
    assert read(site, "vllm/flags.py") == "NEW_RELEASE = True\n"
    assert read(site, CORE).startswith("BACKEND = 'cutlass'")


# -------------------------------------------------------------------------------- random histories


def random_site(root: Path, rng: random.Random) -> list[str]:
    """A vLLM with random modules, modes, times and compiled files; gives the module names."""
    names = [f"m{number}" for number in range(rng.randint(2, 6))]
    text = {
        name: f"MARK_{name} = {rng.randint(0, 2)}\n" + "pass\n" * rng.randint(0, 3)
        for name in names
    }
    write_tree(root, vllm_files(**text))
    write_tree(
        root, dist_files("lib", "1.0", {"lib/__init__.py": "", "lib/a.py": "", "lib/b.txt": "b"})
    )
    for name in names:
        if rng.random() < 0.5:
            write_tree(root, {f"vllm/__pycache__/{name}.cpython-312.pyc": rng.randbytes(8)})
    for path in root.rglob("*"):
        if path.is_file():
            path.chmod(rng.choice([0o644, 0o755, 0o600, 0o444]))
            stamp = rng.randint(10**17, 10**18)
            os.utime(path, ns=(stamp, stamp))
    return names


def random_layers(names: list[str], rng: random.Random) -> list[Layer]:
    layers = []
    for number in range(rng.randint(1, 5)):
        name = rng.choice(names)
        ops = [
            replace_op(f"MARK_{name} =", f"L{number} = {number}\nMARK_{name} =", f"vllm/{name}.py"),
            copy_op(
                f"vllm/{rng.choice(['', 'sub/', 'lib/'])}new{number}.py", rng.randbytes(0) + b"#\n"
            ),
            env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin"),
        ]
        layers.append(make_layer(f"layer{number}", *rng.sample(ops, rng.randint(1, 3))))
    extra = [
        make_layer("clean", {"op": "remove", "distribution": "lib"}),
        version_of_fix(2),
    ]
    return rng.sample([*layers, rng.choice(extra)], len(layers) + 1)


@pytest.mark.parametrize("seed", range(CASES))
def test_any_sequence_of_changes_can_be_reverted(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    layers = random_layers(random_site(tmp_path, rng), rng)
    states = [snapshot(tmp_path)]
    applied: list[str] = []
    for layer in layers:
        if apply_to(tmp_path, layer, wheels=[lib_wheel(2)]) == [NEEDED]:
            applied.append(layer.name)
            states.append(snapshot(tmp_path))
    assert NEEDED not in apply_to(tmp_path, *layers, wheels=[lib_wheel(2)])
    assert snapshot(tmp_path) == states[-1]
    if rng.random() < 0.5:  # one by one, the last first
        for name in reversed(applied):
            assert revert_from(tmp_path, name) == [name]
    revert_from(tmp_path)
    assert snapshot(tmp_path) == states[0]


# ------------------------------------------------------------------- failures, kills and full disks


WRITERS = [
    (Path, "mkdir"),
    (Path, "write_bytes"),
    (Path, "chmod"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "unlink"),
    (os, "fsync"),
]


class Writes:
    """Calls that write; the one with the given number is done by ``instead``."""

    def __init__(self, number: int, instead: Callable[[], None]) -> None:
        self.number, self.instead, self.count = number, instead, 0

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for owner, name in WRITERS:
            patch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.number:
                self.instead()
            return real(*args, **kwargs)

        return call


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


def interrupt() -> None:
    raise KeyboardInterrupt


def prepare(site: Path) -> None:
    """Compiled files, a mode and a distribution to remove."""
    write_tree(site, {"vllm/__pycache__/core.cpython-312.pyc": b"old"})
    write_tree(
        site, dist_files("lib", "1.0", {"lib/__init__.py": "v = 0\n", "lib/sub/a.py": "a = 0\n"})
    )
    (site / CORE).chmod(0o755)


BIG = make_layer(
    "big",
    BACKEND,
    copy_op("vllm/new/deep/kernel.py", b"K = 1\n"),
    {"op": "remove", "distribution": "lib"},
    env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin"),
)


def commit(site: Path, layer: Layer) -> None:
    """Judge and write one layer, without the checks around it."""
    (step,) = judge_in_order([layer], DirTree(site), FakeSources(), TARGET, {})
    with Store(site) as store:
        store.commit(step.layer, step.outcome)


def steps_to(site: Path, action: Callable[[], object]) -> int:
    """How many writing calls an action takes."""
    with pytest.MonkeyPatch.context() as patch:
        writes = Writes(-1, no_space)
        writes.watch(patch)
        action()
    return writes.count


@pytest.mark.parametrize("fail", [no_space, interrupt], ids=["full-disk", "interrupted"])
def test_a_failure_at_any_step_leaves_the_tree_as_it_was(
    site: Path, fail: Callable[[], None]
) -> None:
    prepare(site)
    before = snapshot(site)
    total = steps_to(site, lambda: commit(site, BIG))
    revert_from(site)
    assert snapshot(site) == before
    assert total > 15
    for number in range(2, total + 1):  # the first makes the state directory, before the lock
        with pytest.MonkeyPatch.context() as patch:
            Writes(number, fail).watch(patch)
            with pytest.raises((ApplyError, KeyboardInterrupt)) as caught:
                commit(site, BIG)
        assert snapshot(site) == before, f"write {number} of {total}"
        if fail is no_space:
            assert "No space left on device" in str(caught.value)
            assert "nothing was changed" in str(caught.value)


def test_a_failure_later_keeps_the_layers_before(site: Path) -> None:
    prepare(site)
    apply_to(site, FIX)
    first = snapshot(site)
    with pytest.MonkeyPatch.context() as patch:
        Writes(9, no_space).watch(patch)
        with pytest.raises(ApplyError):
            commit(site, SECOND)
    assert snapshot(site) == first
    assert apply_to(site, FIX, SECOND) == [APPLIED, NEEDED]


def test_twins_keep_their_own_mode_and_time_when_a_change_is_rolled_back(site: Path) -> None:
    """Backups are kept by content; two equal files still differ in mode and time."""
    for number, mode in enumerate((0o644, 0o755)):
        write_tree(site, {f"vllm/twin{number}.py": b"T = 0\n"})
        (site / f"vllm/twin{number}.py").chmod(mode)
        os.utime(site / f"vllm/twin{number}.py", ns=(number * 10**9, number * 10**9))
    ops = [replace_op("T = 0", "T = 1", f"vllm/twin{number}.py") for number in range(2)]
    layer = make_layer("twins", *ops)
    before = snapshot(site)
    total = steps_to(site, lambda: commit(site, layer))
    revert_from(site)
    for number in range(2, total + 1):
        with pytest.MonkeyPatch.context() as patch:
            Writes(number, no_space).watch(patch)
            with pytest.raises(ApplyError):
                commit(site, layer)
        assert snapshot(site) == before, f"write {number} of {total}"


def test_a_read_only_directory_is_not_an_internal_error(site: Path) -> None:
    (site / STATE_DIR).write_text("in the way")
    with pytest.raises(ApplyError, match="cannot write"):
        apply_to(site, FIX)


def test_a_directory_of_another_user(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written; where nothing is needed, that is no failure."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != site)  # root may write anywhere
    monkeypatch.setattr(os, "geteuid", lambda: 1000 + site.stat().st_uid)
    before, owner = snapshot(site), site.stat().st_uid
    with pytest.raises(ApplyError) as refused:
        apply_to(site, FIX)
    assert refused.value.code == EXIT_USAGE
    said = f"cannot write (it is uid {owner}'s, and this is {1000 + owner}), and it lacks"
    assert said in str(refused.value)
    assert f"docker exec --user {owner}" in refused.value.hint
    assert snapshot(site) == before
    monkeypatch.undo()
    apply_to(site, FIX)
    before = snapshot(site)
    monkeypatch.setattr(os, "access", lambda path, mode: path != site)
    assert apply_to(site, FIX) == [APPLIED]
    assert snapshot(site) == before


# ------------------------------------------------------------------------------------------- lock


def bundle(site: Path, *layers: Layer) -> str:
    path = site.parent / "layers.json"
    rendered = [layer.rendered for layer in layers]
    value = {"name": "test", "needs": {}, "needs_reason": "", "layers": rendered}
    path.write_text(json.dumps(value))
    return str(path)


def applier_here(*words: str) -> subprocess.CompletedProcess[str]:
    """The applier's command line in this process; its traceback would end the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = main(words)
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "it is not an object"),
        ('{"name": "t"}', "'layers' is missing"),
        ('{"name": "t", "layers": [1]}', "layer 1: it is not an object"),
        ('{"name": "t", "layers": [{"name": "x"}]}', "layer x: 'package' is missing"),
        ('{"name": "t", "layers": [], "needs": {"vllm": 1}}', "'needs' holds what is not a text"),
    ],
)
def test_a_damaged_bundle_is_an_error_with_its_place(site: Path, text: str, said: str) -> None:
    path = site.parent / "layers.json"
    path.write_text(text)
    before = snapshot(site)
    ran = applier_here("apply", "--root", str(site), "--layers", str(path))
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr.startswith("error: ")
    assert said in ran.stderr
    assert snapshot(site) == before


def leave(site: Path) -> None:
    """What the end of another process does, where no layer is applied."""
    (site / STATE_DIR / "lock").unlink(missing_ok=True)
    (site / STATE_DIR).rmdir()


def test_a_lock_removed_by_its_holder_is_ignored(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process ends between our opening of the file and our locking of it."""
    ends, real = [leave], fcntl.flock

    def flock(*words: Any) -> None:
        if ends:
            ends.pop()(site)
        real(*words)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Store(site), pytest.raises(ApplyError, match="another spark-build is writing to it"):
        Store(site).__enter__()
    assert not ends


def test_a_folder_removed_by_its_holder_is_created_again(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process ends between our making of the folder and our opening of the lock."""
    ends, real = [leave], Path.mkdir

    def mkdir(path: Path, *words: Any, **more: Any) -> None:
        real(path, *words, **more)
        if ends and path.name == STATE_DIR:
            ends.pop()(site)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert apply_to(site, FIX) == ["needed"]
    assert not ends


class TestAsAMod:
    def test_drift_is_reported_and_changes_nothing(self, site: Path) -> None:
        before = snapshot(site)
        layers = bundle(site, make_layer("drifted", replace_op("gone", "never")))
        answer = applier_here("apply", "--root", str(site), "--layers", layers)
        assert answer.returncode == 4
        assert "error: layer drifted: drift" in answer.stderr
        assert snapshot(site) == before

    def test_a_release_that_the_mod_does_not_support(self, site: Path) -> None:
        path = Path(bundle(site, FIX))
        needs = {"needs": {"vllm": ">=0.30.0"}, "needs_reason": "no such kernel"}
        path.write_text(json.dumps(json.loads(path.read_text()) | needs))
        answer = applier_here("apply", "--root", str(site), "--layers", str(path))
        assert answer.returncode == 2
        assert "test needs vllm >=0.30.0, this is vllm 0.20.1: no such kernel" in answer.stderr

    @pytest.mark.parametrize("command", ["apply", "revert"])
    @pytest.mark.parametrize("more", [[], ["--layers", "no-such-file.json"]])
    def test_wrong_arguments_give_no_traceback(
        self, site: Path, command: str, more: list[str]
    ) -> None:
        answer = applier_here(command, "--root", str(site), *more)
        assert answer.returncode == 2
        assert "Traceback" not in answer.stderr


# ------------------------------------------------------------------- notes that somebody else wrote


def rewritten(path: Path, **changes: Any) -> None:
    """A receipt with other words in it."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../victim": {"before": None, "after": None}}},
        {"files": {"vllm/x": {"before": None, "after": None, "made": "../victim"}}},
        {"files": {CORE: {"before": "../../../victim", "after": None}}},
        {"files": {CORE: {"after": None}}},
        {"files": {CORE: []}},
        {"layer": "../../victim"},
        {"sequence": "1"},
        {"env": {"A": 1}},
        {"serve_flags": ["--x", 1]},
        {"variant": 3},
        {"package": None},
        {"compiled_with": 1},
        {"records": []},
        {"records": {CORE: {}}},
        {"files": {CORE: {"before": None, "after": None, "ops": [[]]}}},
        {"files": {CORE: {"before": None, "after": None, "mode": "0644"}}},
    ],
)
def test_a_receipt_cannot_lead_outside_the_tree(site: Path, changes: dict[str, Any]) -> None:
    """A revert removes what a receipt says was new: the paths are of this tree."""
    victim = site.parent / "victim"
    victim.write_text("mine")
    apply_to(site, FIX)
    rewritten(site / RECEIPTS / "fix.json", **changes)
    with pytest.raises(ApplyError, match=r"receipts/fix\.json is damaged") as caught:
        revert_from(site, "fix", force=True)
    assert caught.value.hint
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    "journal",
    [
        "[" * 100_000,
        "{}",
        '[{"path": "x", "backup": null}]',
        '[{"path": "x", "backup": null, "made": null, "mode": "0644"}]',
        '[{"path": "../victim", "backup": null, "made": "../victim"}]',
        '[{"path": "x", "backup": null, "made": "/VICTIM"}]',
        '[{"path": "x", "backup": "../../victim", "moves": true}]',
    ],
)
def test_a_journal_cannot_lead_outside_the_tree(site: Path, journal: str) -> None:
    """What is rolled back was written here: a folder that came with one is refused."""
    victim = site.parent / "victim"
    victim.write_text("mine")
    (site / STATE_DIR).mkdir()
    text = journal.replace("/VICTIM", str(victim))
    (site / STATE_DIR / "journal.json").write_text(text)
    with pytest.raises(ApplyError, match="of an interrupted change is damaged"):
        apply_to(site, FIX)
    assert victim.read_text() == "mine"
