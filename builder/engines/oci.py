"""The embedded engine: writes a deterministic OCI image layout; needs no daemon and no root.

For a ``pypi:`` base the image is an overlay: only the changed and added files, at the paths they
have in the image they are meant for.  Removed ones stand in the receipts.

Deterministic: entries sorted, owner 0:0, modes 0644/0755, one timestamp (``bake.timestamp``), gzip
level 6 with no name and no time.
"""

from __future__ import annotations

import datetime
import gzip
import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from builder import bake
from builder.console import console, megabytes
from builder.engines import BuildRequest, BuiltImage
from builder.errors import BuildFailed, UsageError
from builder.locks import locked

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from builder.model import BuildPlan
    from builder.runtime.spark_apply import Content

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
WHITEOUT = ".wh."


@dataclass(frozen=True)
class Blob:
    """A blob in the layout, and for layers the digest of the uncompressed tar."""

    digest: str
    size: int
    media_type: str
    diff_id: str = ""

    def descriptor(self) -> dict[str, Any]:
        """The OCI content descriptor."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


class _HashingWriter(io.RawIOBase):
    """Passes bytes on and keeps their sha256 and count."""

    def __init__(self, out: IO[bytes] | io.RawIOBase | gzip.GzipFile) -> None:
        super().__init__()
        self._out, self._sha, self.size = out, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._sha.update(data)
        self.size += len(data)
        self._out.write(data)
        return len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._sha.hexdigest()}"


def tar_layer(
    out: IO[bytes], files: Mapping[str, Content | None], epoch: int
) -> tuple[str, str, int]:
    """Write a gzipped layer tar: ``(digest, diff_id, compressed size)``.

    ``files`` maps absolute paths to content, or None for a file that goes away (a whiteout).
    """
    compressed = _HashingWriter(out)
    with gzip.GzipFile("", "wb", compresslevel=6, fileobj=compressed, mtime=0) as packer:
        plain = _HashingWriter(packer)
        with tarfile.open(None, "w|", fileobj=plain, format=tarfile.PAX_FORMAT) as tar:
            for name, content in _entries(files):
                info = tarfile.TarInfo(name)
                info.mtime = epoch
                if content == "dir":
                    info.type, info.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(info)
                elif content is None:
                    info.mode = 0o644
                    tar.addfile(info)
                else:
                    info.mode, info.size = content.mode, content.size
                    tar.addfile(info, io.BytesIO(content.read()))
    return compressed.digest, plain.digest, compressed.size


def _entries(files: Mapping[str, Content | None]) -> Iterable[tuple[str, Any]]:
    """Directories before their files, all sorted, whiteouts in OCI form."""
    named: dict[str, Any] = {}
    for path, content in files.items():
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts)):
            named.setdefault("/".join(parts[:depth]), "dir")
        if content is None:
            named["/".join([*parts[:-1], WHITEOUT + parts[-1]])] = None
        else:
            named["/".join(parts)] = content
    return sorted(named.items())


class Layout:
    """An OCI image layout that is being written next to its final place."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs" / "sha256").mkdir(parents=True)

    def _path(self, digest: str) -> Path:
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def add_layer(self, files: Mapping[str, Content | None], epoch: int) -> Blob:
        """Add a layer of absolute paths."""
        partial = self.root / "blobs" / "partial"
        with partial.open("wb") as out:
            digest, diff_id, size = tar_layer(out, files, epoch)
        partial.replace(self._path(digest))
        return Blob(digest, size, LAYER_TYPE, diff_id)

    def add_json(self, value: object, media_type: str) -> Blob:
        """Add a JSON blob."""
        data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self._path(digest).write_bytes(data)
        return Blob(digest, len(data), media_type)

    def finish(self, manifest: Blob, platform: Mapping[str, str], name: str) -> None:
        """Write ``index.json`` and ``oci-layout``."""
        entry = {
            **manifest.descriptor(),
            "platform": dict(platform),
            "annotations": {"org.opencontainers.image.ref.name": name},
        }
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}
        (self.root / "index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
        (self.root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n')


def image_layers(plan: BuildPlan) -> list[tuple[str, dict[str, Content | None]]]:
    """The image's layers as ``(what it is, absolute path -> content)``, bottom first.

    An overlay stands on nothing, so it holds no whiteouts (an engine cannot unpack one of a file
    that is not below it): its receipts say what goes away, and ``spark_apply.py finish`` does it.
    """
    alone = plan.base.kind == "pypi"
    site = plan.base.site_packages
    layers: list[tuple[str, dict[str, Content | None]]] = []
    for decision in plan.needed:
        files = {
            f"{site}/{path}": content
            for path, content in decision.changes.items()
            if content is not None or not alone
        }
        layers.append((decision.name, files))
    layers.append(("spark-build", dict(bake.baked_files(plan))))
    return layers


def layout_digest(layout: Path) -> str:
    """The manifest digest of a single-image layout.

    Raises:
        UsageError: the directory is not such a layout.
    """
    try:
        index = json.loads((layout / "index.json").read_bytes())
        (entry,) = index["manifests"]
        digest: str = entry["digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{layout} is not an OCI layout of one image: {error}") from None
    return digest


class OciEngine:
    """Writes the overlay itself."""

    name = "oci"

    def missing(self) -> str | None:
        return None

    def refuses(self, plan: BuildPlan) -> str | None:
        if plan.base.kind == "pypi":
            return None
        return (
            f"the oci engine builds overlays for pypi: bases; {plan.base.ref} is a "
            f"{plan.base.kind} base, which needs --engine buildkit"
        )

    def render(self, plan: BuildPlan) -> str:
        """The Dockerfile lines with which the overlay goes onto an image."""
        return overlay_recipe(plan, "oci:OVERLAY")

    def build(self, request: BuildRequest) -> BuiltImage:
        if request.push or request.output is None:
            raise UsageError(
                "the oci engine writes a layout on disk and does not push it",
                hint="skopeo copy oci:DIR docker://REGISTRY/NAME:TAG",
            )
        target = request.output.absolute()
        self._check_target(target)
        with locked(str(target), wait=False):
            manifest, added = self._replace(target, request)
        return BuiltImage(
            ref=f"oci:{request.output}", digest=manifest.digest, added_bytes=added, engine=self.name
        )

    def _replace(self, target: Path, request: BuildRequest) -> tuple[Blob, int]:
        """Write beside the target, then rename: it is the old layout or the new one, never half."""
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            manifest, added = self._write(Layout(work / "layout"), request)
            self._swap(work / "layout", target, work / "previous")
        except OSError as error:
            raise BuildFailed(
                f"cannot write {target}: {error.strerror}; nothing was left there",
                hint="free some space, or choose another place with --output oci:DIR",
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return manifest, added

    @staticmethod
    def _swap(layout: Path, target: Path, previous: Path) -> None:
        try:
            if target.exists():
                target.rename(previous)
            layout.rename(target)
        except BaseException:
            if previous.exists() and not target.exists():
                previous.rename(target)
            raise

    @staticmethod
    def _check_target(target: Path) -> None:
        ours = (target / "oci-layout").is_file() or not target.exists()
        if not ours and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(
                f"{target} exists and is not an OCI layout, so it is not replaced",
                hint="choose another place with --output oci:DIR",
            )

    def _write(self, layout: Layout, request: BuildRequest) -> tuple[Blob, int]:
        plan = request.plan
        epoch = bake.timestamp(plan)
        created = datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        )
        blobs, history = [], []
        for name, files in image_layers(plan):
            blob = layout.add_layer(files, epoch)
            console.say(f"  {name:<22}{len(files):>5} files {megabytes(blob.size):>10}")
            blobs.append(blob)
            history.append({"created": created, "created_by": f"spark-build layer {name}"})
        platform = {"architecture": plan.base.platform.architecture, "os": "linux"}
        config = layout.add_json(
            {
                **platform,
                "created": created,
                "config": {
                    "Env": [f"{k}={v}" for k, v in sorted(plan.env.items())],
                    "Labels": bake.labels(plan),
                },
                "rootfs": {"type": "layers", "diff_ids": [b.diff_id for b in blobs]},
                "history": history,
            },
            CONFIG_TYPE,
        )
        manifest = layout.add_json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "config": config.descriptor(),
                "layers": [b.descriptor() for b in blobs],
                "annotations": bake.labels(plan),
            },
            MANIFEST_TYPE,
        )
        layout.finish(manifest, platform, request.tag)
        return manifest, sum(b.size for b in blobs)


