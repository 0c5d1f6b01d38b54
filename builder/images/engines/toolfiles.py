"""The files of spark-build that every image contains, and its version."""

from __future__ import annotations

import io
import zipfile
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from builder import __version__
from builder.applier.digests import canonical_json, sha256_hex
from builder.common.model.plan import Maker
from builder.common.paths import package_file, project_file
from builder.probes import IMAGE_VERIFIER, TERMS

if TYPE_CHECKING:
    from collections.abc import Mapping

#: File name of the applier in images and mods.
APPLIER = "spark_apply.pyz"
#: The command that runs the verifier in an image, and its text.
COMMAND = "spark-verify"
COMMAND_TEXT = """#!/bin/sh
# Checks this image from inside: docker run --rm --gpus all --entrypoint spark-verify IMAGE
exec {interpreter} -B {share}/spark_verify.py "$@"
"""
_PACKAGE = b"# The applier of spark-build alone: its other packages are not in this file.\n"


def applier_bundle() -> bytes:
    """The package ``builder.applier`` as one file that Python runs, with reproducible bytes.

    An uncompressed zip archive (PEP 441): the interpreter reads its modules in place,
    nothing is unpacked, and ``unzip -p`` or ``less`` shows the source.
    """
    modules = {path.name: path.read_bytes() for path in package_file("applier").glob("*.py")}
    files = {f"builder/applier/{name}": data for name, data in modules.items()}
    files["__main__.py"] = files.pop("builder/applier/__main__.py")
    files["builder/__init__.py"] = _PACKAGE
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            member = zipfile.ZipInfo(name)  # of 1980, the earliest that the format has
            member.create_system, member.external_attr = 3, 0o100644 << 16
            archive.writestr(member, files[name])
    return stream.getvalue()


@cache
def programs() -> Mapping[str, bytes]:
    """The programs in every image, by file name."""
    verifier = {name: package_file("probes", name).read_bytes() for name in IMAGE_VERIFIER}
    return MappingProxyType({APPLIER: applier_bundle(), **verifier})


@cache
def written() -> Mapping[str, str]:
    """The sha256 of what this spark-build adds to images, by file name.

    The programs and licenses in images and extension wheels, the tables for the verifier's data,
    and the text of the command; everything else in an image is determined by the version.
    """
    paths = [package_file("probes", "wheel_loader.py"), package_file("data", "kernels.toml")]
    paths += package_file("data", "diagnose").glob("*.toml")
    paths += map(project_file, TERMS)
    contents = {**programs(), **{path.name: path.read_bytes() for path in paths}}
    contents[COMMAND] = COMMAND_TEXT.encode()
    return MappingProxyType({name: sha256_hex(data) for name, data in contents.items()})


@cache
def maker() -> Maker:
    """The version of this spark-build, and the digest of what it adds to images."""
    return Maker(version=__version__, files=digest_of_files(written()))


def digest_of_files(files: Mapping[str, str]) -> str:
    """The digest of a list of files and their sha256, as a plan has it."""
    return f"sha256:{sha256_hex(canonical_json(dict(files)))}"
