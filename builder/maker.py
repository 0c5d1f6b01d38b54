"""What of spark-build itself goes into an image: its version, and the files that it adds."""

from __future__ import annotations

from functools import cache

from builder import __version__
from builder.model import Maker
from builder.paths import package_file, project_file
from builder.runtime import IMAGE_VERIFIER, TERMS
from builder.runtime.spark_apply import canonical_json, sha256_hex


@cache
def maker() -> Maker:
    """This spark-build.

    The digest is over the programs and license terms that images and companion wheels carry, and
    over the tables that the verifier's data is taken from; all else of an image is made by the
    code of this version.
    """
    paths = [package_file("runtime", name) for name in (*IMAGE_VERIFIER, "companion_loader.py")]
    paths += [
        package_file("data", "kernels.toml"),
        *package_file("data", "diagnose").glob("*.toml"),
    ]
    paths += map(project_file, TERMS)
    files = {path.name: sha256_hex(path.read_bytes()) for path in paths}
    return Maker(version=__version__, files=f"sha256:{sha256_hex(canonical_json(files))}")
