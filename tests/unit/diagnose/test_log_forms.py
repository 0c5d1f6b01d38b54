"""Every entry speaks after everything that a log goes through on its way to us."""

from __future__ import annotations

import bz2
import gzip
import html
import io
import json
import lzma
import textwrap
import zipfile
from typing import TYPE_CHECKING

import pytest

from builder.diagnose.entries import load_entries
from builder.diagnose.logs import records, texts, unescaped
from builder.diagnose.verdict import diagnose
from builder.errors import UsageError
from tests.unit.chance import QUICK

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.diagnose.verdict import Diagnosis

STAMP = "2026-06-01T10:00:00.123456789Z"


def read(data: bytes, vllm: str | None = None, name: str = "a.log") -> Diagnosis:
    results = [diagnose(text, vllm) for _, text in texts(io.BytesIO(data), name)]
    assert len(results) == 1
    return results[0]


def each(change: Callable[[str], str]) -> Callable[[str], bytes]:
    """A change of every line."""
    return lambda text: "".join(change(line) + "\n" for line in text.splitlines()).encode()


def whole(change: Callable[[str], str]) -> Callable[[str], bytes]:
    """A change of a whole text."""
    return lambda text: change(text).encode()


def cut(width: int) -> Callable[[str], bytes]:
    """Cut at a column, as a terminal does."""
    return each(
        lambda line: "\n".join(line[at : at + width] for at in range(0, len(line) or 1, width))
    )


def filled(width: int) -> Callable[[str], bytes]:
    """Wrapped between words, as mail programs and people do."""
    return each(lambda line: textwrap.fill(line, width, drop_whitespace=True) or line)


def smart(text: str) -> str:
    """What a word processor makes of quotes and dashes."""
    out = []
    for at, char in enumerate(text):
        opening = at == 0 or text[at - 1] in " ([{=:"
        if char == "'":
            char = "\u2018" if opening else "\u2019"
        elif char == '"':
            char = "\u201c" if opening else "\u201d"
        out.append(char)
    return "".join(out).replace("...", "\u2026")


