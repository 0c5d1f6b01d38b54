"""A release's own answers in ``lint --ask``: they are found, and no guess contradicts them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import pytest

from builder.errors import RemoteError
from builder.proof.wholemodel import Refusal
from builder.serving.lint import Finding, LintReport, lint
from builder.serving.models import Models
from builder.serving.preflight import Cure, Preflight, Room, Trouble
from tests.unit.serving.test_lint import FakeLinter

if TYPE_CHECKING:
    from pathlib import Path

    from builder.serving.preflight import PreflightRequest

#: A folder that no test has: the small model stands in.
UNKNOWN_MODEL = "./not-here"


@dataclass
class FakeRelease:
    """A release that refuses some words, in order."""

    #: a word -> the stage at which it is refused, and the message
    refuses: dict[str, tuple[str, str]] = field(default_factory=dict)
    not_run: str = ""
    where: str = "vllm/x.py:1"
    troubles: tuple[Trouble, ...] = ()
    cache_bytes: int = 1
    asked: list[PreflightRequest] = field(default_factory=list)

    def __call__(self, request: PreflightRequest) -> Preflight:
        self.asked.append(request)
        asked = {w: r for w, r in self.refuses.items() if request.fits or r[0] != "memory"}
        word = next((word for word in asked if word in request.flags), None)
        refusal = None
        cures: tuple[Cure, ...] = ()
        if word is not None:
            stage, message = self.refuses[word]
            refusal = Refusal(type="ValueError", message=message, where=self.where, stage=stage)
            cures = self.cures(request, word) if request.cures else ()
        starts: Literal["yes", "no", "not run"] = "no" if refusal else "yes"
        memory = Room(
            total_bytes=100, free_bytes=90, fraction=0.9, weight_bytes=1, overhead_bytes=1,
            overhead_error=1,
            cache_bytes=self.cache_bytes, longest={}, ceiling=None,
        )  # fmt: skip
        return Preflight(
            model=request.model, served=request.model, base="",
            packages={"vllm": "0.33.0"}, patched=(), flags=request.flags, environment={},
            starts="not run" if self.not_run else starts,
            reason=self.not_run, refusal=refusal, warnings=(), lines=(), settings={}, layers=(),
            caches=(), memory=memory, troubles=self.troubles, cures=cures, simulated=(),
        )  # fmt: skip

    def cures(self, request: PreflightRequest, word: str) -> tuple[Cure, ...]:
        at = request.flags.index(word)
        rest = (*request.flags[: at - 1], *request.flags[at + 1 :])
        others = [one for one in self.refuses if one in rest]
        return () if others else (Cure(change="without it", flags=rest),)


def report(text: str, release: FakeRelease, release_name: str = "0.33.0") -> LintReport:
    linter = FakeLinter(release=release_name, ask=release)
    return lint([("x.sh", text)], linter, Models.discover())


def found(text: str, release: FakeRelease, release_name: str = "0.33.0") -> list[Finding]:
    return list(report(text, release, release_name).findings)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_a_guess_that_the_release_does_not_share_is_no_error(model: Path) -> None:
    """Its parser knows more than its source shows: abbreviations, and what code adds."""
    text = f"vllm serve {model} --quantization fp4 --new-flag 1 --port many"
    assert found(text, FakeRelease()) == []
    assert len(found(text, FakeRelease(not_run="no sandbox"))) == 3


def test_each_refused_setting_is_on_its_line(model: Path) -> None:
    release = FakeRelease({
        "9": ("configuration", "max_model_len (9) is greater than the derived one"),
        "marlin": ("model", "the backend marlin does not support it"),
    })  # fmt: skip
    text = f"vllm serve {model} \\\n  --max-model-len 9 \\\n  --moe-backend marlin\n"
    first, second = found(text, release)
    assert (first.line, first.rule, second.line) == (2, "refused", 3)
    assert "--max-model-len 9: max_model_len (9) is greater" in first.message
    assert second.message.endswith("(vllm/x.py:1)")
    assert second.help == "it starts without --moe-backend"


def test_a_refusal_without_a_culprit_is_the_commands(model: Path) -> None:
    release = FakeRelease({"--port": ("model", "heads do not divide")})
    release.cures = lambda *_: ()  # type: ignore[method-assign]
    (finding,) = found(f"\nvllm serve {model} --port 1", release)
    assert (finding.line, finding.rule) == (2, "refused")
    assert "refuses this: heads do not divide" in finding.message


def test_cures_are_looked_for_only_where_nothing_else_tells_the_flag(model: Path) -> None:
    """Each costs a question to the release: a parser names the flag, and more ranks need none."""
    text = f"vllm serve {model} --tensor-parallel-size 2"
    one = OneGpu()
    assert found(text, one) == []
    named = FakeRelease({"--new": ("arguments", "unrecognized arguments: --new")})
    assert len(found(f"vllm serve {model} --new", named)) == 1
    assert [request.cures for request in (*one.asked, *named.asked)] == [False] * 4
    model_ = FakeRelease({"marlin": ("model", "no kernel")})
    assert len(found(f"vllm serve {model} --moe-backend marlin", model_)) == 1
    assert [request.cures for request in model_.asked] == [False, True, False]


def test_what_a_newer_transformers_refuses_is_a_warning(model: Path) -> None:
    """Gemma 4 on 0.24.0: its image has an older one, with which it starts."""
    release = FakeRelease({"--port": ("configuration", "'head_dim' is a per-layer attribute")})
    release.cures = lambda *_: ()  # type: ignore[method-assign]
    release.where = "transformers/integrations/heterogeneity.py:298"
    (finding,) = found(f"vllm serve {model} --port 1", release)
    assert (finding.rule, finding.severity) == ("transformers-version", "warning")
    assert "Transformers refuses the model with vLLM 0.33.0: 'head_dim'" in finding.message


def test_all_arguments_that_the_parser_does_not_know_are_named(model: Path) -> None:
    message = "unrecognized arguments: --one 1 --two"
    release = FakeRelease({"--one": ("arguments", message)})
    rules = [one.message for one in found(f"vllm serve {model} --one 1 --two", release)]
    assert ["--one 1" in rules[0], "--two" in rules[1]] == [True, True]
    assert release.asked[-1].flags == ()
    assert rules[0].endswith("refuses --one 1: unrecognized argument (vllm/x.py:1)")


def test_a_refused_flag_is_one_finding(model: Path) -> None:
    """More of them than questions: the release's words replace those of its source."""
    names = [f"--unknown-{n}" for n in range(9)]
    message = f"unrecognized arguments: {' '.join(names)}"
    release = FakeRelease({names[0]: ("arguments", message), "9": ("model", "no kernel")})
    lines = " \\\n  ".join([f"vllm serve {model}", *names, "--moe-backend 9"])
    findings = found(lines, release)
    assert [(one.rule, one.line) for one in findings] == [("refused", n) for n in range(2, 12)]


