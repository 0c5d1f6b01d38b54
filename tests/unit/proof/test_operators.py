"""When a sandbox loads a release's own operator library, and out of which wheels."""

from __future__ import annotations

import pytest

from builder import settings
from builder.common.pypi import PackageIndex, WheelFile
from builder.errors import SparkBuildError, UsageError
from builder.proof import sandbox


@pytest.mark.parametrize(
    ("release", "has_it"),
    [("0.17.1", False), ("0.19.1", False), ("0.20.0", True), ("0.33.0", True), ("1.0", True)],
)
def test_only_on_request_and_only_where_it_is_a_module_of_its_own(
    release: str, has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(settings.REAL_EXTENSIONS.name, raising=False)
    assert not sandbox.wanted(release)
    monkeypatch.setenv(settings.REAL_EXTENSIONS.name, "0")
    assert not sandbox.wanted(release)
    monkeypatch.setenv(settings.REAL_EXTENSIONS.name, "1")
    assert sandbox.wanted(release) is has_it


def test_a_release_without_a_build_for_this_machine_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = WheelFile(
        filename="vllm-0.20.1-cp38-abi3-manylinux_2_35_ppc64le.whl", url="", sha256="0" * 64
    )
    monkeypatch.setattr(PackageIndex, "wheels", lambda _self, _project: [other])
    with pytest.raises((UsageError, SparkBuildError), match=r"vllm.*0\.20\.1"):
        sandbox.operators("0.20.1")
