"""Descriptors, manifests, indexes and configurations, and the interface of what stores them.

All are parsed from untrusted bytes.  Names, types and limits are those of the OCI image and
distribution specifications; Docker's agree.

Entries of an index match platforms like containerd's: ``arm64`` is ``arm64/v8`` and ``amd64`` is
``amd64/v1`` (``platforms.Normalize``).  An entry for a later variant is for another platform.
Linux reports every 64-bit Arm processor as v8, including those of the DGX Spark, so no runtime
there selects an entry for ``arm64/v9``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Protocol

from builder.common.plan import is_default, usual_architecture
from builder.errors import RemoteError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
OCI_EMPTY = "application/vnd.oci.empty.v1+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER_GZIP = "application/vnd.docker.image.rootfs.diff.tar.gzip"

INDEX_TYPES = (OCI_INDEX, DOCKER_INDEX)
MANIFEST_TYPES = (OCI_MANIFEST, DOCKER_MANIFEST)
#: Limit of a manifest's size; the distribution specification suggests the same 4 MiB.
MANIFEST_LIMIT = 4 * 1024 * 1024

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def sha256_digest(data: bytes) -> str:
    """``sha256:...`` of some bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


#: Levels of nested JSON that are read; plans, evidence and OCI documents have about ten.
_NESTING = 100


def parse_json(data: bytes | str) -> Any:
    """Parse untrusted JSON; raises ValueError for all errors, excessive nesting included.

    What readers take for different things is refused: another encoding than UTF-8, a byte order
    mark, numbers that JSON does not have or that no float holds, and a name twice in an object.
    """
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > _NESTING:
        _check_nesting(value)
    return value


def _check_nesting(value: Any) -> None:
    """Refuse what is nested deeper than any of our documents.

    Whether the parser itself refuses it depends on its Python and on the calls before; whoever
    writes the value again would fail.
    """
    level = [value]
    for _ in range(_NESTING + 1):
        parts = (item.values() if isinstance(item, dict) else item for item in level)
        level = [part for held in parts for part in held if isinstance(part, (dict, list))]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        twice = Counter(names).most_common(1)[0][0]  # in linear time
        raise ValueError(f"an object has the name {twice[:40]!r} twice")
    return unique


def _no_number(text: str) -> Any:
    raise ValueError(f"{text[:40]} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


#: A check for a value, and its description in messages.
Kind = tuple["Callable[[object], bool]", str]


def _is_text(value: object) -> bool:
    """A string without NUL, which no process environment can hold, and without half a letter."""
    return isinstance(value, str) and not _NO_TEXT.search(value)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_labels(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, (*value, *value.values())))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_INT64 <= value < _INT64


def _is_packed(value: object) -> bool:
    try:
        return isinstance(value, str) and base64.b64decode(value, validate=True) is not None
    except ValueError:
        return False


_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_INT64 = 1 << 63
TEXT: Kind = (_is_text, "a text")
TEXTS: Kind = (_is_texts, "a list of texts")
LABELS: Kind = (_is_labels, "an object of texts")
OBJECT: Kind = (lambda value: isinstance(value, dict), "an object")
LIST: Kind = (lambda value: isinstance(value, list), "a list")
NUMBER: Kind = (_is_number, "a whole number")
#: The fields of the OCI image specification ("Content Descriptors", "Image Manifest", "Image
#: Index"), with their types.
PLATFORM = {
    "architecture": TEXT, "os": TEXT, "os.version": TEXT, "os.features": TEXTS, "variant": TEXT,
}  # fmt: skip
DESCRIPTOR = {
    "mediaType": TEXT, "digest": TEXT, "size": NUMBER, "urls": TEXTS, "annotations": LABELS,
    "data": (_is_packed, "base64"), "platform": OBJECT, "artifactType": TEXT,
}  # fmt: skip
_BOTH = {
    "schemaVersion": (lambda value: value == 2 and _is_number(value), "2"),
    "mediaType": TEXT, "artifactType": TEXT, "subject": OBJECT, "annotations": LABELS,
}  # fmt: skip
MANIFEST: dict[str, Kind] = {**_BOTH, "config": OBJECT, "layers": LIST}
INDEX: dict[str, Kind] = {**_BOTH, "manifests": LIST}