def test_of_an_unknown_model_only_what_no_model_decides_counts() -> None:
    """A refusal that a small model stands in for may be about that model."""
    command = f"vllm serve {UNKNOWN_MODEL} --moe-backend marlin --ports 1"
    other = FakeRelease({"marlin": ("model", "no experts here")})
    result = report(command, other)
    assert result.findings == ()
    (asked,) = result.asked
    assert asked.answer == "settings accepted"
    assert asked.left_out[0] == "--moe-backend marlin: depends on the model"
    assert asked.left_out[1] == "what ./not-here decides: kernels, lengths and memory"
    assert asked.assumed == "a small dense model, since no known configuration is near"
    assert asked.configuration == ""
    shape = "1 validation error\nmethod\n  Input should be 'a' [type=literal_error, input]"
    general = FakeRelease({"marlin": ("configuration", shape)})
    (finding,) = found(command, general)
    assert finding.rule == "refused"
    cache = FakeRelease({"marlin": ("model", "Reason: ['kv_cache_dtype not supported']")})
    assert [one.rule for one in found(command, cache)] == ["refused"]


def test_a_stand_in_hides_no_error_of_the_source() -> None:
    """It was asked without the flag then, so the release did not answer for it."""
    release = FakeRelease({"many": ("configuration", "this needs another model")})
    (finding,) = found(f"vllm serve {UNKNOWN_MODEL} --port many", release)
    assert (finding.rule, finding.severity) == ("bad-value", "error")


