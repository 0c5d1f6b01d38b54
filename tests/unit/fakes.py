"""Small stand-ins: a tree in memory, tiny wheels with a true RECORD, rendered layers, a plan."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from builder.applier.applying import apply_layers
from builder.applier.judging import Step, judge, judge_in_order
from builder.applier.layers import Layer
from builder.applier.receipts import RECEIPTS, STATE_DIR
from builder.applier.sources import wheel_members
from builder.applier.states import Outcome, Target
from builder.applier.store import Store
from builder.applier.trees import Distribution, Tree, distribution_of, versions
from builder.applier.values import canonical_json, sha256_hex
from builder.common.plan import BaseIdentity, BuildPlan, LayerDecision, Platform
from builder.images.bases.identify import IDENTIFIERS
from builder.images.engines.maker import maker
from builder.images.subject import InFiles, OpenImage, Subject
from builder.layers.planner import epoch_for
from builder.proof.runners import InSandbox, attempt
from builder.proof.target import Refusal, VerifyTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pytest

    from builder.applier.layers import Compile, DonorPin, InputPin, Kernels
    from builder.applier.machinecode import KernelCode
    from builder.applier.sources import Member, Stage, Unstaged
    from builder.common.plan import PlanDocument
    from builder.proof.checks import VerifierDocument
    from builder.proof.kernels import Replies
    from builder.proof.replies import CodegenReply, CodegenRequest, DispatchReply, DispatchRequest

Files = dict[str, bytes]
#: An op, or something else of a layer, as JSON.
Table = dict[str, Any]

TARGET = Target("linux/arm64", "cp312")


def record_line(path: str, data: bytes) -> str:
    """One RECORD row, as an installer writes it."""
    raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={raw},{len(data)}\n"


def dist_files(name: str, version: str, files: Mapping[str, str | bytes]) -> Files:
    """An installed distribution: its files, METADATA and a true RECORD."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    held = {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}
    held[f"{info}/METADATA"] = metadata.encode()
    rows = "".join(record_line(path, data) for path, data in held.items())
    held[f"{info}/RECORD"] = f"{rows}{info}/RECORD,,\n".encode()
    return held


def vllm_files(version: str = "0.20.1", /, **extra: str) -> Files:
    """An installed vLLM with one module, an ``envs.py`` and what the test adds (by module name)."""
    modules = {f"vllm/{name}.py": text for name, text in extra.items()}
    return dist_files(
        "vllm",
        version,
        {
            "vllm/__init__.py": "",
            "vllm/core.py": "BACKEND = 'cutlass'\n\n\ndef run():\n    return BACKEND\n",
            "vllm/envs.py": ENVS,
            **modules,
        },
    )


ENVS = """\
import os

def env_with_choices(name, default, choices): ...

environment_variables = {
    "VLLM_NVFP4_GEMM_BACKEND": env_with_choices(
        "VLLM_NVFP4_GEMM_BACKEND", None, ["cutlass", "marlin"], case_sensitive=False
    ),
    "VLLM_USE_FLASHINFER_MOE_FP4": lambda: bool(int(os.getenv("VLLM_USE_FLASHINFER_MOE_FP4"))),
}
"""


