"""Code of an image does not run on this machine unasked: three attacks, and what is known."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.console import console
from builder.common.paths import cache_dir
from builder.common.plan import Platform
from builder.common.pypi import PackageIndex
from builder.common.wheels import RemoteWheel
from builder.proof import isolation, runners, trust
from builder.proof import sandbox as sandbox_module
from builder.proof.isolation import SandboxUnavailable
from builder.proof.sandbox import PreparedSandbox, Sandbox, Torch, lay_out
from builder.proof.trust import TrustedSources, has_hook
from tests.unit.caller import Call
from tests.unit.fakes import (
    REPLACE,
    MemoryTree,
    copy_op,
    dist_files,
    layer_text,
    make_layer,
    write_tree,
)
from tests.unit.fakevllm import FILES as FAKE
from tests.unit.imagefiles import (
    CONFIG,
    SITE,
    Item,
    folder,
    packed,
    put_image,
    python_items,
    tar_of,
)
from tests.wheels.fakeindex import FakeIndex

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.proof.replies import DispatchReply

LINEAR = "vllm/model_executor/kernels/linear/__init__.py"
#: As the profile ``marlin`` expects it of 0.20.1.
KERNEL = "MarlinNvFp4LinearKernel"
VLLM = {
    path: text.replace("MarlinKernel", KERNEL).encode()
    for path, text in FAKE.items()
    if path.startswith("vllm/")
} | {"vllm/core.py": b"BACKEND = 'cutlass'\n"}
ENV = 'op = "env"\nname = "VLLM_NVFP4_GEMM_BACKEND"\nvalue = "marlin"'
HOOK = 'file = "vllm/core.py"\nhook = "edit.py:edit"\nop = "hook"'


class Machine:
    """This machine: an index with the release, a sandbox that is there, and a canary."""

    def __init__(self, root: Path, call: Call, index: FakeIndex) -> None:
        self.root, self.call, self.index = root, call, index
        self.canary = root / "canary"
        self.put_layer(REPLACE)

    def put_layer(self, op: str) -> None:
        """The profile's layers, as this user has them."""
        texts = {"vllm-marlin-fp8": layer_text(op), "marlin-env": layer_text(ENV)}
        files = {f"{name}/layer.toml": text.encode() for name, text in texts.items()}
        write_tree(self.root / "patches", files)

    def hash_release(self) -> None:
        """Have the whole wheel, so that its files are known."""
        index = PackageIndex()
        RemoteWheel(index.choose("vllm", "0.20.1", Platform()), index).download()

    @property
    def writes(self) -> str:
        """Code that says that it ran, if it can."""
        return (
            f"\ntry:\n    open({str(self.canary)!r}, 'a').write('ran')\nexcept OSError:\n    pass\n"
        )

    def image(self, changes: Mapping[str, bytes] | None = None, beside: Sequence[Item] = ()) -> str:
        """A base with that release, some files changed, and a RECORD that says so."""
        files = dist_files("vllm", "0.20.1", {**VLLM, **(changes or {})})
        items = [Item(f"{SITE}/{path}", data) for path, data in sorted(files.items())]
        bottom = packed(tar_of(folder("opt/"), *python_items()))
        put_image(self.root / "base", bottom, packed(tar_of(*items, *beside)), config=CONFIG)
        return f"oci:{self.root}/base"

    def verify(self, target: str, *words: str, level: str = "dispatch") -> tuple[int, Any]:
        """``verify`` against the profile ``marlin``: exit code and document."""
        given = ("--layers", "marlin") if "oci:out" not in target else ()
        done = self.call("verify", target, *given, "--level", level, "--json", *words)
        return done.code, done.json

    def linear(self, target: str, *words: str) -> Any:
        """The one check that this vLLM can answer."""
        _, document = self.verify(target, *words)
        (check,) = [c for c in document["checks"] if c["name"] == "nvfp4-linear"]
        return check


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Machine]:
    torch = write_tree(
        tmp_path / "torch", {"torch/__init__.py": FAKE["torch/__init__.py"].encode()}
    )

    def make(requirements: Any, version: str, packages: object) -> PreparedSandbox:
        del packages
        sandbox = Sandbox(requirements)
        sandbox.python = Path(sys.executable)
        return PreparedSandbox(
            sandbox=sandbox,
            torch=Torch(folder=torch, version=version, what=f"torch {version}"),
            paths=(torch,),
        )

    monkeypatch.setattr(runners, "make", make)
    monkeypatch.setattr(trust, "find_isolation", lambda: "bwrap: it is not installed")
    monkeypatch.setenv("SPARK_BUILD_PATCHES", str(tmp_path / "patches"))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with FakeIndex() as index:
        index.add("vllm", "0.20.1", VLLM)
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        yield Machine(tmp_path, Call(capsys), index)


