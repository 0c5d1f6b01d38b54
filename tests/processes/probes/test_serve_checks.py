"""The serve level against a real process with a real port that behaves well, or badly."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.document import plain
from builder.diagnose.entries import load_entries
from builder.images.engines import devicedata
from tests.documents import verified
from tests.unit.inimage import load
from tests.unit.plans import planned

if TYPE_CHECKING:
    from collections.abc import Callable


serve = load("serve_checks")
client = load("serve_client")

FAKE = Path(__file__).parents[1] / "fake_vllm.py"
LINEAR = "Using FlashInferB12xNvFp4LinearKernel for NVFP4 GEMM"
MOE = "Using 'FLASHINFER_B12X' NvFp4 MoE backend"
PREFIX = "(EngineCore pid=12) INFO 11-20 10:00:00 [__init__.py:974] "
GOOD_LINES = [f"\x1b[36m{PREFIX}\x1b[0m{LINEAR}", f"{PREFIX}{MOE} out of potential backends: []."]
PLANNED = planned(
    vllm="0.28.0",
    serve_flags=["--linear-backend", "flashinfer_b12x"],
    moe_serve_flags=["--moe-backend", "flashinfer_b12x"],
    env={"CUTE_DSL_ARCH": "sm_121a"},
    expect=[{"kind": "nvfp4-linear", "line": LINEAR}, {"kind": "nvfp4-moe", "line": MOE}],
)
PLAN, DATA = plain(PLANNED), plain(devicedata.device_data(PLANNED))
QUICK = {"ready": 15.0, "answer": 5.0, "stop": 1.0}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run the level with a fake vllm under orders; gives its checks by name."""

    def run(
        orders: dict[str, Any], variants: tuple[str, ...] = ("dense",), **options: Any
    ) -> dict[str, Any]:
        file = tmp_path / "orders.json"
        file.write_text(json.dumps({"lines": GOOD_LINES, **orders}))
        monkeypatch.setattr(serve, "vllm_command", lambda: [sys.executable, str(FAKE), str(file)])
        monkeypatch.setattr(serve, "LOOK", 0.02)
        monkeypatch.setattr(serve.tiny_model, "VARIANTS", variants)
        made = verified(serve.run(PLAN, DATA, {**QUICK, **options}, ""))
        assert {check["level"] for check in made} == {"serve"}
        return {check["name"]: check for check in made}

    return run


def failing(checks: dict[str, Any]) -> set[str]:
    return {name for name, check in checks.items() if check["status"] == "fail"}


@pytest.fixture(autouse=True)
def _other_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier tests may have left processes, such as multiprocessing's resource tracker."""
    monkeypatch.setattr(sys.modules[__name__], "BEFORE", children())


#: Processes that were there before a test.
BEFORE: set[str] = set()


def children() -> set[str]:
    """Processes that a test has started and that are alive."""
    mine = str(os.getpid())
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == mine and fields[0] not in "ZX":
            found.add(stat.parent.name)
    return found - BEFORE


def test_a_server_that_behaves_well(served: Any, tmp_path: Path) -> None:
    checks = served({}, variants=("dense", "moe"))
    assert failing(checks) == set()
    assert list(checks) == [
        "dense starts",
        "dense answers",
        "dense nvfp4-linear line",
        "dense bad lines",
        "dense stops",
        "moe starts",
        "moe answers",
        "moe nvfp4-linear line",
        "moe nvfp4-moe line",
        "moe bad lines",
        "moe stops",
    ]
    assert checks["dense answers"]["seen"] == "16 tokens: t5 t6 t7 t8 t9 t10 t11 t12"
    assert checks["dense nvfp4-linear line"]["seen"].endswith(LINEAR)
    arguments = json.loads((tmp_path / "orders.arguments").read_text())
    assert arguments[0] == "serve"
    assert arguments[-4:] == [*PLAN["serve_flags"], *PLAN["moe_serve_flags"]]
    asked = json.loads((tmp_path / "orders.requests").read_text().splitlines()[0])
    assert (asked["temperature"], asked["logprobs"], asked["max_tokens"]) == (0, 1, 16)
    assert children() == set()


def test_the_dense_model_is_served_without_the_flags_for_experts(
    served: Any, tmp_path: Path
) -> None:
    served({})
    arguments = json.loads((tmp_path / "orders.arguments").read_text())
    assert "--moe-backend" not in arguments
    assert "--max-model-len" in arguments


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ({"exit": 1, "lines": ["ValueError: no such kernel"]}, "exit status 1"),
        ({"exit": -11}, "signal 11"),
        ({"exit": 0}, "exit status 0"),
    ],
)
def test_a_server_that_exits_early(served: Any, orders: dict[str, Any], words: str) -> None:
    checks = served(orders)
    check = checks["dense starts"]
    assert check["status"] == "fail"
    assert words in check["seen"]
    assert orders.get("lines", GOOD_LINES)[-1] in check["reason"]
    assert "dense stops" not in checks
    assert children() == set()