def check_fields(
    value: Mapping[str, Any], kinds: Mapping[str, Kind], where: str, path: str = "", of: str = ""
) -> None:
    """Check the types of an object's fields; each may be missing or null.

    ``path`` begins the names of fields in messages, and ``of`` follows them.

    Raises:
        RemoteError: a field has another type, or a name that Go's decoder takes for a field's.
    """
    folded = {name.casefold(): name for name in kinds}
    for key, item in value.items():
        name = folded.get(key.casefold(), key)
        if name != key:
            raise RemoteError(
                f"{where}: {path}{key[:40]}{of} is {path}{name} for runtimes, which ignore case",
                hint=_MALFORMED,
            )
        if name in kinds:
            check_field(item, kinds[name], where, f"{path}{name}{of}")


def check_field(value: object, kind: Kind, where: str, name: str) -> None:
    """Check the type of one value, which may be null.

    Raises:
        RemoteError: it has another type; names it.
    """
    fits, wanted = kind
    if value is not None and not fits(value):
        shown = ascii(value) if isinstance(value, str) else repr(value)
        raise RemoteError(
            f"{where}: {name} is not {wanted}, but "
            f"{shown if len(shown) <= 100 else f'{shown[:100]}...'}",
            hint=_MALFORMED,
        )


_MALFORMED = "use another image; this one is malformed, and some runtimes cannot start it"


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """An OCI content descriptor.  ``size`` is in bytes."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    platform: Mapping[str, str] = field(default_factory=dict)
    artifact_type: str = ""
    #: where the content of a nondistributable layer is
    urls: tuple[str, ...] = ()

    @property
    def foreign(self) -> bool:
        """Whether the layer is nondistributable, so that registries need not have it."""
        return ".foreign." in self.media_type or ".nondistributable." in self.media_type

    @classmethod
    def parse(cls, value: object, where: str) -> Descriptor:
        """From untrusted JSON.

        Raises:
            RemoteError: it is not a descriptor with a sha256 digest and a size.
        """
        if not isinstance(value, dict):
            raise RemoteError(f"{where}: a descriptor is {type(value).__name__}, not an object")
        check_fields(value, DESCRIPTOR, f"{where}: a descriptor")
        check_fields(value.get("platform") or {}, PLATFORM, f"{where}: a descriptor", "platform.")
        digest, size = value.get("digest"), value.get("size")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise RemoteError(f"{where}: {digest!r} is not a sha256 digest")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise RemoteError(f"{where}: {digest} has no size, but {size!r}")
        return cls(
            media_type=str(value.get("mediaType") or ""),
            digest=digest,
            size=size,
            annotations=_strings(value.get("annotations")),
            platform=_strings(value.get("platform")),
            artifact_type=str(value.get("artifactType") or ""),
            urls=tuple(map(str, urls)) if isinstance(urls := value.get("urls"), list) else (),
        )

    def as_json(self) -> dict[str, Any]:
        """The descriptor as in a manifest."""
        value: dict[str, Any] = {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": self.size,
        }
        if self.platform:
            value["platform"] = dict(self.platform)
        if self.annotations:
            value["annotations"] = dict(self.annotations)
        if self.artifact_type:
            value["artifactType"] = self.artifact_type
        if self.urls:
            value["urls"] = list(self.urls)
        return value


def _strings(value: object) -> dict[str, str]:
    """The texts in an object; what else it has is for readers that know more."""
    texts = value.items() if isinstance(value, dict) else ()
    return {name: text for name, text in texts if isinstance(text, str)}


@dataclass(frozen=True, kw_only=True)
class RawManifest:
    """The exact bytes of a manifest or index."""

    data: bytes
    media_type: str

    @property
    def digest(self) -> str:
        """``sha256:...`` of the bytes."""
        return sha256_digest(self.data)

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor of this manifest for an index."""
        return Descriptor(media_type=self.media_type, digest=self.digest, size=len(self.data))

    def json(self) -> dict[str, Any]:
        """The parsed document.

        Raises:
            RemoteError: the bytes are not a JSON object.
        """
        try:
            value = parse_json(self.data)
        except ValueError as error:
            raise RemoteError(f"manifest {self.digest} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise RemoteError(f"manifest {self.digest} is not a JSON object")
        return value


class ImageSource(Protocol):
    """One repository, or one OCI layout, to read from."""

    name: str

    def manifest(self, reference: str) -> RawManifest:
        """The manifest or index of a tag or digest; a digest is checked.

        Raises:
            RemoteError: it does not exist, is too large, or its bytes do not match its digest.
        """

    def gives(self, blob: Descriptor) -> bool:
        """Whether the blob can be read, and has its size."""

    def open(self, blob: Descriptor) -> AbstractContextManager[IO[bytes]]:
        """A blob as a stream, in constant memory.

        Size and digest are checked during reading: at the end of a blob with wrong content
        the reader gets a RemoteError, never a clean end.
        """


class ImageTarget(ImageSource, Protocol):
    """One repository, or one OCI layout, to write to."""

    def has(self, digest: str) -> bool:
        """Whether the blob is there."""

    def put_blob(self, blob: Descriptor, content: IO[bytes]) -> None:
        """Write a blob; nothing remains if its bytes do not match its digest."""

    def mount(self, blob: Descriptor, source: ImageSource) -> bool:
        """Mount a blob from another repository of the same registry, if possible."""

    def put_manifest(self, manifest: RawManifest, reference: str) -> None:
        """Push a manifest under a tag or its own digest; this is the last step of a push."""


# ---------------------------------------------------------------------------- manifests and indexes


#: Limit of layers or entries: overlayfs supports 128 layers, and the largest indexes have about 20.
PART_LIMIT = 1000


def check_manifest(data: bytes, *, content_type: str, digest: str, where: str) -> RawManifest:
    """Bytes as a manifest of a known type; ``digest`` is checked unless it is ``""``.

    ``content_type`` is the response header, or ``""`` for a layout.

    Raises:
        RemoteError: they are not a valid manifest.
    """
    if len(data) > MANIFEST_LIMIT:
        raise RemoteError(f"{where} is larger than the limit of {MANIFEST_LIMIT} bytes")
    if digest and sha256_digest(data) != digest:
        raise RemoteError(
            f"{where}: the data received for {digest} is {sha256_digest(data)}",
            hint="do not use it; it was damaged in the registry or on the way",
        )
    media_type = content_type.partition(";")[0].strip().lower()
    value = RawManifest(data=data, media_type=media_type).json()
    stated = value.get("mediaType")
    if not media_type:
        media_type = stated or (OCI_INDEX if "manifests" in value else OCI_MANIFEST)
    if media_type not in (*INDEX_TYPES, *MANIFEST_TYPES):
        obsolete = ", Docker's obsolete first format" if ".v1+" in str(media_type) else ""
        raise RemoteError(f"{where} is of type {str(media_type)[:100]!r}{obsolete}")
    if stated is not None and stated != media_type:
        raise RemoteError(f"{where} was sent as {media_type} but states {str(stated)[:100]}")
    is_index = media_type in INDEX_TYPES
    if ("manifests" in value) != is_index or ("layers" in value or "config" in value) == is_index:
        raise RemoteError(f"{where} is of type {media_type} but lacks its required fields")
    check_document(value, where, is_index=is_index)
    return RawManifest(data=data, media_type=media_type)


def check_document(value: Mapping[str, Any], where: str, *, is_index: bool) -> None:
    """Check the types of a manifest's or an index's fields, and of all descriptors in it.

    Raises:
        RemoteError: one is wrong, so that runtimes refuse it or read something else.
    """
    check_fields(value, INDEX if is_index else MANIFEST, where)
    if value.get("subject") is not None:
        Descriptor.parse(value["subject"], where)


def check_entry(entry: Descriptor, manifest: RawManifest, where: str) -> None:
    """Refuse an entry of an index that states another type or size than its manifest has.

    Raises:
        RemoteError: the entry and its manifest differ.
    """
    if (entry.media_type, entry.size) != (manifest.media_type, len(manifest.data)):
        raise RemoteError(
            f"{where} lists {entry.digest} with type {entry.media_type[:80]!r} and {entry.size} "
            f"bytes, but it is of type {manifest.media_type} and has {len(manifest.data)} bytes",
            hint="use another image; some runtimes do not find this one",
        )


def is_index(manifest: RawManifest) -> bool:
    """Whether it is an index."""
    return manifest.media_type in INDEX_TYPES


def entries(index: RawManifest) -> tuple[Descriptor, ...]:
    """The manifests and indexes that an index lists.

    Raises:
        RemoteError: the index is malformed.
    """
    return _descriptors(index.json().get("manifests"), f"index {index.digest}")


def blobs(manifest: RawManifest) -> tuple[Descriptor, ...]:
    """The config descriptor, then the layers, bottom first.

    Raises:
        RemoteError: the manifest is malformed.
    """
    where = f"manifest {manifest.digest}"
    value = manifest.json()
    config = Descriptor.parse(value.get("config"), where)
    return (config, *_descriptors(value.get("layers"), where))


def _descriptors(value: Any, where: str) -> tuple[Descriptor, ...]:
    if not isinstance(value, list):
        raise RemoteError(f"{where} has no list of parts")
    if len(value) > PART_LIMIT:
        raise RemoteError(f"{where} has {len(value)} parts; the limit is {PART_LIMIT}")
    return tuple(Descriptor.parse(item, where) for item in value)


# ----------------------------------------------------------------------------- image configurations


#: RFC 3339, section 5.6, as runtimes read it.
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")


def _is_time(value: object) -> bool:
    return isinstance(value, str) and (not value or _TIME.fullmatch(value) is not None)


def _is_digests(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, str) and _DIGEST.fullmatch(item) for item in value
    )