# ------------------------------------------------------------------------------------ what is known


def test_a_release_runs_without_isolation(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> None:
        raise AssertionError("an ordinary base needs no isolation")

    monkeypatch.setattr(trust, "find_isolation", never)
    check = machine.linear(machine.image())
    assert (check["status"], check["seen"]) == ("pass", f"Using {KERNEL} for NVFP4 GEMM")


def test_the_reply_of_the_same_files_is_cached(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    ask = Sandbox.ask

    def counted(self: Sandbox, request: Mapping[str, object], **options: Any) -> DispatchReply:
        asked.append(request)
        return ask(self, request, **options)

    monkeypatch.setattr(Sandbox, "ask", counted)
    monkeypatch.setattr(Sandbox, "complete", True)
    base = machine.image()
    first = machine.linear(base)
    shutil.rmtree(cache_dir() / "trees")
    again = machine.linear(base)
    assert len(asked) == 1
    assert not (cache_dir() / "trees").exists(), "nothing is extracted for it"
    assert again == {**first, "where": f"{first['where']}, cached from the same files"}
    shutil.rmtree(machine.root / "base")
    other = VLLM["vllm/envs.py"] + b"# other\n"
    changed = machine.linear(machine.image({"vllm/envs.py": other}), "--trust-image")
    assert "cached" not in changed["where"]
    assert len(asked) == 2


def test_a_failure_is_believed_only_after_each_file_was_read(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a file with its old size and time, as a disk may damage it."""
    warnings: list[str] = []
    monkeypatch.setattr(console, "warn", warnings.append)
    base = machine.image()
    assert machine.linear(base)["status"] == "pass"
    (file,) = (cache_dir() / "trees").glob("*/vllm/envs.py")
    info, text = file.stat(), file.read_bytes()
    file.write_bytes(b"raise ValueError('x')\n".ljust(len(text), b"#")[: len(text)])
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    shutil.rmtree(file.parent / "__pycache__")
    shutil.rmtree(cache_dir() / "dispatch")
    shutil.rmtree(cache_dir() / "evidence", ignore_errors=True)
    sandbox_module.forget_replies()
    check = machine.linear(base)
    assert (check["status"], "cached" in check["where"]) == ("pass", False)
    assert file.read_bytes() == text
    (said,) = [one for one in warnings if "made again" in one]
    assert said.endswith("made again: vllm/envs.py has changed since it was made")


def test_an_error_of_this_machine_that_an_earlier_version_kept_is_asked_again(
    machine: Machine,
) -> None:
    base = machine.image()
    assert machine.linear(base)["status"] == "pass"
    (file,) = (cache_dir() / "dispatch").iterdir()
    reply = json.loads(file.read_bytes())
    for answer in reply["answers"]:
        error = {"type": "EOFError", "message": "marshal data too short"}
        answer |= {"selected": None, "error": error}
    file.write_text(json.dumps(reply))
    shutil.rmtree(cache_dir() / "evidence", ignore_errors=True)
    check = machine.linear(base)
    assert (check["status"], "cached" in check["where"]) == ("pass", False)


def test_verbose_shows_what_the_probe_of_a_failure_prints(machine: Machine) -> None:
    """Also where the answer is known from an earlier run."""
    base = machine.image({"vllm/envs.py": b"raise ValueError('no')\n"})
    words = ("verify", base, "--layers", "marlin", "--level", "dispatch", "--trust-image")
    quiet, verbose = machine.call(*words), machine.call(*words, "-v")
    assert (quiet.code, verbose.code) == (5, 5)
    assert "envs.py" not in quiet.err
    assert '/vllm/envs.py", line 1, in <module>' in verbose.err


def test_a_failure_is_not_cached(machine: Machine) -> None:
    """Its cause may be this machine."""
    base = machine.image({"vllm/envs.py": b"raise MemoryError\n"})
    for _ in range(2):
        check = machine.linear(base, "--trust-image")
        assert (check["status"], check["reason"]) == ("not-run", "on this machine: MemoryError")
    assert list(runners.RESULTS.file([]).parent.glob("*")) == []


def test_output_of_local_layers_is_known(machine: Machine) -> None:
    """Held against what the layers here make of the release itself."""
    words = ("-l", "marlin", "-b", machine.image(), "-o", "oci:out", "--json")
    document = machine.call("image", *words).json
    seen = {c["name"]: c["status"] for c in document["verify"]["checks"]}
    assert seen["nvfp4-linear"] == "pass", "the image that was made just now"
    assert machine.linear("oci:out")["status"] == "pass", "and any time later"

    machine.put_layer(REPLACE.replace("b12x", "other"))
    check = machine.linear("oci:out")
    assert check["status"] == "not-run"
    assert "vllm/core.py: not from a release" in check["reason"], "its own receipt proves nothing"


# ------------------------------------------------------------------------------------------ attacks


def test_a_changed_module_with_an_adjusted_record(machine: Machine) -> None:
    envs = VLLM["vllm/envs.py"] + machine.writes.encode()
    base = machine.image({"vllm/envs.py": envs})
    code, document = machine.verify(base)
    (check,) = [c for c in document["checks"] if c["name"] == "nvfp4-linear"]
    assert (code, check["status"]) == (5, "not-run")
    assert "(vllm/envs.py: not from a release on the package index" in check["reason"]
    verdict = document["verdict"]
    assert verdict["status"] == "not-proven"
    assert "vllm/envs.py" in verdict["sentence"]
    assert "--trust-image gives consent" in check["reason"]
    assert any("apt-get install bubblewrap" in todo for todo in verdict["todo"])
    assert not machine.canary.exists()

    assert machine.linear(base, "--trust-image")["status"] == "pass"
    assert machine.canary.exists(), "the attack is one: whoever trusts it runs it"


def test_an_additional_module(machine: Machine) -> None:
    init = f"from vllm import evil{machine.writes}".encode()
    base = machine.image(beside=[Item(f"{SITE}/vllm/evil.py", init)])
    check = machine.linear(base)
    assert check["status"] == "not-run"
    assert "vllm/evil.py" in check["reason"]


def test_the_default_verification_of_image_runs_no_foreign_code(machine: Machine) -> None:
    base = machine.image({"vllm/envs.py": VLLM["vllm/envs.py"] + machine.writes.encode()})
    words = ("image", "-l", "marlin", "-b", base, "-o", "oci:out", "--json")
    document = machine.call(*words).json
    (check,) = [c for c in document["verify"]["checks"] if c["name"] == "nvfp4-linear"]
    assert (check["status"], machine.canary.exists()) == ("not-run", False)
    assert "vllm/envs.py" in document["verify"]["verdict"]["sentence"]
    machine.call(*words, "--trust-image")
    assert machine.canary.exists()


@pytest.mark.parametrize("says", ["[]", "{}", '{"answers": [1]}', '{"answers": {"a": []}}'])
def test_a_malformed_reply(machine: Machine, says: str) -> None:
    """Code of the target can write what it likes to where the probe writes."""
    lie = f"""
import contextlib, os
for number in range(1, 20):
    with contextlib.suppress(OSError):
        os.write(number, {says.encode()!r})
os._exit(0)
""".encode()
    base = machine.image({"vllm/envs.py": VLLM["vllm/envs.py"] + lie})
    check = machine.linear(base, "--trust-image")
    assert check["status"] in ("fail", "not-run")
    assert "malformed" in check["seen"] or "is not an object" in check["reason"]


@pytest.mark.parametrize("name", ["evil.pth", "sitecustomize.py"])
def test_startup_hooks(machine: Machine, name: str) -> None:
    code = f"import os; open({str(machine.canary)!r}, 'a')\n".encode()
    base = machine.image(beside=[Item(f"{SITE}/{name}", code)])
    exit_code, document = machine.verify(base, level="static,dispatch")
    by_name = {check["name"]: check for check in document["checks"]}
    assert by_name["nvfp4-linear"]["status"] == "pass", "vLLM itself is the release"
    assert (by_name["startup hooks"]["status"], by_name["startup hooks"]["where"]) == ("fail", name)
    assert exit_code == 5
    assert not machine.canary.exists()


@pytest.fixture
def hooked(machine: Machine) -> Path:
    """An image and an overlay whose plan holds a hook; the folder that they were made from."""
    edit = f"def edit(text):{machine.writes.replace(chr(10), chr(10) + '    ')}\n"
    edit += "    return text.replace('cutlass', 'marlin')\n"
    text = layer_text(HOOK).encode()
    patches = write_tree(machine.root / "mine", {"h/layer.toml": text, "h/edit.py": edit.encode()})
    machine.image()
    for base, out in ((f"oci:{machine.root}/base", "oci:out"), ("pypi:vllm==0.20.1", "oci:over")):
        words = ("image", "-l", "h", "-b", base, "-o", out, "--patches", patches, "--no-verify")
        done = machine.call(*words)
        assert done.code == 0, done.err
    assert machine.canary.exists(), "one's own hook runs where one's own image is made"
    machine.canary.unlink()
    return patches


def test_a_hook_in_a_baked_plan(machine: Machine, hooked: Path) -> None:
    rebuild = ("rebuild", "oci:out", "--base", f"oci:{machine.root}/base")
    done = machine.call(*rebuild)
    assert done.code == 2
    assert "layer h of oci:out has a hook" in done.err
    assert "--patches DIR" in done.err

    other = machine.root / "other"
    write_tree(
        other, {"h/layer.toml": layer_text(HOOK).encode(), "h/edit.py": b"def edit(t): ...\n"}
    )
    done = machine.call(*rebuild, "--patches", other, "--yes")
    assert (done.code, "differs:" in done.err) == (2, True)

    done = machine.call(*rebuild, "--patches", hooked)
    assert (done.code, "no terminal to confirm it" in done.err) == (2, True)
    assert not machine.canary.exists(), "nothing so far ran it"

    done = machine.call(*rebuild, "--patches", hooked, "--yes")
    assert (done.code, done.out.split()[0]) == (0, "same")
    assert machine.canary.exists()


def test_a_baked_hook_is_not_run_to_prove_a_layer_necessary(machine: Machine, hooked: Path) -> None:
    words = ("verify", "oci:over", "--prove-necessary", "--level", "static", "--json")
    (verdict,) = machine.call(*words).json["necessity"]
    assert verdict["necessary"] == "unknown"
    assert "hooks from an image are never run" in verdict["reason"]
    assert not machine.canary.exists()
    machine.call(*words, "--patches", hooked)
    assert machine.canary.exists()


# ------------------------------------------------------------------------------------------ details


def test_a_hook_is_found_in_any_variant() -> None:
    hook = {"op": "hook", "file": "x", "source": "", "function": "f"}
    other = {"name": "other", "when": {}}
    (variant,) = make_layer("a", copy_op("hook", b"")).rendered["variants"]
    assert has_hook(make_layer("a", hook))
    assert has_hook(make_layer("a", variants=[variant, {**other, "ops": [hook]}]))
    assert not has_hook(make_layer("hook", variants=[variant]))


def test_released_files_are_read_from_the_index_not_from_the_image(machine: Machine) -> None:
    """Of a distribution that only an image has, no file is known; RECORD itself is never run."""
    tree = MemoryTree(dist_files("vllm", "0.20.1", VLLM) | {"vllm/new.py": b""})
    tree.files["vllm-0.20.1.dist-info/RECORD"] += b"vllm/new.py,,\n"
    paths = sorted(tree.files)
    info = "vllm-0.20.1.dist-info"
    assert "vllm/envs.py" in TrustedSources().unknown(tree, paths), "by range nothing is known"
    machine.hash_release()
    assert TrustedSources().unknown(tree, paths) == ["vllm/new.py"]
    assert (
        TrustedSources(written={("vllm/new.py", tree.digest("vllm/new.py") or ""): None}).unknown(
            tree, paths
        )
        == []
    )
    tree.files[f"{info}/entry_points.txt"] = b"[vllm.general_plugins]\nx = vllm.new:run\n"
    assert f"{info}/entry_points.txt" in TrustedSources().unknown(
        tree, [*paths, f"{info}/entry_points.txt"]
    )
    nobody = MemoryTree(dist_files("vllm", "9.9.9", VLLM))
    assert "vllm/envs.py" in TrustedSources().unknown(nobody, sorted(nobody.files)), (
        "no such release"
    )


def test_without_an_index_nothing_is_known(machine: Machine) -> None:
    machine.index.faults.status["vllm"] = 404
    tree = MemoryTree(dist_files("vllm", "0.20.1", VLLM))
    assert "vllm/envs.py" in TrustedSources().unknown(tree, sorted(tree.files))


class Lying(MemoryTree):
    """Says another sha256 than its file has, as an image's own interpreter may."""

    def digest(self, path: str) -> str | None:
        return "0" * 64 if path in self.files else None


def test_a_file_that_changed_after_the_check_is_not_extracted() -> None:
    with pytest.raises(SandboxUnavailable, match="does not match its sha256"):
        lay_out(Lying({"vllm/a.py": b"import os\n"}))


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_what_python_compiled_goes_with_its_source_alone(damaged: bool) -> None:
    """Python finds it by the time, in seconds, and the size: a damaged source has both."""
    files = {"vllm/a.py": b"A = 1\n", "vllm/b.py": b"B = 1\n"}
    first = lay_out(MemoryTree(files))
    if damaged:
        (first / "vllm/a.py").write_bytes(b"A = 2\n")
    path = py_compile.compile(str(first / "vllm/a.py"), doraise=True)
    compiled = Path(str(path)).relative_to(first)
    second = lay_out(MemoryTree({**files, "vllm/b.py": b"B = 2\n"}))
    assert (second / "vllm/a.py").read_bytes() == b"A = 1\n"
    assert (second / compiled).exists() == (not damaged)


def test_only_known_names_are_installed_for_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that an image calls nvidia-cutlass-dsl-evil may be anybody's on the index."""
    asked: list[Any] = []

    def install(*words: object) -> None:
        asked.append(words)
        raise SandboxUnavailable("not here")

    monkeypatch.setattr(sandbox_module, "install", install)
    sandbox = Sandbox.__new__(Sandbox)
    sandbox.python = Path(sys.executable)
    with pytest.raises(SandboxUnavailable, match="not here"):
        sandbox.dsl({"nvidia-cutlass-dsl": "4.5.0", "nvidia-cutlass-dsl-evil": "1.0"})
    assert asked[0][1] == ["nvidia-cutlass-dsl==4.5.0"]


def test_reasons_why_isolation_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    found = isolation.find_isolation.__wrapped__()
    assert isinstance(found, str)
    assert found.startswith("bwrap: it is not installed; a container: ")
    json.dumps(found)
