"""Writes the wheel file of an extension wheel; the same content gives the same bytes."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The earliest timestamp in a zip archive.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_GROUP = "vllm.general_plugins"


@dataclass(frozen=True, kw_only=True)
class WheelNames:
    """The names of an extension wheel; ``package`` is its import name."""

    package: str
    version: str
    platform: str

    @classmethod
    def of(cls, change: str, vllm: str, content: str, platform: str) -> WheelNames:
        """Names for a change: ``spark_build_companion_sm120_family``, ``0.19.1+<content>``.

        Args:
            change: name of the source change.
            vllm: the vLLM release.
            content: hexadecimal digest of all inputs.
            platform: that of the base's wheel.
        """
        word = re.sub(r"[^a-z0-9]+", "_", change.lower()).strip("_") or "patch"
        return cls(
            package=f"spark_build_companion_{word}",
            version=f"{vllm.partition('+')[0]}+{content[:12]}",
            platform=platform,
        )

    @property
    def project(self) -> str:
        """The distribution's name."""
        return self.package.replace("_", "-")

    @property
    def filename(self) -> str:
        """The wheel's file name."""
        return f"{self.package}-{self.version}-py3-none-{self.platform}.whl"


def wheel_bytes(
    names: WheelNames, files: Mapping[str, bytes], requires: str, summary: str
) -> bytes:
    """Write a wheel; returns its bytes.

    Args:
        names: its names.
        files: path below the package -> content; ``__init__.py`` has the function ``load``.
        requires: its dependency, such as ``vllm==0.19.1``.
        summary: a one-line description.
    """
    info = f"{names.package}-{names.version}.dist-info"
    members = {f"{names.package}/{path}": data for path, data in files.items()}
    members[f"{info}/METADATA"] = (
        "Metadata-Version: 2.1\n"
        f"Name: {names.project}\n"
        f"Version: {names.version}\n"
        f"Summary: {summary}\n"
        f"Requires-Dist: {requires}\n"
    ).encode()
    members[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\n"
        "Generator: spark-build\n"
        "Root-Is-Purelib: false\n"
        f"Tag: py3-none-{names.platform}\n"
    ).encode()
    members[f"{info}/entry_points.txt"] = (
        f"[{_GROUP}]\n{names.package} = {names.package}:load\n"
    ).encode()
    rows = [f"{path},{_digest(data)},{len(data)}" for path, data in sorted(members.items())]
    record = f"{info}/RECORD"
    members[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    out = io.BytesIO()
    # not deflated: the machine code is already compressed, and zlib versions give different bytes
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for path, data in sorted(members.items(), key=lambda item: (item[0] == record, item[0])):
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.create_system = 3  # Unix: what follows are a Unix file's type and mode
            entry.external_attr = (0o100755 if path.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, data)
    return out.getvalue()


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
    return f"sha256={digest.rstrip('=')}"
