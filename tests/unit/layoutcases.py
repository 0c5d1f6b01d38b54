"""Layouts of chance, from a seed: documents that lie, with digests that are right all the same."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backports import zstd

from builder.images.registry.model import (
    DOCKER_CONFIG,
    DOCKER_INDEX,
    DOCKER_LAYER_GZIP,
    DOCKER_MANIFEST,
    OCI_CONFIG,
    OCI_EMPTY,
    OCI_INDEX,
    OCI_LAYER_GZIP,
    OCI_MANIFEST,
)
from tests.unit.imagefiles import Item, diff_id, folder, tar_of

if TYPE_CHECKING:
    import random
    from pathlib import Path

#: The name of the image in each layout.
NAME = "case"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
TYPES = (
    OCI_CONFIG, OCI_EMPTY, OCI_INDEX, OCI_LAYER_GZIP, OCI_MANIFEST, DOCKER_CONFIG, DOCKER_INDEX,
    DOCKER_LAYER_GZIP, DOCKER_MANIFEST, _LAYER, f"{_LAYER}+zstd", f"{_LAYER}+gzip+encrypted",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
    "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar", "text/html", "", OCI_LAYER_GZIP.upper(),
    f"{OCI_LAYER_GZIP}; charset=utf-8",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, -1, 1.5, 1 << 70, "", "x", "layers", "linux", "windows", "arm64",
    "amd64", "v8", "v9", "1.0.0", "sha256:", "\0", "\ud800", [], ["x"], [None], {}, {"a": 1},
    {"a": None}, "2026-05-06T07:08:09Z", "yesterday", *TYPES,
)  # fmt: skip
#: Names that Go's decoder takes for others: it ignores case, and folds two more letters.
_FOLDS = str.maketrans({"s": "\u017f", "k": "\u212a"})
JUNK = ("junk", "urls", "data", "subject", "platform", "annotations", "artifactType", "os.features")


def tars() -> list[bytes]:
    """The layers of every layout."""
    lower = tar_of(folder("a"), Item("a/x", b"1"), Item("b", b"2"))
    return [lower, tar_of(Item("a/.wh.x"), Item("a/y", b"3"))]


@dataclass
class Case:
    """One layout: its documents, and what is written for each in the end."""

    index: Any
    manifest: Any
    config: Any
    layers: list[bytes]
    marker: Any = field(default_factory=lambda: {"imageLayoutVersion": "1.0.0"})
    #: how the bytes of a document differ from its JSON
    raw: dict[str, str] = field(default_factory=dict)
    #: what to do with the files in the end
    files: str = ""


def plain() -> Case:
    """A layout that every runtime unpacks."""
    layers = [gzip.compress(tar, 1, mtime=0) for tar in tars()]
    config = {
        "architecture": "arm64",
        "os": "linux",
        "created": "2026-05-06T07:08:09Z",
        "config": {"Env": ["PATH=/bin"], "Labels": {"a": "b"}, "Entrypoint": ["/b"], "User": "0"},
        "rootfs": {"type": "layers", "diff_ids": [diff_id(layer) for layer in layers]},
        "history": [{"created_by": "one"}, {"created_by": "two", "empty_layer": False}],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": {"mediaType": OCI_CONFIG},
        "layers": [descriptor(layer, OCI_LAYER_GZIP) for layer in layers],
    }
    entry = {"mediaType": OCI_MANIFEST, "annotations": {"org.opencontainers.image.ref.name": NAME}}
    index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}
    return Case(index=index, manifest=manifest, config=config, layers=layers)


def descriptor(data: bytes, media_type: str) -> dict[str, Any]:
    """A descriptor of some bytes."""
    return {
        "mediaType": media_type,
        "digest": f"sha256:{hashlib.sha256(data).hexdigest()}",
        "size": len(data),
    }


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a document with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in list(pairs):
        found.append((value, key))
        if isinstance(item, (dict, list)):
            found += _places(item)
    return found


def _mutate(dice: random.Random, document: Any) -> None:
    """Change one thing in a document."""
    places = _places(document)
    if not places:
        return
    where, key = dice.choice(places)
    chance = dice.random()
    if chance < 0.45:
        where[key] = copy.deepcopy(dice.choice(VALUES))
    elif chance < 0.6:
        del where[key]
    elif chance < 0.7 and isinstance(key, str):
        other = dice.choice((key.upper(), key.capitalize(), key.translate(_FOLDS), key.lower()))
        where[other] = where[key] if dice.random() < 0.5 else copy.deepcopy(dice.choice(VALUES))
        if dice.random() < 0.5:
            where.pop(key, None) if other != key else None
    elif chance < 0.85 and isinstance(where, dict):
        where[dice.choice(JUNK)] = copy.deepcopy(dice.choice(VALUES))
    elif isinstance(where, list):
        where.append(copy.deepcopy(dice.choice([*where, *VALUES])))
    elif isinstance(where[key], str):
        where[key] = dice.choice((where[key].upper(), where[key] + "x", where[key][:-1], " "))


_RAW = ("bom", "utf-16", "trailing", "nan", "twice", "comment", "blank", "latin", "deep", "cut")


def _written(document: Any, how: str, dice: random.Random) -> bytes:
    """The bytes of a document."""
    text = json.dumps(document)
    if how == "nan" and text.startswith("{"):
        text = '{"junk": NaN, ' + text[1:] if len(text) > 2 else '{"junk": NaN}'
    if how == "twice" and isinstance(document, dict) and document:
        key = dice.choice(sorted(document))
        again = json.dumps({key: copy.deepcopy(dice.choice(VALUES))})
        text = f"{again[:-1]}, {text[1:]}" if dice.random() < 0.5 else f"{text[:-1]}, {again[1:]}"
    if how == "deep" and text.startswith("{"):
        text = (
            '{"junk": ' + "[" * 11_000 + "]" * 11_000 + (", " if len(text) > 2 else "") + text[1:]
        )
    text += {"trailing": " {}", "comment": " // x", "blank": "\n \t\n"}.get(how, "")
    data = text.encode("utf-16" if how == "utf-16" else "utf-8", "surrogatepass")
    data = b"\xef\xbb\xbf" + data if how == "bom" else data
    data = data.replace(b"x", b"\xff", 1) if how == "latin" else data
    return data[:-1] if how == "cut" else data


def _layers(dice: random.Random, case: Case) -> None:
    """Change the layers, with descriptors that are right or nearly."""
    at = dice.randrange(len(case.layers))
    tar = gzip.decompress(case.layers[at])
    data = dice.choice((tar, zstd.compress(tar), gzip.compress(tar), tar[:700], b"", b"{}"))
    kind = dice.choice((*TYPES, OCI_LAYER_GZIP, _LAYER, f"{_LAYER}+zstd"))
    case.layers[at] = data
    case.manifest["layers"][at] = descriptor(data, kind)
    if dice.random() < 0.7:
        case.config["rootfs"]["diff_ids"][at] = diff_id(data)


_FILES = ("no manifest", "no layer", "link", "folder", "no marker", "longer layer", "other layer")


def random_case(dice: random.Random) -> Case:
    """A layout with one to three changes."""
    case = plain()
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        chance = dice.random()
        if chance < 0.15:
            if isinstance(case.manifest.get("layers"), list) and len(case.manifest["layers"]) == 2:
                _safely(_layers, dice, case)
        elif chance < 0.75:
            parts = (case.config, case.manifest, case.index, case.manifest, case.config)
            _mutate(dice, dice.choice((*parts, case.marker)))
        elif chance < 0.92:
            case.raw[dice.choice(("config", "manifest", "index", "marker"))] = dice.choice(_RAW)
        else:
            case.files = dice.choice(_FILES)
    return case


def _safely(change: Any, dice: random.Random, case: Case) -> None:
    try:
        change(dice, case)
    except (KeyError, TypeError, IndexError, AttributeError, OSError):  # changed already
        return


def _fill(where: Any, data: bytes) -> None:
    """The digest and size of a document in what names it, unless a change put others there."""
    if isinstance(where, dict):
        said = descriptor(data, "")
        where.setdefault("digest", said["digest"])
        where.setdefault("size", said["size"])


def write_case(root: Path, case: Case, dice: random.Random) -> None:
    """Write a layout."""
    blobs = root / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes) -> Path:
        path = blobs / hashlib.sha256(data).hexdigest()
        path.write_bytes(data)
        return path

    layers = [put(layer) for layer in case.layers]
    config = _written(case.config, case.raw.get("config", ""), dice)
    put(config)
    manifest = case.manifest
    _fill(manifest.get("config") if isinstance(manifest, dict) else None, config)
    data = _written(manifest, case.raw.get("manifest", ""), dice)
    written = put(data)
    entries = case.index.get("manifests") if isinstance(case.index, dict) else None
    _fill(entries[0] if isinstance(entries, list) and entries else None, data)
    (root / "index.json").write_bytes(_written(case.index, case.raw.get("index", ""), dice))
    marker = root / "oci-layout"
    marker.write_bytes(_written(case.marker, case.raw.get("marker", ""), dice))
    _files(case.files, written, layers[-1], marker)


def _files(how: str, manifest: Path, layer: Path, marker: Path) -> None:
    if how == "no manifest":
        manifest.unlink()
    elif how == "no layer":
        layer.unlink()
    elif how == "no marker":
        marker.unlink()
    elif how == "longer layer":
        layer.write_bytes(layer.read_bytes() + b"x")
    elif how == "other layer":
        layer.write_bytes(bytes(layer.stat().st_size))
    elif how == "link":
        layer.rename(layer.with_name("other"))
        layer.symlink_to("other")
    elif how == "folder":
        layer.unlink()
        layer.mkdir()
