"""References to pull requests, the forge that is set, and whose token is whose."""

from __future__ import annotations

import pytest

from builder.common.forge import Forges, parse_pull, site
from builder.errors import UsageError

SHA = "0123456789abcdef0123456789abcdef01234567"
GOOD = {
    "vllm-project/vllm#40082": ("vllm-project/vllm", 40082, ""),
    "vllm-project/vllm#40082@363FC84": ("vllm-project/vllm", 40082, "363fc84"),
    f"NVIDIA/cutlass@{SHA}": ("NVIDIA/cutlass", 0, SHA),
    "  flashinfer-ai/flashinfer#1 ": ("flashinfer-ai/flashinfer", 1, ""),
    "https://github.com/vllm-project/vllm/pull/7": ("vllm-project/vllm", 7, ""),
    "https://github.com/vllm-project/vllm/pull/7/files#diff-1": ("vllm-project/vllm", 7, ""),
    f"https://github.com/o/r.js/pull/7/commits/{SHA}": ("o/r.js", 7, SHA),
    f"https://ghe.example.com/o/r/commit/{SHA}.patch?x=1": ("o/r", 0, SHA),
}


@pytest.mark.parametrize(("text", "expected"), GOOD.items(), ids=GOOD.keys())
def test_a_reference_is_read(text: str, expected: tuple[str, int, str]) -> None:
    ref = parse_pull(text)
    assert (ref.repository, ref.number, ref.commit) == expected
    assert parse_pull(str(ref)).repository == ref.repository


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12",
        "#12",
        "vllm#12",
        "vllm-project/vllm",
        "vllm-project/vllm#0",
        "vllm-project/vllm#x",
        "vllm-project/vllm@main",
        "vllm-project/vllm@12345",
        "vllm-project/vllm#1@",
        "-o/vllm#1",
        "o/..#1",
        "o/r#1; rm -rf /",
        "https://github.com/vllm-project/vllm/issues/7",
        "https://github.com/vllm-project/vllm",
        "file:///etc/passwd",
    ],
)
def test_an_invalid_reference_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a pull request or commit"):
        parse_pull(text)


def test_a_bare_number_error_shows_the_full_form() -> None:
    with pytest.raises(UsageError) as caught:
        parse_pull("#12")
    assert caught.value.hint == "vllm-project/vllm#12"


def test_layer_names() -> None:
    assert parse_pull("vllm-project/vllm#40082").layer_name == "pr-vllm-40082"
    assert parse_pull("o/My_Repo.js#1").layer_name == "pr-my-repo-js-1"
    assert parse_pull(f"o/r@{SHA}").layer_name == f"commit-r-{SHA[:12]}"


SITES = {
    "": ("https://api.github.com", "github.com"),
    "github.com": ("https://api.github.com", "github.com"),
    "https://api.github.com/": ("https://api.github.com", "github.com"),
    "ghe.example.com": ("https://ghe.example.com/api/v3", "ghe.example.com"),
    "https://GHE.example.com:8443": ("https://GHE.example.com:8443/api/v3", "ghe.example.com"),
    "https://mirror.example.com/github/": (
        "https://mirror.example.com/github",
        "mirror.example.com",
    ),
    "http://127.0.0.1:8080": ("http://127.0.0.1:8080/api/v3", "127.0.0.1"),
}


@pytest.mark.parametrize(("setting", "expected"), SITES.items())
def test_the_configured_forge(
    monkeypatch: pytest.MonkeyPatch, setting: str, expected: tuple[str, str]
) -> None:
    monkeypatch.setenv("SPARK_BUILD_FORGE", setting)
    assert (site().api, site().host) == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("http://ghe.example.com", "only https"),
        ("https://me:secret@ghe.example.com", "contains a user name"),
        ("ftp://ghe.example.com", "is not a host"),
        ("https://", "is not a host"),
        ("https://ghe.example.com/?a=b", "is not a host"),
    ],
)
def test_a_forge_that_is_not_allowed(
    monkeypatch: pytest.MonkeyPatch, setting: str, message: str
) -> None:
    monkeypatch.setenv("SPARK_BUILD_FORGE", setting)
    with pytest.raises(UsageError, match=message) as caught:
        site()
    assert "secret" not in str(caught.value)


def set_all(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


class TestTokens:
    def test_spark_build_token_comes_first_and_goes_to_the_configured_forge(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_all(monkeypatch, SPARK_BUILD_FORGE_TOKEN="ours", GITHUB_TOKEN="theirs", GH_TOKEN="x")
        assert (site().token, site().token_name) == ("ours", "SPARK_BUILD_FORGE_TOKEN")
        monkeypatch.setenv("SPARK_BUILD_FORGE", "ghe.example.com")
        assert site().token == "ours"

    def test_github_token_goes_to_github(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_all(monkeypatch, GITHUB_TOKEN="", GH_TOKEN="second")
        assert (site().token, site().token_name) == ("second", "GH_TOKEN")

    def test_github_token_goes_to_no_other_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_all(monkeypatch, GITHUB_TOKEN="a", GH_TOKEN="b", SPARK_BUILD_FORGE="mirror.example.com")
        assert site().token == ""

    @pytest.mark.parametrize(
        ("name", "value"),
        [("GITHUB_API_URL", "https://ghe.example.com/api/v3"), ("GH_HOST", "GHE.example.com")],
    )
    def test_github_token_goes_to_the_server_named_in_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        set_all(monkeypatch, GITHUB_TOKEN="a", SPARK_BUILD_FORGE="ghe.example.com", **{name: value})
        assert site().token == "a"

    def test_is_not_in_the_repr(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GITHUB_TOKEN", "very-secret")
        assert "very-secret" not in repr(site())

    def test_that_would_break_a_header_is_refused_unseen(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GITHUB_TOKEN", "sec\nret")
        with pytest.raises(UsageError, match="GITHUB_TOKEN has characters") as caught:
            site()
        assert "sec" not in str(caught.value)


@pytest.mark.parametrize("text", ["https://[::1/o/r/pull/1", "http://[/", "https://[x]/o/r/pull/1"])
def test_an_address_that_is_none_is_no_reference(text: str) -> None:
    with pytest.raises(UsageError, match="is not a"):
        parse_pull(text)


@pytest.mark.parametrize("text", ["https://[::1", "https://h:99999", "h:x", "https://h:-1"])
def test_a_forge_that_is_no_address_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_BUILD_FORGE", text)
    with pytest.raises(UsageError, match="SPARK_BUILD_FORGE is not the address"):
        site()
    monkeypatch.setenv("SPARK_BUILD_FORGE", "https://ghe.example.com")
    monkeypatch.setenv("GITHUB_API_URL", text if "://" in text else f"https://{text}")
    with pytest.raises(UsageError, match="GITHUB_API_URL is not the address"):
        site()


def test_a_clone_of_no_user_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no such user"):
        Forges(["~nobody-has-this-name/clone"]).for_repository("o/r")
