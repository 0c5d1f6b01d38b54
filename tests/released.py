"""Pins the RECORD of the released wheels of bases: ``python -m tests.released``.

RECORD has the sha256 of each file, and reading it takes kilobytes instead of the whole wheel.
Pinned here, what an index serves by range is as good as the whole wheel of that sha256.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.files import write_atomically
from builder.common.paths import package_file
from builder.common.pypi import PackageIndex, vllm_releases
from builder.common.reference import Ref
from builder.images.bases.pypi import released_wheels
from builder.images.subject import BaseRequest, tracked_for
from builder.layers.catalog import Catalog

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = "# sha256 of a released wheel, sha256 of its RECORD, file name. Made by: python -m {}\n"
PLATFORMS = ("linux/arm64", "linux/amd64")


def rows(index: PackageIndex, named: str | None = None) -> Iterator[str]:
    """A line for each wheel of the named vLLM releases, or of all, that shipped layers look at."""
    catalog = Catalog.discover(())
    tracked = tracked_for(map(catalog.layer, catalog.folders))
    for release in vllm_releases(index, named):
        for platform in PLATFORMS:
            ref = Ref(f"pypi:vllm=={release}")
            request = BaseRequest(ref=ref, platform=platform, pins={}, tracked=tracked, index=index)
            for wheel in released_wheels(request, ref.place):
                yield f"{wheel.file.sha256} {wheel.record} {wheel.file.filename}"


def main() -> None:
    """Write the file."""
    lines = sorted({*rows(PackageIndex())}, key=lambda line: line.split()[2])
    text = HEAD.format(__spec__.name) + "".join(f"{line}\n" for line in lines)
    write_atomically(package_file("data", "records.txt"), text.encode())


if __name__ == "__main__":
    main()