def overlay_recipe(plan: BuildPlan, overlay: str) -> str:
    """How an overlay (``oci:DIR`` or an image name) goes onto the image it is meant for.

    Plain Dockerfile lines: copied files, then one step that takes replaced files away and checks
    the others against their receipts.
    """
    base = f"vllm/vllm-openai:v{plan.base.packages.get('vllm')}"
    python, site = plan.base.interpreter, plan.base.site_packages
    script = f"{bake.SHARE}/spark_apply.py"
    finish = json.dumps([python, "-B", script, "finish", "--root", site])
    source, how = overlay, "docker buildx build -t IMAGE -"
    if overlay.startswith("oci:"):
        folder = Path(overlay.removeprefix("oci:")).absolute()
        how = f"docker buildx build --build-context overlay=oci-layout://{folder} -t IMAGE -"
        source = "overlay"
    lines = [
        f"# {how} <this file",
        f"FROM {base}",
        f"COPY --from={source} / /",
        f"RUN --network=none {finish}",
        *(f"ENV {name}={bake.quoted(value)}" for name, value in sorted(plan.env.items())),
    ]
    return "\n".join(lines) + "\n"


def read_layout(layout: Path) -> tuple[dict[str, Any], dict[str, bytes | None], dict[str, str]]:
    """An overlay layout as ``(plan, absolute path -> bytes or None for a whiteout, env)``.

    Every blob is checked against its digest.

    Raises:
        UsageError: it is not a layout of ours, or a blob is damaged.
    """

    def blob(digest: str) -> bytes:
        try:
            data = (layout / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes()
        except OSError as error:
            raise UsageError(f"{layout}: blob {digest} cannot be read: {error}") from None
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise UsageError(f"{layout}: blob {digest} is damaged")
        return data

    manifest = json.loads(blob(layout_digest(layout)))
    config = json.loads(blob(manifest["config"]["digest"]))
    files: dict[str, bytes | None] = {}
    for descriptor in manifest["layers"]:
        data = io.BytesIO(blob(descriptor["digest"]))
        with tarfile.open(fileobj=data, mode="r:gz") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                folder, _, name = f"/{member.name}".rpartition("/")
                extracted = tar.extractfile(member)
                assert extracted is not None
                if name.startswith(WHITEOUT):
                    files[f"{folder}/{name.removeprefix(WHITEOUT)}"] = None
                else:
                    files[f"{folder}/{name}"] = extracted.read()
    plan_bytes = files.get(f"{bake.SHARE}/plan.json")
    if plan_bytes is None:
        raise UsageError(f"{layout} was not made by spark-build: it carries no plan")
    env = dict(item.split("=", 1) for item in config["config"].get("Env", []))
    return json.loads(plan_bytes), files, env