def test_a_server_that_never_opens_its_port_is_killed(served: Any) -> None:
    checks = served({"ready": None}, ready=1.0)
    assert checks["dense starts"]["seen"] == "not ready within 1 s"
    assert checks["dense nvfp4-linear line"]["status"] == "pass", "what it logged still counts"
    assert children() == set()


def test_progress_is_reported_during_the_start(
    served: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "PROGRESS", 0.05)
    assert failing(served({"ready": 0.4})) == set()
    captured = capsys.readouterr()
    assert "NvFp4 MoE backend" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("nan", "16 of 16 log probabilities are nan"),
        ("inf", "16 of 16 log probabilities are -inf"),
        ("zeros", "token 0 every time (what people see as !!!!!)"),
        ("short", "2 tokens and 2 probabilities, not 16"),
        ("error", "/v1/completions answered 500"),
        ("garbage", "the completion was cut off"),
        ("hang", "did not answer"),
    ],
)
def test_a_bad_answer(served: Any, answer: str, words: str) -> None:
    checks = served({"answer": answer}, answer=0.3 if answer == "hang" else 5.0)
    assert failing(checks) == {"dense answers"}
    assert words in checks["dense answers"]["seen"]


@pytest.mark.parametrize("stop", ["ignore", "orphan"])
def test_a_server_that_does_not_stop_is_killed_and_fails(served: Any, stop: str) -> None:
    checks = served({"stop": stop}, stop=0.2)
    assert failing(checks) == {"dense stops"}
    assert "had to be killed" in checks["dense stops"]["seen"]
    assert children() == set()


def test_a_missing_expected_line(served: Any) -> None:
    other = f"{PREFIX}Using MarlinNvFp4LinearKernel for NVFP4 GEMM"
    checks = served({"lines": [other]})
    assert failing(checks) == {"dense nvfp4-linear line"}
    assert checks["dense nvfp4-linear line"]["seen"] == "no such line"


def test_a_bad_line_fails_even_if_it_comes_late(served: Any) -> None:
    late = "RuntimeError: CUDA error: an illegal instruction was encountered"
    checks = served({"late": [late]})
    assert failing(checks) == {"dense bad lines"}
    check = checks["dense bad lines"]
    assert check["seen"].startswith("illegal-instruction: ")
    assert check["reason"], "it says what to do"


def test_a_warning_is_shown_and_fails_nothing(served: Any) -> None:
    line = "WARNING [envs.py:9] Unknown vLLM environment variable detected: VLLM_NVFP4_MOE_BACKEND"
    checks = served({"lines": [*GOOD_LINES, line]})
    assert failing(checks) == set()
    assert "VLLM_NVFP4_MOE_BACKEND" in checks["dense bad lines"]["seen"]


def test_a_missing_vllm(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "Server", lambda *_: (_ for _ in ()).throw(OSError("not there")))
    assert failing(served({})) == {"dense starts"}


def test_without_a_gpu_each_model_is_not_run() -> None:
    made = verified(serve.run(PLAN, DATA, {}, "no libcuda.so.1"))
    assert [(c["name"], c["status"]) for c in made] == [
        ("dense starts", "not-run"),
        ("moe starts", "not-run"),
    ]
    assert "docker run --rm --gpus all" in made[0]["reason"]


def test_a_user_model_is_tested_with_a_chat_message(served: Any) -> None:
    checks = served({}, model="/models/mine")
    assert failing(checks) == set()
    assert checks["model answers"]["seen"] == "A heat pump moves heat."
    checks = served({"answer": "zeros"}, model="/models/mine")
    assert checks["model answers"]["seen"] == "one character over and over: !!!!!!!!!!!!!!!!"


def test_more_arguments_reach_the_server(served: Any, tmp_path: Path) -> None:
    served({}, serve_args="--max-num-seqs 4 --kv-cache-dtype 'fp8'")
    arguments = json.loads((tmp_path / "orders.arguments").read_text())
    assert arguments[-4:] == ["--max-num-seqs", "4", "--kv-cache-dtype", "fp8"]


# --------------------------------------------------------------------------------------- the bench


