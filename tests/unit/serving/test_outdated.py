"""The parts of the report that need no release: wheels, names of flags, threads, the text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from builder.common.pypi import WheelFile
from builder.serving.outdated import (
    ChangedWheel,
    FileCommit,
    FileDiff,
    FlagChange,
    KernelChange,
    LayerChange,
    NewRelease,
    Outdated,
    ReadyReport,
    RecipeChange,
    WatchedThread,
    _fate,
    _is_alike,
    _mentioned,
    _moved_flags,
    markdown,
)
from builder.serving.serveflags import Flag

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "vllm-0.40.0-py3-none-any.whl"
A, B = "a" * 64, "b" * 64


def page(*names: str, sha256: str = A, yanked: str | None = None) -> Mapping[str, WheelFile]:
    return {
        name: WheelFile(filename=name, url=f"https://x/{name}", sha256=sha256, yanked=yanked)
        for name in names
    }


@pytest.mark.parametrize(
    ("files", "what", "detail"),
    [
        (page(NAME), "", ""),
        (page(NAME, sha256=B), "rebuilt", f"now has sha256 {B}"),
        (page(), "gone", "does not have it any more"),
        (page("vllm-0.41.0-py3-none-any.whl"), "gone", "does not have it any more"),
        (page(NAME, "vllm-0.40.0-1-py3-none-any.whl"), "rebuilt", "-1-py3-none-any.whl, which"),
        (page(NAME, "vllm-0.40.0-1-cp312-cp312-any.whl"), "", ""),
        (page(NAME, "vllm-0.40.0.post1-1-py3-none-any.whl"), "", ""),
        (page(NAME, yanked="wrong kernels"), "yanked", "wrong kernels"),
        (page(NAME, yanked=""), "yanked", "no reason is given"),
        (page(NAME, sha256=B, yanked="wrong"), "rebuilt", f"sha256 {B}"),
    ],
)
def test_what_happened_to_a_wheel(files: Mapping[str, WheelFile], what: str, detail: str) -> None:
    found = _fate(NAME, A, files)
    assert found[0] == what
    assert detail in found[1]
    assert bool(found[1]) is bool(what)


def test_a_wheel_of_an_older_build_is_not_taken() -> None:
    later = "vllm-0.40.0-2-py3-none-any.whl"
    assert _fate(later, A, page(later, "vllm-0.40.0-1-py3-none-any.whl")) == ("", "")


def flag(name: str, **more: Any) -> Flag:
    return Flag(**{"names": (name,), "takes": "one", "kind": "str", **more})


@pytest.mark.parametrize(
    ("name", "other", "alike"),
    [
        ("--backend", "--worker-backend", True),
        ("--moe-backend", "--moe-backend-name", True),
        ("--backend", "--fabric", False),
        ("--backend", "--one-two-backend", False),
        ("--no-x", "--y-x-z-w", False),
    ],
)
def test_flags_are_alike_if_they_share_half_of_their_words(
    name: str, other: str, alike: bool
) -> None:
    assert _is_alike(name, flag(name), other, flag(other)) is alike
    assert not _is_alike(name, flag(name), other, flag(other, kind="int"))
    assert not _is_alike(name, flag(name), other, flag(other, choices=("a",)))


def test_a_flag_with_two_heirs_is_not_called_renamed() -> None:
    before = {"--backend": flag("--backend")}
    heirs = ("--worker-backend", "--server-backend")
    one, two = ({name: flag(name) for name in heirs[:n]} for n in (1, 2))
    assert [c.change for c in _moved_flags(before, one)] == ["renamed"]
    assert [c.change for c in _moved_flags(before, two)] == ["went", "appeared", "appeared"]


def test_threads_of_a_text() -> None:
    text = "vLLM #48536; FlashInfer #3932, a-b/c.d #388 and a-b/c.d#388. sglang #1, #2, vLLM 0.22"
    assert _mentioned(text) == [
        "vllm-project/vllm#48536", "flashinfer-ai/flashinfer#3932", "a-b/c.d#388",
    ]  # fmt: skip


REPORT = Outdated(
    since="0.40.0", newest="", layers=("a",), releases=(), wheels=(), changes=(), kernels=(),
    flags=(), recipes=(), threads=(),
)  # fmt: skip


def test_a_report_of_nothing() -> None:
    assert markdown(REPORT) == "# vLLM since 0.40.0\n\nNo release since then.\n"


def test_every_part_of_a_report_is_in_its_text() -> None:
    change = LayerChange(
        layer="a", vllm="0.41.0", before="needed", after="drift", reason="gone",
        merged="a/b#7 was merged", diffs=(FileDiff(file="x.py", diff="+```\n-@me\n"),),
        commits=(FileCommit(commit="c0ffee", title="Mend `x` for @me", pull="a/b#7"),),
        command="spark-build layers diff a",
    )  # fmt: skip
    ended = LayerChange(
        layer="b", vllm="0.41.0", before="needed", after="not-applicable", reason="", would="needed"
    )
    text = markdown(
        replace(
            REPORT,
            newest="0.41.0",
            releases=(
                NewRelease(vllm="0.41.0", uploaded="2026-12-01", packages={"p": "2"}),
                NewRelease(vllm="0.42.0", yanked="", young=True),
            ),
            wheels=(ChangedWheel(filename=NAME, what="gone", known=A, detail="it went"),),
            changes=(change, ended, replace(ended, layer="c", after="upstream", would="")),
            kernels=(
                KernelChange(profile="m", kind="k", vllm="0.41.0", before="X", after="Y"),
                KernelChange(profile="n", vllm="0.41.0"),
            ),
            flags=(
                FlagChange(what="flag", change="renamed", name="--a", detail="--b"),
                FlagChange(what="variable", change="went", name="V", detail="--v has the same"),
                FlagChange(what="flag", change="appeared", name="--c"),
                FlagChange(what="flag", change="appeared", name="--d"),
            ),
            recipes=(RecipeChange(file="r.yaml", line=3, rule="unknown-flag", message="no --a"),),
            threads=(WatchedThread(thread="a/b#7", layers=("a",), state="open", title="T`"),),
            ready=(ReadyReport(layer="a", vllm="0.41.0", state="needed", command="export a"),),
            notes=("the forge was not asked",),
        )
    )
    for words in (
        "- **0.41.0**, of 2026-12-01, with p 2\n",
        "- **0.42.0**, **yanked**: no reason is given, too young to go to (--min-age)",
        "The newest release to go to is **0.41.0**; to fix: a; to widen: b; no longer needed: c.",
        f"- `{NAME}`: **gone**: it went",
        "### `a` on 0.41.0: needed -> drift\n\ngone\n\nPerhaps upstream in another form: a/b#7 was",
        "````diff\n+```\n-@me\n````",
        "- a/b#7: `Mend 'x' for @me`\n\n`spark-build layers diff a`",
        "Its range ends before this release; it still fits and is still needed.",
        "- `m` on 0.41.0, k: X -> Y\n- `n` on 0.41.0: not recorded; `--ask` asks the release",
        "- flag `--a` went; `--b`, which takes the same, appeared",
        "- variable `V` went: --v has the same\n- flags that appeared: `--c`, `--d`",
        "- `r.yaml:3`: no --a (unknown-flag)",
        "- a/b#7: **open**, `T'`; named by a",
        "## Ready to send\n\n- `a`, needed on 0.41.0: `export a`",
        "## Not looked up\n\n- the forge was not asked\n",
    ):  # fmt: skip
        assert words in text
