"""The environment check, from what nvidia-smi, the driver and the kernel say on real machines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.inimage import load

environment = load("device_checks")

#: In the form of a GB10: memory is known per process only; power and clocks are.
GB10 = "NVIDIA GB10, 580.95.05, 47, 11.62, 2405, 0x0000000000000001"
GB10_APPS = """2816, 18, /usr/lib/xorg/Xorg
3011, 6, /usr/bin/gnome-shell
41872, 96411, VLLM::EngineCore
"""
#: An H200, as nvidia-smi printed it there.
H200 = "NVIDIA H200, 580.159.04, 38, 125.50, 480, 0x0000000000000001"
MEMINFO = """MemTotal:       125524968 kB
MemFree:         9043548 kB
MemAvailable:   101020304 kB
SwapTotal:      16777212 kB
SwapFree:       16252924 kB
HugePages_Total:       0
"""
#: Bytes, as cuMemGetInfo gives them on unified memory with a full page cache.
FACTS = {
    "cuda": "13.0",
    "major": 12,
    "minor": 1,
    "integrated": 1,
    "free": 20 * 2**30,
    "total": 119 * 2**30,
}
FIELDS = (*environment.GPU_FIELDS, "slowdown")


def gpus(line: str) -> list[dict[str, str | None]]:
    rows: list[dict[str, str | None]] = environment.parse_table(line, FIELDS)
    return rows


def judged(
    line: str = GB10,
    apps: str = "",
    facts: dict[str, Any] | None = None,
    wanted: str | None = "13.0",
    meminfo: str = MEMINFO,
) -> dict[str, dict[str, Any]]:
    """The environment's checks by name."""
    smi = (gpus(line), environment.parse_processes(apps), "")
    made = environment.judge(
        smi, {**FACTS, **(facts or {})}, environment.parse_meminfo(meminfo), wanted
    )
    return {check["name"]: check for check in made}


def test_a_sound_gb10_passes_everything() -> None:
    checks = judged(apps=GB10_APPS.rpartition("41872")[0])
    assert {check["status"] for check in checks.values()} == {"pass"}
    assert list(checks) == [
        "driver",
        "cuda",
        "capability",
        "memory",
        "other processes",
        "slowdown",
    ]
    assert checks["memory"]["seen"] == (
        "20.0 GiB of 119.0 GiB free; unified: 96.3 GiB available to the system, 0.5 GiB swapped out"
    )
    assert "76.3 GiB more would be free without the page cache" in checks["memory"]["reason"]
    assert checks["slowdown"]["seen"] == "none; 2405 MHz; 47 C; 11.62 W"


@pytest.mark.parametrize(
    ("driver", "wanted", "status"),
    [
        ("580.95.05", "13.0", "pass"),
        ("580.65.06", "13.3", "pass"),
        ("580.65.05", "13.0", "fail"),
        ("575.57.08", "13.0", "fail"),
        ("575.57.08", "12.9", "pass"),
        ("525.60.11", "12.9", "fail"),
        ("1000.1", "13.0", "pass"),
    ],
)
def test_the_driver_must_be_new_enough_for_the_cuda_of_torch(
    driver: str, wanted: str, status: str
) -> None:
    check = judged(GB10.replace("580.95.05", driver), wanted=wanted)["driver"]
    assert (check["status"], check["seen"]) == (status, driver)
    assert wanted in check["expected"]


def test_an_older_cuda_fails_and_an_older_minor_version_has_a_note() -> None:
    old = judged(facts={"cuda": "12.8"})["cuda"]
    assert (old["status"], old["seen"]) == ("fail", "CUDA 12.8")
    minor = judged(wanted="13.1")["cuda"]
    assert minor["status"] == "pass"
    assert "cannot compile newer PTX" in minor["reason"]


def test_a_torch_without_cuda_leaves_the_driver_unjudged() -> None:
    assert judged(wanted=None)["driver"]["status"] == "not-run"


def test_another_gpu_is_named() -> None:
    check = judged(H200, facts={"major": 9, "minor": 0, "integrated": 0})["capability"]
    assert (check["status"], check["seen"]) == ("fail", "9.0 (NVIDIA H200)")


def test_dedicated_memory_is_not_called_unified() -> None:
    facts = {"integrated": 0, "free": 140 * 2**30, "total": 141 * 2**30}
    check = judged(H200, facts=facts)["memory"]
    assert (check["status"], check["seen"]) == ("pass", "140.0 GiB of 141.0 GiB free")
    assert check["reason"] == ""


def test_too_little_memory_fails() -> None:
    assert judged(facts={"free": 7 * 2**30})["memory"]["status"] == "fail"


def test_another_server_is_named() -> None:
    check = judged(apps=GB10_APPS)["other processes"]
    assert check["status"] == "fail"
    assert "VLLM::EngineCore (pid 41872): 94.2 GiB" in check["seen"]


def test_a_process_whose_memory_is_hidden_does_not_fail() -> None:
    check = judged(apps="77, [N/A], python3, with a comma")["other processes"]
    assert check["status"] == "pass"
    assert check["seen"] == "python3, with a comma (pid 77): unknown"


@pytest.mark.parametrize(
    ("mask", "status", "words"),
    [
        ("0x0000000000000001", "pass", "none"),
        ("0x0000000000000004", "pass", "none"),  # the power limit is how it should be
        ("0x0000000000000080", "fail", "hardware power brake"),
        ("0x0000000000000068", "fail", "hardware slowdown, software thermal slowdown"),
        ("[N/A]", "not-run", ""),
        ("Not Supported", "not-run", ""),
    ],
)
def test_throttling_reasons(mask: str, status: str, words: str) -> None:
    check = judged(GB10.replace("0x0000000000000001", mask))["slowdown"]
    assert check["status"] == status
    assert check["seen"].startswith(words)


def test_empty_cells() -> None:
    row = gpus("NVIDIA GB10, 580.95.05, [N/A], [Not Supported], N/A, [Unknown Error]")[0]
    assert [value for value in row.values() if value is None] == [None] * 4


def test_malformed_rows_are_ignored() -> None:
    text = f"Failed to initialize NVML: Unknown Error\n{GB10}\n"
    assert [row["name"] for row in gpus(text)] == ["NVIDIA GB10"]


def test_without_nvidia_smi_the_rest_is_checked() -> None:
    smi: tuple[list[Any], list[Any], str] = ([], [], "nvidia-smi: No such file or directory")
    made = environment.judge(smi, FACTS, {}, "13.0")
    statuses = {check["name"]: check["status"] for check in made}
    assert statuses == {
        "cuda": "pass",
        "capability": "pass",
        "memory": "pass",
        "other processes": "not-run",
        "slowdown": "not-run",
    }


def test_an_older_driver_uses_the_older_field_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def call(command: list[str], timeout: float = 60) -> tuple[int, str]:
        asked.append(command[1])
        if "clocks_event_reasons" in command[1]:
            return 2, 'Field "clocks_event_reasons.active" is not a valid field to query.'
        return (0, GB10_APPS) if "compute-apps" in command[1] else (0, GB10)

    monkeypatch.setattr(environment, "call", call)
    rows, processes, trouble = environment.ask_smi()
    assert "clocks_throttle_reasons" in asked[1]
    assert rows[0]["slowdown"] == "0x0000000000000001"
    assert [p.pid for p in processes] == [2816, 3011, 41872]
    assert trouble == ""


def test_a_failing_nvidia_smi_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    monkeypatch.setattr(environment, "call", lambda *_args, **_kwargs: (9, words))
    assert environment.ask_smi() == ([], [], f"nvidia-smi: {words}")
