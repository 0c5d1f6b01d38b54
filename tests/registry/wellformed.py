"""Whether an image is one by the OCI image specification: three strangers are asked.

The specification's own JSON Schemas (keys and types of every document), ``oci-image-tool`` (media
types, sizes, references of a layout) and ``crane validate`` (digests, sizes and diff_ids of an
image in a registry).  Each finds what the others let pass; ``test_wellformed.py`` shows that.
"""

from __future__ import annotations

import json
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import jsonschema
import referencing
import referencing.jsonschema

from builder.images.registry.model import OCI_CONFIG, OCI_INDEX, OCI_MANIFEST
from tests.engine import cache, debs

from . import servers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.machine import Programs

#: Debian's packages of the specification and of its validator, and the suites they are taken from.
SPECIFICATION = ("forky", "golang-github-opencontainers-image-spec-dev")
VALIDATOR = ("bookworm", "oci-image-tool")
#: Which schema a document has, by its media type.
_SCHEMAS = {
    OCI_INDEX: "image-index-schema.json",
    OCI_MANIFEST: "image-manifest-schema.json",
    OCI_CONFIG: "config-schema.json",
}
_LAYOUT = "image-layout-schema.json"


class NotWellFormed(AssertionError):
    """What one of the validators has found."""


def _package(suite: str, name: str) -> Path:
    """The files of a Debian package, unpacked beside the system."""
    make = partial(debs.unpack, suite, (name,))
    return cache.entry(f"{name}/{cache.key(suite)}", lambda work: make(work / "tree")) / "tree"


@lru_cache
def _schema_folder() -> Path:
    return next(_package(*SPECIFICATION).rglob("image-manifest-schema.json")).parent


def _retrieve(uri: str) -> referencing.Resource[Any]:
    """The schemas name each other by file, whatever their own addresses are."""
    contents = json.loads((_schema_folder() / uri.rpartition("/")[2]).read_text())
    return referencing.jsonschema.DRAFT4.create_resource(contents)


def document(value: object, schema: str, where: str) -> None:
    """Hold a document against one of the specification's schemas."""
    found = _retrieve(schema).contents
    held = jsonschema.Draft4Validator(found, registry=referencing.Registry(retrieve=_retrieve))  # type: ignore[call-arg]
    error = jsonschema.exceptions.best_match(held.iter_errors(value))
    if error is not None:
        raise NotWellFormed(f"{where}: {error.json_path}: {error.message}")


def manifest(data: bytes, media_type: str, where: str = "manifest") -> None:
    """Hold a manifest or index against its schema; its own word on its type must be true."""
    value = json.loads(data)
    document(value, _SCHEMAS[media_type], where)
    if value.get("mediaType", media_type) != media_type:
        raise NotWellFormed(f"{where}: it calls itself {value['mediaType']}")


def layout(path: Path) -> int:
    """Hold every document of a layout against its schema, and ask the validator; how many."""
    document(json.loads((path / "oci-layout").read_bytes()), _LAYOUT, "oci-layout")
    index = json.loads((path / "index.json").read_bytes())
    document(index, _SCHEMAS[OCI_INDEX], "index.json")
    pending, seen = list(index["manifests"]), 0
    while pending:
        entry = pending.pop()
        seen += 1
        blob = path / "blobs" / entry["digest"].replace(":", "/")
        value = json.loads(blob.read_bytes())
        document(value, _SCHEMAS[entry["mediaType"]], entry["digest"])
        if entry["mediaType"] != OCI_CONFIG:
            manifest(blob.read_bytes(), entry["mediaType"], entry["digest"])
            pending += value.get("manifests", [value.get("config")])
    tool = _package(*VALIDATOR) / "usr" / "bin" / "oci-image-tool"
    try:
        cache.call(tool, "validate", "--type", "image", path)
    except cache.MachineError as error:
        raise NotWellFormed(str(error)) from None
    return seen


def remote(name: str) -> None:
    """Ask crane about an image or index at a registry: every blob is read."""
    try:
        cache.call(servers.CranePrograms().program("crane"), "validate", "--remote", name)
    except cache.MachineError as error:
        raise NotWellFormed(str(error)) from None


def published(programs: Programs, name: str, folder: Path) -> int:
    """All three about an image or index at a registry, which skopeo takes into ``folder``."""
    remote(name)
    words = ("copy", "-q", "--all", "--src-tls-verify=false", f"docker://{name}")
    servers.skopeo(programs, *words, f"oci:{folder}:x")
    return layout(folder)