_FLAG: Kind = (lambda value: isinstance(value, bool), "true or false")
_TIMES: Kind = (_is_time, "a time as RFC 3339 writes it")
_TOP: dict[str, Kind] = {
    "architecture": TEXT,
    "os": TEXT,
    "variant": TEXT,
    "os.version": TEXT,
    "os.features": TEXTS,
    "author": TEXT,
    "created": _TIMES,
    "config": OBJECT,
    "rootfs": OBJECT,
    "history": LIST,
}
_SETTINGS: dict[str, Kind] = {
    "Env": TEXTS,
    "Entrypoint": TEXTS,
    "Cmd": TEXTS,
    "Labels": LABELS,
    "User": TEXT,
    "WorkingDir": TEXT,
    "ExposedPorts": OBJECT,
    "Volumes": OBJECT,
    "StopSignal": TEXT,
    "ArgsEscaped": _FLAG,
}
_ROOTFS: dict[str, Kind] = {
    "type": (lambda value: value == "layers", "'layers'"),
    "diff_ids": (_is_digests, "a list of sha256 digests"),
}
_STEP: dict[str, Kind] = {
    "created": _TIMES,
    "created_by": TEXT,
    "comment": TEXT,
    "author": TEXT,
    "empty_layer": _FLAG,
}


