"""Matches the entries of an index with platforms, like containerd.

``arm64`` is ``arm64/v8`` and ``amd64`` is ``amd64/v1`` (containerd, ``platforms.Normalize``).  An
entry for a later variant is for another platform.  Linux reports every 64-bit Arm processor as v8,
including those of the DGX Spark, so no runtime there selects an entry for ``arm64/v9``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from builder.errors import RemoteError, UsageError
from builder.model.platform import is_default
from builder.registry.config import parse_config
from builder.registry.manifests import blobs, entries, is_index
from builder.registry.model import RawManifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.registry.model import ImageSource

#: BuildKit's annotation on attestation manifests.
_ATTESTS = "vnd.docker.reference.digest"
#: Limit of an image configuration's size; the largest known have about 50 kB.
_CONFIG_LIMIT = 8 << 20


def platform_name(value: Mapping[str, str]) -> str:
    """``linux/arm64``, with the variant if it is not the default."""
    variant = value.get("variant", "").lower()
    names = [value.get("os") or "unknown", value.get("architecture") or "unknown"]
    if variant and not is_default(names[1], variant):
        names.append(variant)
    return "/".join(names)


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
        _check(source, image, platforms)
        return image
    listed = entries(image)
    has = [platform_name(entry.platform) for entry in listed]
    missing = [name for name in platforms if name not in has]
    if missing:
        raise _absent(source, missing[0], has)
    kept = {e.digest for e, name in zip(listed, has, strict=True) if name in platforms}
    kept |= {e.digest for e in listed if e.annotations.get(_ATTESTS) in kept}
    if len(kept) == len({entry.digest for entry in listed}):
        return image
    value = image.json()
    value["manifests"] = [entry for entry in value["manifests"] if entry["digest"] in kept]
    data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return RawManifest(data=data, media_type=image.media_type)


def _check(source: ImageSource, manifest: RawManifest, platforms: Sequence[str]) -> None:
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
