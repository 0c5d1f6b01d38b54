"""The files of spark-build that it adds to images, and their digest, which a plan has."""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from builder import __version__
from builder.applier.values import canonical_json, sha256_hex
from builder.common import programs as archives
from builder.common.paths import package_file, project_file
from builder.common.plan import Maker
from builder.probes import TERMS

if TYPE_CHECKING:
    from collections.abc import Mapping


#: File names of the applier in images and mods, and of the verifier in images.
APPLIER, VERIFIER = archives.BUNDLE, "spark_verify.pyz"
#: The command that runs the verifier in an image, and its text.
COMMAND = "spark-verify"
COMMAND_TEXT = """#!/bin/sh
# Checks this image from inside: docker run --rm --gpus all --entrypoint spark-verify IMAGE
exec {interpreter} -B {share}/spark_verify.pyz "$@"
"""


def applier_bundle() -> bytes:
    """The applier as one file that Python runs."""
    return archives.APPLIER.data


@cache
def programs() -> Mapping[str, bytes]:
    """The programs in every image, by file name."""
    return MappingProxyType({APPLIER: archives.APPLIER.data, VERIFIER: archives.VERIFIER.data})


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