@dataclass(frozen=True, kw_only=True)
class HistoryStep:
    """One entry of an image's ``history``."""

    created_by: str
    empty_layer: bool


@dataclass(frozen=True)
class ImageConfig:
    """An image's configuration.

    ``document`` is the whole of it, for whoever writes a changed copy: fields that spark-build
    does not know must stay as they are.
    """

    document: Mapping[str, Any] = field(default_factory=dict)

    @property
    def platform(self) -> dict[str, str]:
        """``os``, ``architecture`` and ``variant``, as an index lists them; only those present."""
        names = ("architecture", "os", "variant")
        return {name: self.document[name] for name in names if self.document.get(name)}

    @property
    def architecture(self) -> str:
        """``arm64``."""
        return self.platform.get("architecture", "")

    @property
    def created(self) -> str:
        """A time in RFC 3339 format, or ``""``."""
        return self.document.get("created") or ""

    @property
    def settings(self) -> Mapping[str, Any]:
        """``Env``, ``User`` and so on, as a container runtime takes them."""
        return self.document.get("config") or {}

    @property
    def env_lines(self) -> tuple[str, ...]:
        """Environment variables as ``NAME=value``, in their order."""
        return tuple(self.settings.get("Env") or ())

    @property
    def env(self) -> dict[str, str]:
        """Environment variables by name."""
        return dict(line.split("=", 1) for line in self.env_lines if "=" in line)

    @property
    def labels(self) -> dict[str, str]:
        """Labels by name."""
        return dict(self.settings.get("Labels") or {})

    @property
    def user(self) -> str:
        """The user that a container's process runs as, or ``""``."""
        return self.settings.get("User") or ""

    @property
    def working_directory(self) -> str:
        """Where a container's process starts."""
        return self.settings.get("WorkingDir") or "/"

    @property
    def diff_ids(self) -> tuple[str, ...] | None:
        """Digests of the uncompressed layers; None where the configuration has no such list."""
        ids = (self.document.get("rootfs") or {}).get("diff_ids")
        return None if ids is None else tuple(ids)

    @property
    def history(self) -> tuple[HistoryStep, ...]:
        """What made the layers, bottom first."""
        return tuple(
            HistoryStep(
                created_by=step.get("created_by") or "", empty_layer=bool(step.get("empty_layer"))
            )
            for step in self.document.get("history") or ()
            if step is not None
        )