class MemoryTree:
    """A site-packages directory that is a dict."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)

    def read(self, path: str) -> bytes | None:
        return self.files.get(path)

    def digest(self, path: str) -> str | None:
        data = self.files.get(path)
        return None if data is None else sha256_hex(data)

    def mode(self, path: str) -> int:
        assert path in self.files
        return 0o644

    def children(self, directory: str) -> list[str]:
        prefix = f"{directory}/" if directory else ""
        below = (path[len(prefix) :] for path in self.files if path.startswith(prefix))
        return sorted({rest.split("/", 1)[0] for rest in below})

    def distributions(self) -> dict[str, Distribution]:
        dists = (distribution_of(name) for name in self.children(""))
        return {d.name: d for d in dists if d and f"{d.info_dir}/METADATA" in self.files}

    def after(self, judged: Outcome | Step) -> MemoryTree:
        """The tree as an outcome, or a step with its receipt, would leave it."""
        files = dict(self.files)
        for path, content in judged.changes.items():
            files.pop(path, None)
            if content is not None:
                files[path] = content.read()
        return MemoryTree(files)


@dataclass(frozen=True)
class Wheel:
    """A wheel in memory and how a layer pins it."""

    name: str
    version: str
    data: bytes

    @property
    def filename(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def pin(self) -> dict[str, Any]:
        return {
            "distribution": self.name,
            "version": self.version,
            "filename": self.filename,
            "sha256": sha256_hex(self.data),
            "size": len(self.data),
            "platform": "any",
            "python": "py3",
        }

    def donor_pin(self, member: str) -> dict[str, Any]:
        with zipfile.ZipFile(io.BytesIO(self.data)) as archive:
            digest = sha256_hex(archive.read(member))
        pin = {key: self.pin[key] for key in ("distribution", "version", "filename", "sha256")}
        return {**pin, "member": member, "member-sha256": digest}


def make_wheel(
    name: str, version: str, files: Mapping[str, str | bytes], executable: Sequence[str] = ()
) -> Wheel:
    """A wheel with a true RECORD."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path, data in dist_files(name, version, files).items():
            info = zipfile.ZipInfo(path)
            info.external_attr = (0o755 if path in executable else 0o644) << 16
            archive.writestr(info, data)
    return Wheel(name, version, out.getvalue())


class FakeSources:
    """Pinned inputs out of wheels in memory, machine code by module, and stages."""

    def __init__(
        self,
        *wheels: Wheel,
        code: Mapping[str, KernelCode] | None = None,
        stage: Stage | Unstaged | Callable[[Sequence[Compile]], Stage] | None = None,
    ) -> None:
        self._wheels = {wheel.filename: wheel.data for wheel in wheels}
        self._code, self._stage = code or {}, stage
        #: modules whose code was asked for
        self.read: list[str] = []
        #: names of the changes that stages were asked for, together
        self.asked: list[list[str]] = []

    def code(self, tree: Tree, path: str, wanted: Kernels, digest: str) -> KernelCode:
        del tree, wanted, digest
        self.read.append(path)
        return self._code[path]

    def stage(
        self,
        ops: Sequence[Compile],
        packages: Mapping[str, str],
        target: Target,
        module: Callable[[str], str],
    ) -> Stage | Unstaged | None:
        del packages, target, module
        self.asked.append([op.change_name for op in ops])
        return self._stage(ops) if callable(self._stage) else self._stage

    def _open(self, pin: InputPin) -> zipfile.ZipFile:
        return zipfile.ZipFile(io.BytesIO(self._wheels[pin.filename]))

    def donor(self, pin: DonorPin) -> bytes:
        with self._open(pin) as archive:
            return archive.read(pin.member)

    def members(self, pin: InputPin) -> list[Member]:
        with self._open(pin) as archive:
            return wheel_members(archive)

    def member(self, pin: InputPin, path: str) -> bytes:
        with self._open(pin) as archive:
            return archive.read(path)


def make_layer(name: str = "fix", *ops: Table, **changes: Any) -> Layer:
    """A rendered layer with one variant for every vLLM, unless the test says otherwise."""
    wheels: Sequence[Wheel] = changes.pop("wheels", ())
    donors: Sequence[Table] = changes.pop("donors", ())
    variant = {"name": "only", "when": {"vllm": ">=0.1.0"}, "ops": list(ops)}
    rendered = {
        "name": name,
        "summary": f"what {name} does",
        "order": 50,
        "after": [],
        "package": "vllm",
        "provenance": {"last-update": "2026-01-02"},
        "upstream": [],
        "not-applicable": [],
        "variants": [{**variant, **changes.pop("variant", {})}],
        "pins": {"wheel": [w.pin for w in wheels], "donor": list(donors)},
        **changes,
    }
    return Layer.read(rendered)