def zipped(text: str) -> bytes:
    """The archive of a CI job."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("job/3_serve.txt", text)
        archive.writestr("job/picture.png", b"\x89PNG\r\n\x1a\n" + bytes(40))
    return data.getvalue()


def record(key: str, **more: str) -> Callable[[str], bytes]:
    """One JSON record a line."""
    return each(lambda line: json.dumps({key: line + "\n", **more}))


FORMS: dict[str, Callable[[str], bytes]] = {
    "as it is": whole(str),
    "crlf": lambda text: text.replace("\n", "\r\n").encode(),
    "no last line end": lambda text: text.rstrip("\n").encode(),
    "byte order mark": lambda text: text.encode("utf-8-sig"),
    "utf-16": lambda text: text.encode("utf-16"),
    "utf-16 without a mark": lambda text: (text + "\n" * 20).encode("utf-16-le"),
    "gzip": lambda text: gzip.compress(text.encode()),
    "bzip2": lambda text: bz2.compress(text.encode()),
    "xz": lambda text: lzma.compress(text.encode(), preset=0),  # a small dictionary
    "zip": zipped,
    "colour": each(lambda line: f"\x1b[31m{line}\x1b[0m"),
    "docker --timestamps": each(lambda line: f"{STAMP} {line}"),
    "kubernetes": each(lambda line: f"{STAMP} stderr F {line}"),
    "kubectl --prefix": each(lambda line: f"[pod/vllm-0/server] {line}"),
    "compose": each(lambda line: f"vllm-1  | {line}"),
    "journald": each(lambda line: f"Jun 01 10:00:00 spark vllm[77]: {line}"),
    "ray": each(lambda line: f"(RayWorkerWrapper pid=7, ip=10.0.0.2) {line}"),
    "vllm": each(lambda line: f"(EngineCore pid=7) {line}"),
    "vllm, level": each(lambda line: f"(EngineCore pid=7) ERROR 06-01 10:00:00 [core.py:1] {line}"),
    "rank": each(lambda line: f"[rank0]: {line}"),
    "docker json": record("log", stream="stderr", time=STAMP),
    "json message": record("message", level="error"),
    "quoted in markdown": each(lambda line: f"> {line}"),
    "indented": each(lambda line: f"    {line}"),
    "fenced": lambda text: f"```\n{text}```\n".encode(),
    "html": whole(html.escape),
    "html in spans": each(lambda line: f'<span class="x">{html.escape(line)}</span>'),
    "html twice": whole(lambda text: html.escape(html.escape(text))),
    "smart quotes": whole(smart),
    "no-break spaces": lambda text: text.replace("  ", "\u00a0\u00a0").encode(),
    "cut at 80": cut(80),
    "cut at 120": cut(120),
    "filled to 72": filled(72),
    "filled to 80": filled(80),
    "filled to 100": filled(100),
    "cut at 80, then timestamps": lambda text: each(lambda line: f"{STAMP} {line}")(
        cut(80)(text).decode()
    ),
    "timestamps, then cut at 100": lambda text: cut(100)(
        each(lambda line: f"{STAMP} {line}")(text).decode()
    ),
    "in a longer log": lambda text: (
        "(APIServer pid=1) INFO 06-01 10:00:00 [a.py:1] x" + "y" * 300 + f"\n{text}"
    ).encode(),
    "escaped line ends": lambda text: text.rstrip("\n").replace("\n", "\\n").encode(),
}

EXAMPLES = [
    (entry, example) for entry in load_entries() for example in entry.examples if example.found
]


#: Examples a form; in a quick run, each form has every fourth, the next form the others.
STEP = 4 if QUICK else 1


@pytest.mark.parametrize(("number", "form"), list(enumerate(FORMS)), ids=list(FORMS))
def test_every_entry_matches_after(number: int, form: str) -> None:
    lost = []
    for entry, example in EXAMPLES[number % STEP :: STEP]:
        data = FORMS[form](example.log.rstrip("\n") + "\n")
        found = read(data, example.vllm or None).findings
        if entry.id not in [f.id for f in found]:
            lost.append(entry.id)
    assert not lost


@pytest.mark.parametrize("form", FORMS)
def test_an_unknown_failure_is_reported_after(form: str) -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "/opt/lib/python3.12/site-packages/vllm/v1/worker/gpu.py", line 31, in load\n'
        "    self.model_runner.load_model(eep_scale_up=eep_scale_up)\n"
        "vllm.pouch.WombatError: the pouch of layer 'model.layers.3' is not as wide as needed, "
        "which is 4096\n"
    )
    result = read(FORMS[form](log))
    assert result.verdict.state == "failed"
    assert "WombatError: the pouch of layer" in result.findings[0].quote


def test_a_log_that_lost_its_line_ends() -> None:
    lines = [
        "(EngineCore pid=9) ERROR 06-01 10:00:00 [core.py:1] Traceback (most recent call last):",
        '(EngineCore pid=9) ERROR 06-01 10:00:00 [core.py:1]   File "/x/vllm/a.py", line 3, in f',
        "(EngineCore pid=9) ERROR 06-01 10:00:00 [core.py:1]     hop(1)",
        "(EngineCore pid=9) ERROR 06-01 10:00:00 [core.py:1] WombatError: no pouch",
        "(APIServer pid=1) INFO 06-01 10:00:00 [api.py:1] Shutting down",
    ]
    for glue in ("", " "):
        (found,) = read(glue.join(lines).encode()).findings
        assert found.quote == "WombatError: no pouch"
        assert found.frame == "vllm/a.py, line 3, in f"


def test_a_line_of_ordinary_length_is_one_record() -> None:
    line = "(EngineCore pid=9) INFO 06-01 10:00:00 [core.py:1] " + "x" * 200
    assert records(line) == [line]


def test_a_paste_of_three_lines_without_line_ends_is_still_read() -> None:
    text = (
        "INFO 06-01 10:00:00 [a.py:1] one\\nINFO 06-01 10:00:00 [a.py:1] two\\nWombatError: three"
    )
    assert read(text.encode()).verdict.state == "failed"


@pytest.mark.parametrize(
    ("escaped", "plain"),
    [
        ("a &lt; b &amp;&amp; c &#39;d&#39;", "a < b && c 'd'"),
        ("&amp;lt;x&amp;gt;", "<x>"),
        ("\u201cx\u201d \u2018y\u2019 \u2013x\u2026", "\"x\" 'y' --x..."),
        ("a & b; c", "a & b; c"),
        ("vector<int> and <module>", "vector<int> and <module>"),
    ],
)
def test_html_in_a_pasted_line_is_removed(escaped: str, plain: str) -> None:
    assert unescaped(escaped) == plain


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x7fELF" + bytes(range(256)) * 20, "is a program"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "is a picture"),
        (b"%PDF-1.7 x", "is a PDF"),
        (bytes(range(256)) * 50, "is not a text"),
        (gzip.compress(bytes(range(256)) * 50), "is not a text"),
        (b"\x28\xb5\x2f\xfd rest", "zstd"),
        (gzip.compress(b"some text " * 100_000)[:200], "damaged or incomplete"),
        (b"PK\x03\x04 and nothing", "damaged or incomplete"),
    ],
)
def test_files_that_are_not_logs_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        read(data)
    assert refused.value.hint


def test_an_archive_without_a_text_is_refused() -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("core", bytes(range(256)) * 9)
    with pytest.raises(UsageError, match="has no log"):
        read(data.getvalue())


def test_an_unwrapped_multi_line_message_is_read_as_one() -> None:
    log = (
        "(EngineCore pid=1) INFO 06-01 10:00:00 [a.py:1] " + "y" * 300 + "\n"
        "(EngineCore pid=1) ValueError: Free memory on device cuda:0 (8.8/121.6 GiB) on startup\n"
        "(EngineCore pid=1) is less than desired GPU memory utilization (0.85, 103.4 GiB).\n"
    )
    (found,) = read(log.encode()).findings
    assert (found.id, found.line) == ("memory-not-free", 2)


def test_a_truncated_line_counts_once() -> None:
    line = (
        "(EngineCore pid=3) INFO 09-02 11:57:54 [shm_broadcast.py:801] No available shared memory "
    )
    line += (
        "broadcast block found in 60 seconds. This typically happens when some processes hang.\n"
    )
    assert read(FORMS["cut at 120"](line)).verdict.state == "unclear"
    assert read(FORMS["cut at 120"](line * 3)).findings[0].id == "shm-broadcast-hang"


@pytest.mark.parametrize(
    "line",
    [
        "vLLM API server version 0.%s.0",
        'Traceback (most recent call last):\n  File "/x/vllm/a.py", line %s, in f\nValueError: x',
    ],
)
def test_a_number_that_python_does_not_read_is_no_error_of_ours(line: str) -> None:
    start = "INFO 06-01 10:00:00 [api_server.py:1] vLLM API server version 0.24.0\n"
    assert read((start + line % ("9" * 5000) + "\n").encode()).vllm