def parse_config(data: bytes, where: str) -> ImageConfig:
    """An image's configuration from untrusted bytes; a field may be missing or null.

    Raises:
        RemoteError: it is not a JSON object, or a field has the wrong type; names the field.
    """
    try:
        value = parse_json(data)
    except ValueError as error:
        raise RemoteError(f"{where}: its configuration is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RemoteError(f"{where}: its configuration is not a JSON object")
    of = " in its configuration"
    check_fields(value, _TOP, where, of=of)
    check_fields(value.get("config") or {}, _SETTINGS, where, "config.", of)
    check_fields(value.get("rootfs") or {}, _ROOTFS, where, "rootfs.", of)
    for number, step in enumerate(value.get("history") or []):
        name = f"history[{number}]"
        check_field(step, OBJECT, where, f"{name}{of}")
        check_fields(step or {}, _STEP, where, f"{name}.", of)
    return ImageConfig(value)


# ---------------------------------------------------------------------------- platforms of an index


#: BuildKit's annotations on attestation manifests; the first names the image.
_ATTESTS = "vnd.docker.reference.digest"
_OF_ATTESTATION = "vnd.docker.reference."
#: Limit of an image configuration's size; the largest known have about 50 kB.
_CONFIG_LIMIT = 8 << 20


def platform_name(value: Mapping[str, str]) -> str:
    """``linux/arm64``, with the variant if it is not the default.

    Names are read as containerd reads them (``platforms.Normalize``), so ``Linux/aarch64`` is
    the same platform.
    """
    variant = value.get("variant", "").lower()
    architecture = usual_architecture(value.get("architecture") or "unknown")
    names = [(value.get("os") or "unknown").lower(), architecture]
    if variant and not is_default(architecture, variant):
        names.append(variant)
    return "/".join(names)


def attests(entry: Descriptor) -> bool:
    """Whether an entry of an index is an attestation of BuildKit, which no runtime chooses.

    An annotation alone keeps no runtime from an entry: it is chosen by its platform.
    """
    nowhere = {"os": "unknown", "architecture": "unknown"}
    marked = any(name.startswith(_OF_ATTESTATION) for name in entry.annotations)
    return marked and entry.platform == nowhere


def check_entry_platform(entry: Descriptor, config: ImageConfig, where: str) -> None:
    """Refuse an image that is for another platform than its entry in an index states.

    Runtimes choose by the entry, and do not compare it with the configuration.

    Raises:
        RemoteError: the two differ; what the configuration leaves out is no difference.
    """
    if not entry.platform.get("architecture"):
        return
    stated = {"os": "linux", **entry.platform}
    entry_name, name = platform_name(stated), platform_name({**stated, **config.platform})
    if name != entry_name:
        raise RemoteError(
            f"{where} lists {entry.digest} for {entry_name}, but its configuration is for {name}: "
            f"machines would get an image for another platform",
            hint="use another image, or give this one by its own digest",
        )


def restrict(source: ImageSource, image: RawManifest, platforms: Sequence[str]) -> RawManifest:
    """An index with the entries for some platforms only, or a manifest if it is for one of them.

    Attestations of kept entries are kept.

    Raises:
        UsageError: a platform is missing.
        RemoteError: the index or the configuration is malformed.
    """
    if not platforms:
        return image
    if not is_index(image):
        _check_platforms(source, image, platforms)
        return image
    listed = entries(image)
    has = [platform_name(entry.platform) for entry in listed]
    missing = [name for name in platforms if name not in has]
    if missing:
        raise _absent(source, missing[0], has)
    wanted = {e.digest for e, name in zip(listed, has, strict=True) if name in platforms}
    wanted |= {e.digest for e in listed if attests(e) and e.annotations.get(_ATTESTS) in wanted}
    if len(wanted) == len({entry.digest for entry in listed}):
        return image
    value = image.json()
    value["manifests"] = [entry for entry in value["manifests"] if entry["digest"] in wanted]
    data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return RawManifest(data=data, media_type=image.media_type)


def _check_platforms(source: ImageSource, manifest: RawManifest, platforms: Sequence[str]) -> None:
    config = blobs(manifest)[0]
    if config.size > _CONFIG_LIMIT:
        raise RemoteError(f"{source.name}: a configuration of {config.size} bytes is refused")
    with source.open(config) as stream:
        name = platform_name(parse_config(stream.read(), source.name).platform)
    if name not in platforms:
        raise _absent(source, platforms[0], [name])


def _absent(source: ImageSource, name: str, has: Sequence[str]) -> UsageError:
    known = ", ".join(dict.fromkeys(name for name in has if not name.startswith("unknown")))
    return UsageError(f"{source.name} is not for {name}, but for {known or 'no platform'}")