def altered(layer: Layer, **changes: Any) -> Layer:
    """A layer with other JSON in some places."""
    return Layer.read({**layer.rendered, **changes})


def replace_op(old: str, new: str, file: str = "vllm/core.py", count: int = 1) -> Table:
    """A rendered ``replace`` op."""
    return {"op": "replace", "file": file, "old": old, "new": new, "count": count}


def env_op(name: str, value: str, **more: str) -> Table:
    """A rendered ``env`` op."""
    return {"op": "env", "name": name, "value": value, **more}


def copy_op(to: str, data: bytes) -> Table:
    """A rendered ``copy`` op."""
    return {"op": "copy", "from": "file", "to": to, "data": base64.b64encode(data).decode()}


#: The smallest layer that changes something.
BACKEND = replace_op("BACKEND = 'cutlass'", "BACKEND = 'b12x'")


def judged(
    layer: Layer,
    tree: Tree | Mapping[str, bytes],
    *wheels: Wheel,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """A layer judged on a tree, or on a dict of files."""
    view = MemoryTree(tree) if isinstance(tree, dict) else tree
    return judge(layer, view, FakeSources(*wheels), TARGET, env)  # type: ignore[arg-type]


def write_tree(root: Path, files: Mapping[str, bytes]) -> Path:
    """Put files on disk."""
    for path, data in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return root


def snapshot(root: Path) -> dict[str, tuple[int, int, bytes] | None]:
    """Everything below a directory: mode, mtime and bytes of files; None for directories.

    Of our own state only the receipts count: backups and the lock are not part of the tree.
    """
    found: dict[str, tuple[int, int, bytes] | None] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if name.startswith(f"{STATE_DIR}/") and not name.startswith(RECEIPTS):
            continue
        info = path.stat()
        data = None if path.is_dir() else (info.st_mode, info.st_mtime_ns, path.read_bytes())
        found[name] = data
    return found


def apply_to(root: Path, *layers: Layer, wheels: Sequence[Wheel] = ()) -> list[str]:
    """Apply layers to a real directory; gives their states."""
    outcomes = apply_layers(root, layers, FakeSources(*wheels), TARGET)
    return [outcome.state for outcome in outcomes]


def revert_from(root: Path, *names: str, force: bool = False) -> list[str]:
    """Revert the named layers (all, when none is named)."""
    with Store(root) as store:
        return store.revert(names or None, force)


def identity_of(tree: Tree, kind: str = "pypi", **changes: Any) -> BaseIdentity:
    """What a tree would be identified as."""
    values: dict[str, Any] = {
        "kind": kind,
        "ref": f"{kind}:vllm==0.20.1",
        "digest": f"sha256:{sha256_hex(canonical_json(versions(tree)))}",
        "platform": Platform(),
        "site_packages": "/usr/lib/python3/dist-packages",
        "packages": versions(tree),
    }
    return BaseIdentity(**{**values, **changes})


@dataclass(frozen=True, kw_only=True)
class FakeImage(InFiles):
    """An image with these files, which is no overlay."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    in_engine: bool = False
    brought: tuple[str, ...] = ()


def subject_of(
    tree: Tree, kind: str = "pypi", image: OpenImage | None = None, **changes: Any
) -> Subject:
    """A tree as it would be opened."""
    return Subject(identity_of(tree, kind, **changes), tree, image)


def fake_base(files: Mapping[str, bytes], kind: str = "pypi", **changes: Any) -> Subject:
    """An identified base of files in memory."""
    return subject_of(MemoryTree(files), kind, **changes)


def of_env(target: VerifyTarget, env: Mapping[str, str]) -> VerifyTarget:
    """A target that sets other variables."""
    identity = replace(target.subject.identity, env=env)
    return replace(target, subject=replace(target.subject, identity=identity))


def of_files(target: VerifyTarget, tree: Tree, **changes: Any) -> VerifyTarget:
    """A target that has other files."""
    return replace(target, subject=replace(target.subject, tree=tree), **changes)


def every_base_is(patch: pytest.MonkeyPatch, base: Subject) -> None:
    """References of every kind name this base, for all commands."""
    for scheme in IDENTIFIERS:
        patch.setitem(IDENTIFIERS, scheme, lambda _request, _rest: base)


@dataclass(frozen=True, kw_only=True)
class FakeRunner:
    """Answers probes with functions, and refuses those that it has none for."""

    ask: Callable[[DispatchRequest], DispatchReply] | None = None
    compiler: Callable[[CodegenRequest], CodegenReply] | None = None
    launcher: Callable[[Mapping[str, Any]], Replies] | None = None
    gpu: Callable[[str], VerifierDocument] | None = None
    why: str = "no sandbox"
    #: the same for other files
    others: Callable[[Tree, Mapping[str, str]], FakeRunner] | None = None

    def dispatch(self, request: DispatchRequest) -> DispatchReply | Refusal:
        return attempt(self.ask, request) if self.ask else Refusal(self.why)

    def compile(self, request: CodegenRequest) -> CodegenReply | Refusal:
        return attempt(self.compiler, request) if self.compiler else Refusal(self.why)

    def launch(self, request: Mapping[str, Any]) -> Replies | Refusal:
        return attempt(self.launcher, request) if self.launcher else Refusal(self.why)

    def on_gpu(self, _plan: PlanDocument, level: str) -> VerifierDocument | Refusal:
        return attempt(self.gpu, level) if self.gpu else Refusal(self.why)

    def on(self, tree: Tree, env: Mapping[str, str]) -> FakeRunner:
        return replace(self.others(tree, env), others=self.others) if self.others else self


def no_sandbox(patch: pytest.MonkeyPatch) -> None:
    """Nothing can be asked in a sandbox, and none is made."""
    patch.setattr(InSandbox, "dispatch", lambda *_: Refusal("no sandbox"))
    patch.setattr(InSandbox, "maker", lambda _probe: None)
    patch.setattr(InSandbox, "common_maker", lambda _probe: None)
    patch.setattr(InSandbox, "ahead", lambda *_: None)


def make_plan_of(base: Subject, *layers: Layer, wheels: Sequence[Wheel] = ()) -> BuildPlan:
    """A plan of layers on a base, without a catalogue."""
    steps = judge_in_order(
        layers, base.tree, FakeSources(*wheels), base.identity.platform.target, base.identity.env
    )
    decisions = tuple(
        LayerDecision(layer=s.layer, outcome=s.outcome, receipt=s.receipt, changes=s.changes)
        for s in steps
    )
    return BuildPlan(
        name="test",
        profiles=("test",),
        base=base.identity,
        decisions=decisions,
        expect=(),
        maker=maker(),
        epoch=epoch_for(base.identity, layers),
    )


#: The op that most layers of tests have: one line of :func:`vllm_files`.
REPLACE = """\
op = "replace"
file = "vllm/core.py"
old = "BACKEND = 'cutlass'"
new = "BACKEND = 'b12x'"
"""


def layer_text(op: str, *, when: str = ">=0.20.0,<0.30.0rc0", summary: str = "a fix") -> str:
    """A ``layer.toml`` with one variant and one op; ``when`` is a range of vLLM."""
    return f"""\
summary = "{summary}"
order = 50
package = "vllm"

[provenance]
origin = "vendor, our own"
forwarded = "no"
applied-upstream = "no"
last-update = 2026-01-02

[[variant]]
name = "only"
when = {{ vllm = "{when}" }}

[[variant.op]]
{op}"""
