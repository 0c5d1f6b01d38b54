"""``diagnose``: every example of the catalogue, whole logs of many releases, and how it reads."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import pytest

from builder.cli import diagnose as command
from builder.common.console import console
from builder.common.paths import package_file
from builder.diagnose.entries import MINIMUM, fixed_text, load_entries, load_entry
from builder.diagnose.logs import LONGEST, REPEATS, Reader, clean
from builder.diagnose.matching import FORMS, LABELS, scan, settings_in
from builder.diagnose.verdict import diagnose
from builder.errors import SparkBuildError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.diagnose.entries import Entry, Example
    from builder.diagnose.verdict import Diagnosis
    from tests.unit.caller import Call

RELEASES = [
    "0.17.0",
    "0.17.1",
    "0.18.0",
    "0.18.1",
    "0.19.0",
    "0.19.1",
    "0.20.0",
    "0.20.1",
    "0.20.2",
    "0.21.0",
    "0.22.0",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.25.0",
    "0.25.1",
    "0.26.0",
    "0.27.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
]

CATALOG = load_entries()
EXAMPLES = [
    pytest.param(entry, example, id=f"{entry.id}-{number}")
    for entry in CATALOG
    for number, example in enumerate(entry.examples, 1)
]
LOGS = Path(__file__).parents[1] / "logs"
EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((LOGS / "expected.toml").read_text("utf-8"))


def read(text: str, vllm: str | None = None) -> Diagnosis:
    return diagnose(io.BytesIO(text.encode()), vllm)


def ids(result: Diagnosis) -> list[str]:
    return [finding.id for finding in result.findings]


# ------------------------------------------------------------------------------------ the catalogue


@pytest.mark.parametrize(("entry", "example"), EXAMPLES)
def test_example(entry: Entry, example: Example) -> None:
    """An entry speaks on its examples, at the right line, with the advice for that release."""
    result = read(example.log, example.vllm or None)
    found = [finding for finding in result.findings if finding.id == entry.id]
    assert bool(found) is example.found
    if found:
        assert found[0].line == example.line
        assert found[0].severity == entry.severity
        assert example.fix in found[0].fix
        # every group of the pattern that the texts name was filled in
        assert not re.search(r"\{[a-z_]+\}", found[0].message + found[0].fix)


def test_every_entry_has_an_example_that_it_finds() -> None:
    assert len(CATALOG) >= 60
    for entry in CATALOG:
        assert any(example.found for example in entry.examples), entry.id


def test_every_release_of_an_entry_has_a_fix() -> None:
    for entry in CATALOG:
        served = [v for v in RELEASES if entry.applies(v, by_setting=False)]
        assert served, f"{entry.id}: no supported release is in its range"
        given = {version: entry.fix_for(version) for version in served}
        assert all(given.values()), (entry.id, given)
        unused = {fix.text for fix in entry.fixes} - set(given.values())
        assert not unused, f"{entry.id}: advice that no release gets"


def test_ranges_have_bounds_that_sort_prereleases_correctly() -> None:
    """``<0.24`` would admit 0.24.0rc1; ``<0.24.0rc0`` does not."""
    for entry in CATALOG:
        for when in [entry.when, *(fix.when for fix in entry.fixes)]:
            for spec in when or ():
                assert spec.operator in (">=", "<", "=="), entry.id
                if spec.operator == "<":
                    assert "rc" in spec.version, entry.id


def test_settings_named_in_fixes_exist_in_the_release() -> None:
    """The whole point: advice must not name a variable that the release has not (or no more)."""
    for entry in CATALOG:
        for version in RELEASES:
            if not entry.applies(version, by_setting=False):
                continue
            major, minor = (int(x) for x in version.split(".")[:2])
            told = re.sub(r"(?:unset|remove|instead of|leave) \S+", "", entry.fix_for(version))
            named = set(re.findall(r"VLLM_[A-Z0-9_]+(?==)", told))
            gone = named & {"VLLM_NVFP4_GEMM_BACKEND", "VLLM_USE_FLASHINFER_MOE_FP4"}
            assert not (gone and (major, minor) >= (0, 24)), (entry.id, version)
            assert not ("VLLM_TEST_FORCE_FP8_MARLIN" in named and (major, minor) >= (0, 29))
            assert not named & {"VLLM_MXFP4_BACKEND", "VLLM_NVFP4_MOE_BACKEND"}, entry.id
            if (major, minor) < (0, 22) and entry.id != "linear-backend-unrecognized":
                assert "--linear-backend marlin" not in told, (entry.id, version)


def test_every_regular_expression_of_the_catalogue_compiles() -> None:
    """Nothing else does it before a line of a log makes it necessary."""
    for path in package_file("data", "diagnose").glob("*.toml"):
        load_entry(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"severity": '"fatal"'}, "none of error, warning, info"),
        ({"patern": '["some text"]'}, "unknown key 'patern'; did you mean 'patterns'?"),
        ({"patterns": '["short (a|b)"]', "id": '"x"'}, None),
        ({"patterns": '["a.b"]'}, "no fixed text"),
        ({"patterns": '["unclosed ("]'}, "not a regular expression"),
        ({"patterns": '"text"'}, "'patterns' is not a list"),
        ({"when": '"0.24"'}, "not a PEP 440 range"),
        ({"id": '"y"'}, "not the file's name"),
        ({"message": None}, "key 'message' is missing"),
        ({"patterns": None}, "neither 'patterns' nor 'settings' is given"),
        ({"settings": '["NAME"]'}, "is not NAME=REGEX"),
    ],
)
def test_a_malformed_entry_is_refused(
    tmp_path: Path, change: dict[str, str | None], complaint: str | None
) -> None:
    keys: dict[str, str | None] = {
        "id": '"x"',
        "severity": '"error"',
        "message": '"m"',
        "patterns": '["some text"]',
        "fix": '[{ text = "f" }]',
        "example": '[{ log = "some text" }]',
    }
    path = tmp_path / "x.toml"
    merged = {**keys, **change}
    path.write_text("".join(f"{k} = {v}\n" for k, v in merged.items() if v is not None))
    if complaint is None:
        assert load_entry(path).id == "x"
        return
    with pytest.raises(UsageError, match=re.escape(complaint)):
        load_entry(path)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"Using (?P<k>\w+) for NVFP4 GEMM", " for NVFP4 GEMM"),
        (r"block_size \((\d+)\) must be", "block_size ("),
        (r"either|or", ""),
        (r"[Oo]utput is [^\]x]{0,9}long", "utput is "),
        (r"no (?:(?:nested [(]|b)c)? group", " group"),
        (r"colou?r and ab+c", "r and ab"),
        (r"\bword\s+here\.", "here."),
        (r"^!!!!!!!+$", "!!!!!!!"),
    ],
)
def test_fixed_text(pattern: str, text: str) -> None:
    assert fixed_text(pattern) == text


def test_matches_of_a_pattern_contain_its_fixed_text() -> None:
    for entry in CATALOG:
        for example in entry.examples:
            for line in Reader(io.BytesIO(example.log.encode())):
                for pattern in entry.patterns:
                    if pattern.regex.search(line.text):
                        assert pattern.needle in line.text
    for form in FORMS:
        assert len(fixed_text(form.pattern)) >= MINIMUM
        assert form.kind in LABELS


# --------------------------------------------------------------------------------------- whole logs


def test_the_sample_logs_cover_every_case() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(EXPECTED)
    assert len(EXPECTED) >= 25
    assert len({e["release"] for e in EXPECTED.values()} & set(RELEASES)) >= 20
    assert sum(e["good"] for e in EXPECTED.values()) >= 10
    assert sum(not e["good"] for e in EXPECTED.values()) >= 10


@pytest.mark.parametrize("name", EXPECTED)
def test_log(name: str) -> None:
    expected = EXPECTED[name]
    with (LOGS / f"{name}.log").open("rb") as stream:
        result = diagnose(stream, expected.get("vllm"))
    assert sorted([s.kind, s.kernel, s.line] for s in result.dispatch) == sorted(
        expected["dispatch"]
    )
    assert [[f.id, f.severity, f.line] for f in result.findings] == expected["findings"]
    if expected["release"] in RELEASES:
        assert result.vllm == expected["release"]
    if expected["good"]:
        assert {f.severity for f in result.findings} <= {"info"}
    else:
        assert {f.severity for f in result.findings} & {"error", "warning"}


@pytest.mark.parametrize("name", [n for n, e in EXPECTED.items() if e["findings"]])
def test_a_finding_disappears_without_its_line(name: str) -> None:
    """Each finding rests on the line that it names: blanked, the finding moves on or goes."""
    expected = EXPECTED[name]
    lines = (LOGS / f"{name}.log").read_bytes().split(b"\n")
    for found in expected["findings"]:
        blanked = [b"" if n == found[2] else line for n, line in enumerate(lines, 1)]
        result = diagnose(io.BytesIO(b"\n".join(blanked)), expected.get("vllm"))
        assert (found[0], found[2]) not in [(f.id, f.line) for f in result.findings]


def test_the_release_selects_the_fix() -> None:
    line = "ValueError: Invalid value 'flashinfer-b12x' for VLLM_NVFP4_GEMM_BACKEND. Valid: []"
    fixes = {v: read(line, v).findings[0].fix for v in ("0.19.1", "0.20.1", "0.22.0")}
    assert len(set(fixes.values())) == 3
    # a development build counts as what it leads to, a local version as its release
    assert read(line, "0.20.1rc1.dev91+ga749a33d8").findings[0].fix == fixes["0.20.1"]
    assert read(line, "v0.22.0+cu130").findings[0].fix == fixes["0.22.0"]


def test_an_unknown_release_gets_every_fix_with_its_range() -> None:
    line = "ValueError: Invalid value 'flashinfer-b12x' for VLLM_NVFP4_GEMM_BACKEND. Valid: []"
    fix = read(line).findings[0].fix
    assert "vLLM before 0.20.0: " in fix
    assert "vLLM 0.20.0 up to before 0.22.0: " in fix
    assert "vLLM 0.24.0 and later: " in fix
    gone = read("Unknown vLLM environment variable detected: VLLM_NVFP4_GEMM_BACKEND")
    assert gone.findings[0].fix.startswith("vLLM 0.24.0 up to before 0.28.0: ")


def test_the_vllm_option_overrides_the_log() -> None:
    log = "INFO 07-01 10:00:00 [core.py:1] Initializing a V1 LLM engine (v0.22.1) with config: x\n"
    setting = "export VLLM_NVFP4_GEMM_BACKEND=flashinfer-b12x\n"
    assert ids(read(log + setting)) == []
    assert ids(read(log + setting, "0.25.0")) == ["env-nvfp4-gemm-backend-removed"]


def test_an_upgrade_within_the_log_is_reported() -> None:
    one = "Initializing a V1 LLM engine (v{}) with config: x\n"
    assert read(one.format("0.22.1") + one.format("0.25.0")).releases == ("0.22.1", "0.25.0")


# ------------------------------------------------------------------------------------- how it reads

PLAIN = "Using MarlinNvFp4LinearKernel for NVFP4 GEMM"
COLOURED = (
    "\x1b[0;36m(EngineCore pid=7)\x1b[0;0m \x1b[32mINFO\x1b[0m \x1b[90m05-06 10:00:00\x1b[0m "
    f"\x1b[90m[__init__.py:683]\x1b[0m {PLAIN}"
)


@pytest.mark.parametrize(
    "line",
    [
        PLAIN,
        f"INFO 05-06 10:00:00 [__init__.py:683] {PLAIN}",
        f"(EngineCore pid=7) INFO 05-06 10:00:00 [__init__.py:683] {PLAIN}\r",
        f"(Worker_TP0 pid=7) (EngineCore_DP0 pid=7) INFO 05-06 10:00:00 [a/.../b.py:1] {PLAIN}",
        f"(RayWorkerProc pid=7, ip=10.0.0.2) INFO 05-06 10:00:00 [__init__.py:683] {PLAIN}",
        COLOURED,
        COLOURED.replace("\x1b", "#033"),
        f"2026-05-06T10:00:00.123456789Z {COLOURED}",
        f"2026-05-06T10:00:00.123456789Z stderr F INFO 05-06 10:00:00 [x.py:1] {PLAIN}",
        f"May 06 10:00:00 spark vllm[77]: INFO 05-06 10:00:00 [x.py:1] {PLAIN}",
        f"2026-05-06T10:00:00+0200 spark docker[77]: (EngineCore pid=7) {PLAIN}",
        f"vllm-server-1  | (EngineCore pid=7) INFO 05-06 10:00:00 [x.py:1] {PLAIN}",
        f"[pod/vllm-0/server] INFO 05-06 10:00:00 [x.py:1] {PLAIN}",
        f"[rank0]: {PLAIN}",
        json.dumps({"log": f"{COLOURED}\r\n", "stream": "stderr", "time": "2026-05-06T10:00:00Z"}),
        json.dumps({"levelname": "INFO", "message": PLAIN}),
        json.dumps({"MESSAGE": list(COLOURED.encode()), "PRIORITY": "6"}),
        "2026-05-06T10:00:00Z " + json.dumps({"message": PLAIN}),
        json.dumps({"log": json.dumps({"message": f"(EngineCore pid=7) {PLAIN}"})}),
    ],
)
def test_prefixes_of_log_collectors_are_removed(line: str) -> None:
    assert clean(line) == PLAIN
    assert [(s.kind, s.kernel, s.line) for s in read(f"other\n\n{line}\n").dispatch] == [
        ("nvfp4-linear", "MarlinNvFp4LinearKernel", 3)
    ]


@pytest.mark.parametrize("line", ["{not json", '{"a": 1}', "[1, 2]", "(a) b", "{" * 9000])
def test_other_lines_are_unchanged(line: str) -> None:
    assert clean(line) == line


def test_a_progress_bar_hides_nothing() -> None:
    result = read(f"loading: 1%\rloading: 100%\rINFO 05-06 10:00:00 [x.py:1] {PLAIN}\nnext\n")
    assert [s.line for s in result.dispatch] == [1]
    assert result.lines == 2


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings(encoding: str) -> None:
    assert diagnose(io.BytesIO(f"{PLAIN}\n".encode(encoding))).dispatch


def test_binary_bytes_do_no_harm() -> None:
    assert diagnose(io.BytesIO(b"\xff\x00\xfe\n" + PLAIN.encode() + b"\n")).dispatch[0].line == 2


def test_an_endless_line_is_cut_and_counted_once() -> None:
    log = b"x" * (3 * LONGEST) + b"\n" + PLAIN.encode()
    assert diagnose(io.BytesIO(log)).dispatch[0].line == 2


DRAFT = "'speculative_config': {'method': 'mtp', 'moe_backend': 'triton'}, 'linear_backend': 'auto'"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("docker run -e VLLM_A=1 --env=VLLM_B='x' img", ["VLLM_A=1", "VLLM_B=x"]),
        ("      - VLLM_A=1", ["VLLM_A=1"]),
        ("VLLM_A=1 VLLM_B=2 vllm serve m", ["VLLM_A=1", "VLLM_B=2"]),
        ("disabled (VLLM_A=0). Consider VLLM_B=1 and please set VLLM_C=1", []),
        ("vllm serve m --linear-backend flashinfer-b12x", ["linear_backend=flashinfer_b12x"]),
        ("is deprecated. Use --moe-backend flashinfer_trtllm, or", []),
        ("vllm serve m --moe-backend auto", []),
        (f"non-default args: {{'moe_backend': 'marlin', {DRAFT}}}", ["moe_backend=marlin"]),
        (f"non-default args: {{{DRAFT}}}", ["draft.moe_backend=triton"]),
    ],
)
def test_requested_settings(text: str, found: list[str]) -> None:
    seen = [f"{s.name}={s.value}" for s in settings_in(text, 1)]
    assert [name for name in found if name not in seen] == []
    assert all(name in found for name in seen if not name.startswith("draft."))


@pytest.mark.parametrize(
    ("line", "kind", "kernel"),
    [
        ("Using NvFp4LinearBackend.VLLM_CUTLASS for NVFP4 GEMM", "nvfp4-linear", "VLLM_CUTLASS"),
        ("Using flashinfer-cutlass for NVFP4 GEMM", "nvfp4-linear", "flashinfer-cutlass"),
        ("Using FLASHINFER_CUTLASS Fp8 MoE backend out of", "fp8-moe", "FLASHINFER_CUTLASS"),
        (
            "Selected TritonFp8BlockScaledMMKernel for Fp8LinearMethod",
            "fp8-block",
            "TritonFp8BlockScaledMMKernel",
        ),
        (
            "Selected DeepGemmFp8BlockScaledMMKernel for Fp8LinearMethod",
            "fp8-block",
            "DeepGemmFp8BlockScaledMMKernel",
        ),
        (
            "Selected CutlassInt8ScaledMMLinearKernel for CompressedTensorsW8A8Int8",
            "int8-linear",
            "CutlassInt8ScaledMMLinearKernel",
        ),
        ("Using 'B12X_MXFP4_BF16' Mxfp4 MoE backend.", "mxfp4-moe", "B12X_MXFP4_BF16"),
        ("Using MarlinMxFp4LinearKernel for MXFP4 GEMM", "mxfp4-linear", "MarlinMxFp4LinearKernel"),
        ("Using Marlin backend", "mxfp4-moe", "Marlin"),
        ("Using FlashInfer MXFP4 MXFP8 CUTLASS backend for SM100", "mxfp4-moe", None),
        ("Using marlin backend for MXFP8 GEMM", "mxfp8-linear", "marlin"),
        ("Using 'MARLIN' MxFp8 MoE backend.", "mxfp8-moe", "MARLIN"),
        ("Using MacheteLinearKernel for CompressedTensorsWNA16", "wna16-linear", None),
        ("Using MarlinLinearKernel for GPTQMarlinLinearMethod", "wna16-linear", None),
        ("Using MARLIN backend for WNA16 MoE (group_size=128)", "wna16-moe", "MARLIN"),
        ("Using FlashInfer CUTLASS backend for Unquantized MoE", "unquantized-moe", None),
        ("Using AttentionBackendEnum.FLASH_ATTN backend.", "attention", "FLASH_ATTN"),
        ("Using TRITON_ATTN attention backend out of potential backends: []", "attention", None),
        ("Using FLASH_ATTN MLA prefill backend.", "mla-prefill", "FLASH_ATTN"),
        (
            "Using backend AttentionBackendEnum.TORCH_SDPA for vit attention",
            "vision-attention",
            "TORCH_SDPA",
        ),
    ],
)
def test_every_log_line_of_a_selection(line: str, kind: str, kernel: str | None) -> None:
    (found,) = read(line).dispatch
    assert found.kind == kind
    assert kernel is None or found.kernel == kernel


def test_a_kernel_is_listed_once_for_all_processes() -> None:
    line = "(Worker_TP{} pid=1) INFO 05-06 10:00:00 [x.py:1] " + PLAIN + "\n"
    assert len(read(line.format(0) + line.format(1)).dispatch) == 1


# ----------------------------------------------------------------------------------------- its cost


class Repeated(io.RawIOBase):
    """A log of any size, made while it is read."""

    def __init__(self, block: bytes, size: int) -> None:
        self.block, self.left, self.position = block, size // len(block) * len(block), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        take = min(len(buffer), self.left, len(self.block) - self.position)
        buffer[:take] = self.block[self.position : self.position + take]
        self.position = (self.position + take) % len(self.block)
        self.left -= take
        return take


def blocks_of_a_busy_server() -> Iterator[bytes]:
    for number in range(500):
        yield (
            b"(APIServer pid=1) INFO 05-06 10:00:00 [loggers.py:259] Engine 000: Avg prompt "
            b"throughput: 31.2 tokens/s, Avg generation throughput: %d tokens/s\n" % number
        )
    yield b"(EngineCore pid=2) WARNING 05-06 10:00:00 [a.py:1] [Autotuner]: Skipping tactic 3\n"
    yield f"(EngineCore pid=2) INFO 05-06 10:00:00 [a.py:1] {PLAIN}\n".encode()


def test_time_is_linear_and_memory_is_bounded() -> None:
    block = b"".join(blocks_of_a_busy_server())
    counts = {}
    for size in (1_000_000, 5_000_000):
        stream = cast("BinaryIO", Repeated(block, size))
        result = scan(Reader(stream), CATALOG)
        rounds = size // len(block)
        assert result.lines == 502 * rounds
        # lines that differ in digits alone are read a few times, not once for each round
        assert result.searches <= 10 * 2 * REPEATS
        (server,) = result.all()
        assert sum(len(hits) for hits in server.last.hits.values()) <= 4
        assert len(server.last.selections) == 1
        counts[size] = result.searches
    assert counts[1_000_000] == counts[5_000_000]


def test_an_entry_keeps_a_bounded_number_of_hits() -> None:
    log = "".join(f"Unknown vLLM environment variable detected: VLLM_X{n}\n" for n in range(1000))
    assert 1 <= len(read(log, "0.25.0").findings) <= 16


# -------------------------------------------------------------------------------------- the command


def test_json_has_the_documented_shape(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SparkBuildError, match="b12x-moe-refused") as ended:
        command.diagnose((str(LOGS / "bad-0.22.0-relu2.log"),), None, json=True)
    assert ended.value.code == 5
    assert not capsys.readouterr().out
    assert console.document is not None
    document = json.loads(json.dumps(console.document))
    assert document["schema"] == 1
    assert document["verdict"]["state"] == "failed"
    assert document["vllm"] == "0.22.0"
    for selected in document["dispatch"]:
        assert {k: type(v) for k, v in selected.items()} == {
            "kind": str,
            "kernel": str,
            "line": int,
        }
    for finding in document["findings"]:
        assert {"id", "severity", "line", "message", "fix", "quote", "link"} <= set(finding)
        assert finding["severity"] in ("error", "warning", "info")
        assert isinstance(finding["line"], int)


def test_a_good_log_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    command.diagnose((str(LOGS / "good-0.18.0-default.log"),), None, json=False)
    out = capsys.readouterr().out
    assert "vLLM 0.18.0" in out
    assert re.search(r"NVFP4 linear +FLASHINFER_CUTLASS +line \d+", out)
    assert "nothing wrong was found" in out


def test_text_output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shutil, "get_terminal_size", lambda *_args, **_named: os.terminal_size((80, 24))
    )
    with pytest.raises(SparkBuildError):
        command.diagnose((str(LOGS / "bad-0.25.1-unreachable.log"),), None, json=False)
    out = capsys.readouterr().out
    assert re.search(r"error +line \d+: b12x-linear-unreachable", out)
    assert "fix: " in out
    assert "no line shows the selected kernels" in out
    # lines of the log are quoted whole, for a search
    assert max(len(line) for line in out.splitlines() if " | " not in line) <= 100


def test_warnings_alone_are_not_a_failure() -> None:
    command.diagnose((str(LOGS / "bad-0.19.1-not-marlin.log"),), None, json=False)


READY = "(APIServer pid=1) INFO:     Application startup complete."


@pytest.mark.parametrize("name", ["-", None])
def test_standard_input(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{PLAIN}\n{READY}\n".encode())))
    command.diagnose((name,) if name else (), "0.25.0", json=True)
    assert console.document is not None
    assert console.document["dispatch"][0]["line"] == 1


def test_a_terminal_is_not_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(UsageError, match="no log"):
        command.diagnose((), None, json=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "The log is empty."),
        (
            "#!/bin/sh\nset -eu\n\n",
            "Nothing in it looks like a log of vLLM; it ends with: set -eu",
        ),
    ],
)
def test_what_is_not_a_log_is_refused(call: Call, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "work" / "my.log").write_text(text)
    done = call("diagnose", "my.log")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: my.log: {said}\n")
    told = call("diagnose", "my.log", "--json").json
    assert (told["error"]["code"], told["findings"]) == (2, [])


def test_a_log_among_other_files_is_read(call: Call, tmp_path: Path) -> None:
    (tmp_path / "work" / "a.txt").write_text("any text\n")
    (tmp_path / "work" / "b.log").write_text("INFO 06-01 10:00:00 [x.py:1] a piece of a log\n")
    done = call("diagnose", "b.log")
    assert (done.code, "did not become ready" in done.err) == (5, True)
    (tmp_path / "work" / "b.log").write_text(READY)
    assert call("diagnose", "b.log").code == 0
    done = call("diagnose", "a.txt", "b.log")
    assert (done.code, "Nothing in it looks like a log" in " ".join(done.out.split())) == (0, True)
    done = call("diagnose", "a.txt", "a.txt")
    assert (done.code, done.err.count("Nothing in it looks like a log")) == (2, 2)


def test_an_unreadable_file_is_a_usage_error(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.log", "cannot read"), (tmp_path, "no log in the folder")):
        with pytest.raises(UsageError, match=why) as refused:
            command.diagnose((str(path),), None, json=False)
        assert refused.value.code == 2


def test_a_wrong_release_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="is not a version"):
        read(PLAIN, "latest")


def test_the_catalogue_ships_with_the_package() -> None:
    assert len(list(package_file("data", "diagnose").glob("*.toml"))) == len(CATALOG)
