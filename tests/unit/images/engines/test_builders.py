"""Builders and caches: what the options may say, what buildx answers, how progress is read."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

import pytest

from builder.errors import UsageError
from builder.images.engines.buildx import cache_words, check_name, read_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.conftest import Called

# ------------------------------------------------------------------------------------ the options


@pytest.mark.parametrize(
    "text", ["farm", "my-builder.1", "tcp://buildkitd:1234", "unix:///run/b.sock",
             "kube-pod://buildkitd-0?namespace=ci", "docker-container://bk"],
)  # fmt: skip
def test_names_and_addresses(text: str) -> None:
    assert check_name(text) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither"),
        ("-x", "neither"),
        ("a b", "neither"),
        ("tcp://", "neither"),
        ("tcp://a,b", "neither"),
        ("http://x:1", "neither"),
        ("tpc://x:1", "did you mean 'tcp'"),
    ],
)
def test_invalid_builders(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_name(text)


def test_caches() -> None:
    assert cache_words(["host/x:1", "type=gha"], "from") == [
        "--cache-from", "type=registry,ref=host/x:1", "--cache-from", "type=gha",
    ]  # fmt: skip
    assert cache_words(["host/x:1"], "to") == ["--cache-to", "type=registry,ref=host/x:1,mode=max"]
    text = "type=local,dest=/tmp/c"
    assert cache_words([text], "to") == ["--cache-to", text]


@pytest.mark.parametrize(
    ("text", "direction", "words"),
    [
        ("Not A Name", "from", "Not A Name"),
        ("type=regitsry,ref=x", "from", "did you mean 'registry'"),
        ("ref=x", "from", "type is ''"),
        ("type=registry", "to", "lacks ref="),
        ("type=registry,ref=h/UPPER/x", "to", "UPPER"),
        ("type=local,src=/x", "to", "lacks dest="),
        ("type=s3", "from", "lacks bucket="),
    ],
)
def test_invalid_caches(text: str, direction: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cache_words([text], direction)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--builder", "x y"), "neither the name of a builder"),
        (("--builder", "farm", "--engine", "oci"), "--builder is for the buildkit engine"),
        (("--cache-from", "h/x:1", "--engine", "oci"), "--cache-from is for the buildkit engine"),
        (("--cache-to", "type=x"), "type is 'x'"),
        (("--builder", "farm", "--thin"), "--thin is for the oci engine, --builder for"),
        (("--builder", "farm", "--all-platforms"), "builds for one platform"),
    ],
)
def test_invalid_options(
    spark_build: Callable[..., Called], words: tuple[str, ...], said: str
) -> None:
    result = spark_build("image", "-l", "marlin", "-b", "pypi:vllm==0.20.1", *words)
    assert result.code == 2
    assert said in result.err


# -------------------------------------------------------------------------------- what buildx says


def test_an_option_overrides_the_setting(
    spark_build: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("image", "-l", "marlin", "-b", "pypi:vllm==0.20.1", "--all-platforms")
    assert "--builder: the buildkit engine" in spark_build(*words, "--builder", "farm").err
    monkeypatch.setenv("SPARK_BUILD_BUILDER", "farm")
    assert "need an image index" in spark_build(*words).err
    assert "--builder" not in spark_build(*words, "--engine", "oci").err


# ---------------------------------------------------------------------------- how progress is read


def vertex(name: str, **more: object) -> str:
    value = {"digest": "sha256:1", "name": name, **more}
    return json.dumps({"vertexes": [value]}, indent=2) + "\n"


def test_documents() -> None:
    log = {"logs": [{"vertex": "x", "data": base64.b64encode(b"Traceback: {oops}\n").decode()}]}
    text = (
        "#0 building\n"
        + vertex("[2/4] COPY --link layer-a/ /")
        + vertex("[2/4] COPY --link layer-a/ /", completed="t", cached=True)
        + vertex("[2/4] LINK COPY --link layer-a/ /", completed="t")
        + vertex("[linux/arm64 3/4] COPY layer-b/ /", completed="t")
        + vertex("[4/4] COPY --link layer-c/ /")
        + json.dumps(log)
        + "\n"
        + vertex("[4/4] RUN x", completed="t", error="exit code: 9")
        + "ERROR: failed to solve\n"
    )
    found = read_progress(text)
    assert found.cached == {"layer-a": True, "layer-b": False}
    assert "Traceback: {oops}" in found.tail
    assert "[4/4] RUN x: exit code: 9" in found.tail
    assert found.lines[-1] == "ERROR: failed to solve"


def test_lines() -> None:
    text = (
        "#5 [2/3] COPY --link layer-a/ /\n#5 CACHED\n\n#6 [3/3] COPY --link layer-b/ /\n"
        "#6 DONE 0.1s\n#7 [4/4] RUN x\n#7 CACHED\n{not json\n"
    )
    found = read_progress(text)
    assert found.cached == {"layer-a": True, "layer-b": False}
    assert found.lines[-1] == "{not json"