def test_a_value_that_no_release_has_is_no_matter_of_the_model() -> None:
    message = "cache_dtype: Invalid kv_cache_dtype: 'fp9'. Valid values are: ['auto', 'fp8']"
    release = FakeRelease({"fp9": ("configuration", message)})
    (finding,) = found(f"vllm serve {UNKNOWN_MODEL} --kv-cache-dtype fp9", release)
    assert (finding.rule, finding.severity) == ("refused", "error")


def test_a_known_models_configuration_is_used(tmp_path: Path) -> None:
    text = 'summary = "x"\n[id]\nvalue = "me/known"\nsource = "x"\n[config]\nsource = "x"\n'
    (tmp_path / "known.toml").write_text(f'{text}[config.value]\nmodel_type = "llama"\n')
    release = FakeRelease()
    linter = FakeLinter(release="0.33.0", ask=release)
    files = [("x.sh", "vllm serve me/known --port 1")]
    (asked,) = lint(files, linter, Models.discover([tmp_path])).asked
    assert (asked.answer, asked.left_out) == ("starts", ())
    assert release.asked[0].model != "me/known"


def test_a_configuration_that_cannot_be_downloaded_is_stood_in_for() -> None:
    release = FakeRelease()

    def offline(request: PreflightRequest) -> Preflight:
        if request.model == "me/far":
            raise RemoteError("no network")
        return release(request)

    linter = FakeLinter(release="0.33.0", ask=offline)
    (asked,) = lint([("x.sh", "vllm serve me/far")], linter, Models.discover()).asked
    assert asked.answer == "settings accepted"


def test_what_is_not_asked_is_said(model: Path) -> None:
    release = FakeRelease()
    text = (
        f'vllm serve {model} --port "$P" --max-model-len 8 --reasoning-parser y '
        "--reasoning-parser-plugin y.py --enable-auto-tool-choice --tool-call-parser y "
        "--tool-parser-plugin y.py --distributed-executor-backend ray "
        """--speculative-config '{"method":"eagle3","model":"a/b"}'"""
    )
    (asked,) = report(text, release).asked
    assert release.asked[0].flags == ("--max-model-len", "8")
    assert any("draft model" in words for words in asked.left_out)
    assert any("plugin" in words for words in asked.left_out)
    assert any("known only when it starts" in words for words in asked.left_out)


TWO_RANKS = "World size (2) is larger than the number of available GPUs (1) in this node"


@dataclass
class OneGpu(FakeRelease):
    """A release on a machine with one GPU, which refuses two ranks there."""

    #: whether it refuses two ranks on two machines, too
    heads: bool = False

    def __call__(self, request: PreflightRequest) -> Preflight:
        if "2" in request.flags and "--nnodes" not in request.flags:
            self.refuses = {"2": ("configuration", TWO_RANKS)}
        elif "--nnodes" in request.flags and self.heads:
            message = "heads must be divisible by --tensor-parallel-size"
            self.refuses = {"2": ("model", message)}
        else:
            self.refuses = {}
        return super().__call__(request)

    def cures(self, request: PreflightRequest, word: str) -> tuple[Cure, ...]:
        return ()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "several GPUs in one machine"),
        ("--distributed-executor-backend ray", "the other ranks"),
        ("--master-addr 10.0.0.1", "the other ranks"),
    ],
)
def test_more_gpus_are_more_machines(model: Path, flags: str, words: str) -> None:
    (asked,) = report(f"vllm serve {model} --tensor-parallel-size 2 {flags}", OneGpu()).asked
    assert (asked.answer, asked.left_out) == (
        "starts",
        (f"{words}; it was rank 0 of 2 machines with one GPU each",),
    )


