"""OCI layouts for tests: read one, and make a changed copy that is consistent in itself."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


class Layout:
    """A layout of one image on disk.  Blobs are replaced, never written into: copies share them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def copy(self, target: Path) -> Layout:
        """A second layout that costs no disk."""
        shutil.copytree(self.root, target, copy_function=os.link)
        return Layout(target)

    def path(self, digest: str) -> Path:
        """Where a blob lies."""
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def json(self, digest: str) -> Any:
        """A blob that is JSON."""
        return json.loads(self.path(digest).read_bytes())

    @property
    def index(self) -> Any:
        """``index.json``."""
        return json.loads((self.root / "index.json").read_bytes())

    @property
    def digest(self) -> str:
        """The manifest's digest."""
        (entry,) = self.index["manifests"]
        return str(entry["digest"])

    @property
    def manifest(self) -> Any:
        """The manifest."""
        return self.json(self.digest)

    @property
    def config(self) -> Any:
        """The image's configuration."""
        return self.json(self.manifest["config"]["digest"])

    def files(self, number: int) -> dict[str, bytes]:
        """Files of a layer by name, with their bytes."""
        data = self.path(self.manifest["layers"][number]["digest"]).read_bytes()
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
            found = {}
            for member in tar:
                stream = tar.extractfile(member)
                if stream is not None:
                    found[member.name] = stream.read()
            return found

    def layer_with(self, name: str) -> int:
        """The number of the layer that holds a file, by the end of its name."""
        layers = range(len(self.manifest["layers"]))
        return next(n for n in layers if any(f.endswith(name) for f in self.files(n)))

    # -- changes, each followed through to index.json

    def put(self, data: bytes) -> dict[str, Any]:
        """Add a blob; its digest and size."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.path(digest).unlink(missing_ok=True)
        self.path(digest).write_bytes(data)
        return {"digest": digest, "size": len(data)}

    def put_json(self, value: object) -> dict[str, Any]:
        """Add a JSON blob."""
        return self.put(json.dumps(value).encode())

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Make a manifest the layout's one."""
        index = self.index
        index["manifests"][0].update(self.put_json(manifest))
        target = self.root / "index.json"
        target.unlink()
        target.write_text(json.dumps(index))

    def change_config(self, change: Callable[[Any], None]) -> None:
        """Edit the configuration."""
        manifest, config = self.manifest, self.config
        change(config)
        manifest["config"].update(self.put_json(config))
        self.finish(manifest)

    def drop_layer(self, number: int) -> None:
        """Take a whole layer away."""
        manifest, config = self.manifest, self.config
        del manifest["layers"][number]
        del config["rootfs"]["diff_ids"][number]
        manifest["config"].update(self.put_json(config))
        self.finish(manifest)

    def change_layer(self, number: int, changed: Mapping[str, bytes]) -> None:
        """Replace or add files of a layer, with every digest made right again."""
        files = {**self.files(number), **changed}
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w") as tar:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(data), 0o644
                tar.addfile(info, io.BytesIO(data))
        manifest, config = self.manifest, self.config
        diff_id = hashlib.sha256(plain.getvalue()).hexdigest()
        config["rootfs"]["diff_ids"][number] = f"sha256:{diff_id}"
        manifest["config"].update(self.put_json(config))
        manifest["layers"][number].update(self.put(gzip.compress(plain.getvalue(), mtime=0)))
        self.finish(manifest)