def test_a_bench_measures_what_the_server_does(
    served: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tokens come every 5 ms at the soonest, so one stream gives less than 200 a second, 4 less
    than 800, and none comes before 5 ms: bounds that a busy machine cannot break."""
    monkeypatch.setattr(client, "CONCURRENCY", (1, 4))
    monkeypatch.setattr(serve.measure, "__defaults__", ((1, 4),))
    checks = served({"delay": 0.005}, bench=True, tokens=20, rounds=2)
    assert failing(checks) == set()
    speed = checks["dense tokens/s"]["figures"]
    assert set(speed) == {"at 1", "at 4"}
    assert 0 < speed["at 1"] < 205
    assert 0 < speed["at 4"] < 820
    assert checks["dense first token, ms"]["figures"]["at 1"] > 4
    asked = [json.loads(x) for x in (tmp_path / "orders.requests").read_text().splitlines()][1:]
    assert len(asked) == (1 + 4) * 3, "a warm-up and two rounds"
    assert len({json.dumps(request["prompt"]) for request in asked}) == len(asked)


def test_a_bench_of_a_server_that_fails(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = client.complete
    monkeypatch.setattr(client, "stream", lambda *_: (_ for _ in ()).throw(client.ServeError("x")))
    assert real is client.complete
    assert failing(served({}, bench=True)) == {"dense tokens/s"}


def evidence(speed: dict[str, float], first: dict[str, float], line: str) -> list[dict[str, Any]]:
    shown = {"name": "dense nvfp4-linear line", "status": "pass", "seen": line}
    return [
        shown,
        {"name": "dense tokens/s", "status": "pass", "seen": "", "figures": speed},
        {"name": "dense first token, ms", "status": "pass", "seen": "", "figures": first},
    ]


MARLIN = evidence(
    {"at 1": 100, "at 16": 500}, {"at 1": 10}, "Using MarlinNvFp4LinearKernel for NVFP4 GEMM"
)


def compared(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, Any]:
    return {c["name"]: c for c in serve.compare(own, {"checks": other}, "marlin.json")}


def test_slower_results_are_reported() -> None:
    own = evidence({"at 1": 81, "at 16": 600}, {"at 1": 12}, LINEAR)
    made = compared(own, MARLIN)
    speed = made["dense tokens/s, compared"]
    assert speed["seen"] == (
        "FlashInferB12xNvFp4LinearKernel is SLOWER than MarlinNvFp4LinearKernel at 1 and faster "
        "than MarlinNvFp4LinearKernel at 16 (0.81x at 1, 1.20x at 16)"
    )
    assert speed["figures"] == {"at 1": 0.81, "at 16": 1.2}
    assert "SLOWER" in made["dense first token, ms, compared"]["seen"], "longer is worse here"


def test_equal_results_are_reported_as_equal() -> None:
    made = compared(MARLIN, MARLIN)
    assert "is as fast as" in made["dense tokens/s, compared"]["seen"]


def test_nothing_to_compare_with_is_not_run() -> None:
    assert compared(MARLIN, [])["dense tokens/s, compared"]["status"] == "not-run"
    assert compared([], MARLIN)["bench, compared"]["status"] == "not-run"


# ---------------------------------------------------------------------------- the catalogue's lines


def watch_of(vllm: str, env: dict[str, str] | None = None) -> Any:
    plan = planned(PLANNED, vllm=vllm, env=env or {})
    return serve.Watch(plain(devicedata.device_data(plan))["markers"], [])


EXAMPLES = [
    (entry, example)
    for entry in load_entries()
    for example in entry.examples
    if entry.engine != "tensorrt-llm"
    and entry.severity in ("error", "warning")
    and entry.patterns
    and not (entry.settings or entry.required.settings or entry.forbidden.settings)
    and example.found
    and example.vllm
    and entry.times == 1
    and not entry.passing
]


def test_every_example_of_the_catalogue_matches_in_the_image_too() -> None:
    assert len(EXAMPLES) > 80
    for entry, example in EXAMPLES:
        watch = watch_of(example.vllm)
        for line in example.log.splitlines():
            watch.feed(line)
        assert entry.id in {marker["id"] for marker, _ in watch.shown(entry.severity)}, example.log


def test_a_skipped_tactic_and_a_single_wait_are_not_failures() -> None:
    watch = watch_of("0.26.0")
    watch.feed("[Autotuner]: Skipping tactic 3, due to failure: CUDA error: out of memory")
    watch.feed("No available shared memory broadcast block found in 60 seconds.")
    assert watch.shown("error") == []


def test_the_log_is_kept_from_the_first_failure() -> None:
    watch = watch_of("0.26.0")
    for number in range(100):
        watch.feed(f"INFO line {number}")
    assert watch.why().splitlines()[-1] == "INFO line 99"
    assert len(watch.why().splitlines()) == 20
    watch.feed("Traceback (most recent call last):")
    for number in range(1000):
        watch.feed(f"INFO after {number}")
    kept = watch.why().splitlines()
    assert kept[:4] == [
        *(f"INFO line {n}" for n in (97, 98, 99)),
        "Traceback (most recent call last):",
    ]
    assert len(kept) == serve.FAILING


@pytest.mark.parametrize(
    "log", sorted((Path(__file__).parents[2] / "unit" / "logs").glob("good*.log"))
)
def test_good_logs_have_no_findings(log: Path) -> None:
    for vllm in ("0.17.1", "0.20.1", "0.24.0", "0.33.0"):
        watch = watch_of(vllm)
        for line in log.read_text("utf-8", "replace").splitlines():
            watch.feed(line)
        assert watch.shown("error") == []


def test_markers_of_other_releases_are_ignored() -> None:
    late = {marker.id for marker in devicedata.markers(PLANNED)}
    early = {marker.id for marker in devicedata.markers(planned(PLANNED, vllm="0.24.0"))}
    assert "b12x-linear-unreachable" in early - late


def test_a_setting_of_the_plan_selects_the_markers() -> None:
    with_it = {m.id for m in devicedata.markers(PLANNED)}
    without = {m.id for m in devicedata.markers(planned(PLANNED, serve_flags=[]))}
    assert "b12x-asked-not-selected" in with_it - without
