"""`spark-build verify --level codegen` on an image: its own packages compile, in a container."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .support import Cli

OMMA = "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"


def test_the_packages_of_the_image_compile(cli: Cli, patched: str) -> None:
    report = cli("verify", patched, "--level", "codegen", "--json").ok().json
    checks = {check["name"]: check for check in report["checks"]}
    assert len(checks) == 6
    for check in checks.values():
        assert check["status"] == "pass"
        assert "sandbox" not in " ".join(check["simulated"])
        assert "cached" not in check["where"]
    assert f"; 128 x {OMMA}; " in checks["b12x GEMM, tile 128x128"]["seen"]
    tiles = {"64x64": 32, "64x128": 64, "128x64": 64, "128x128": 128}
    assert checks["b12x GEMM, every tile"]["figures"] == tiles


def test_the_base_image_does_not_compile(cli: Cli, base_image: str) -> None:
    done = cli("verify", base_image, "--layers", "b12x-full", "--level", "codegen", "--json")
    assert done.code == 5
    checks = {check["name"]: check for check in done.json["checks"]}
    assert {check["status"] for check in checks.values()} == {"fail"}
    assert "_b12x_gemm_fp4_runner" in checks["b12x GEMM, every tile"]["seen"]