def test_one_machine_is_not_said_to_be_two(model: Path) -> None:
    """Neither where the command has one rank, nor after the flag with two was refused."""
    (asked,) = report(f"vllm serve {model} --tensor-parallel-size 1", OneGpu()).asked
    assert (asked.answer, asked.left_out) == ("starts", ())
    release = OneGpu(heads=True)
    result = report(f"vllm serve {model} --tensor-parallel-size 2", release)
    (finding,) = result.findings
    assert "refuses --tensor-parallel-size 2: heads" in finding.message
    assert result.asked[0].left_out == ()
    assert release.asked[-1].flags == (), "one rank is asked about as one machine"


def test_a_model_that_does_not_fit_is_a_warning(model: Path) -> None:
    (finding,) = found(f"vllm serve {model}", FakeRelease(cache_bytes=-(3 << 30)))
    assert (finding.rule, finding.severity) == ("does-not-fit", "warning")
    assert "3.0 GiB more than 0.90" in finding.message


def test_a_model_whose_code_is_not_run_is_asked_about_without_it(model: Path) -> None:
    """MiniMax-M2.5 names a class of its own, and the releases have one too."""

    def without_code(request: PreflightRequest) -> Preflight:
        own = "--trust-remote-code" in request.flags
        return FakeRelease(not_run="it has code of its own" if own else "")(request)

    linter = FakeLinter(release="0.33.0", ask=without_code)
    files = [("x.sh", f"vllm serve {model} --trust-remote-code")]
    (asked,) = lint(files, linter, Models.discover()).asked
    words = "--trust-remote-code: the code of a checkpoint is not run"
    assert (asked.answer, asked.left_out) == ("starts", (words,))
    (other,) = report(
        f"vllm serve {model} --trust-remote-code", FakeRelease(not_run="no disk")
    ).asked
    assert (other.answer, other.left_out) == ("not run", (words, "no disk"))


def test_variables_reach_the_release(model: Path) -> None:
    release = FakeRelease()
    report(f"VLLM_CHOICE=a HF_TOKEN=x vllm serve {model}", release)
    assert list(release.asked[0].variables) == ["VLLM_CHOICE=a"]


def test_a_release_that_was_not_run_says_why(model: Path) -> None:
    (asked,) = report(f"vllm serve {model}", FakeRelease(not_run="no disk")).asked
    assert (asked.answer, asked.left_out) == ("not run", ("no disk",))


def test_a_kernel_with_known_trouble_is_a_warning(model: Path) -> None:
    trouble = Trouble(kernel="DeepGEMM", text="servers ended", source="vllm#1")
    (finding,) = found(f"vllm serve {model}", FakeRelease(troubles=(trouble,)))
    assert (finding.rule, finding.help) == ("kernel-trouble", "vllm#1")
    assert found(f"vllm serve {UNKNOWN_MODEL}", FakeRelease(troubles=(trouble,))) == []


@pytest.mark.parametrize(("cache_bytes", "sure"), [(1, False), (-100, True)])
def test_an_estimate_of_memory_is_no_error_within_its_own_error(
    model: Path, cache_bytes: int, sure: bool
) -> None:
    refuses = {"262144": ("memory", "23.25 GiB KV cache is needed")}
    release = FakeRelease(refuses, cache_bytes=cache_bytes)
    findings = found(f"vllm serve {model} --max-model-len 262144", release)
    assert bool(findings) is sure
