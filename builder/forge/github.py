"""Pull requests through the REST API of GitHub, or of a compatible server."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from builder.errors import RemoteError
from builder.forge import CLOSED, MAX_ARCHIVE, MERGED, OPEN, PullFacts
from builder.forge.http import ForgeMissing

if TYPE_CHECKING:
    from builder.forge.http import ForgeClient
    from builder.forge.reference import PullRef

_JSON = "application/vnd.github+json"
_DIFF = "application/vnd.github.diff"
_FULL = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
#: Phrases that name a superseding pull request.
_SUPERSEDED = re.compile(
    r"(?:supersed|replac)ed\s+(?:by|with)|\bin\s+favou?r\s+of\b", re.IGNORECASE
)
_NAMED = re.compile(
    r"(?:(?P<repository>[\w-]+/[\w.-]+)?#|https://[\w.:-]+/(?P<page>[\w-]+/[\w.-]+)/pull/)"
    r"(?P<number>\d+)"
)


class GitHub:
    """The forge behind an API."""

    def __init__(self, client: ForgeClient) -> None:
        self._client = client

    def facts(self, ref: PullRef) -> PullFacts:
        return self._pull(ref) if ref.number else self._commit(ref)

    def _pull(self, ref: PullRef) -> PullFacts:
        subject = f"{ref.repository}#{ref.number}"
        pull = self._json(f"/repos/{ref.repository}/pulls/{ref.number}", subject)
        try:
            head, repository = str(pull["head"]["sha"]), str(pull["base"]["repo"]["full_name"])
            target, merged = str(pull["base"]["sha"]), bool(pull["merged_at"])
            state = MERGED if merged else {"open": OPEN, "closed": CLOSED}[str(pull["state"])]
        except (KeyError, TypeError) as error:
            raise self._odd(subject, error) from None
        notice = ""
        commit = head
        if ref.commit:
            commit = self._full_name(repository, ref.commit)
            notice = self._off_head(repository, commit, head)
        return PullFacts(
            repository=repository,
            number=ref.number,
            commit=commit,
            target=target,
            title=str(pull.get("title") or ""),
            state=state,
            merge_commit=str(pull.get("merge_commit_sha") or "") if merged else "",
            merged_at=str(pull["merged_at"] or "")[:10],
            superseded_by=self._superseded(pull, repository, ref) if state == CLOSED else "",
            url=str(pull.get("html_url") or ""),
            notice=notice,
        )

    def _commit(self, ref: PullRef) -> PullFacts:
        subject = str(ref)
        found = self._json(f"/repos/{ref.repository}/commits/{ref.commit}", subject)
        try:
            commit, parents = str(found["sha"]), found["parents"]
            target = str(parents[0]["sha"])
            message = str(found["commit"]["message"])
        except (KeyError, TypeError) as error:
            raise self._odd(subject, error) from None
        except IndexError:
            raise RemoteError(f"{subject} is the first commit, so it has no parent") from None
        url = str(found.get("html_url") or "")
        page = re.search(r"//[^/]+/([^/]+/[^/]+)/commit/", url)
        return PullFacts(
            repository=page[1] if page else ref.repository,
            commit=commit,
            target=target,
            title=message.partition("\n")[0],
            merge_commit=commit,
            merged_at=str((found["commit"].get("committer") or {}).get("date") or "")[:10],
            url=url,
        )

    def merge_base(self, repository: str, target: str, commit: str) -> str:
        subject = f"{repository}: {target[:12]}...{commit[:12]}"
        compared = self._json(f"/repos/{repository}/compare/{target}...{commit}", subject)
        try:
            return str(compared["merge_base_commit"]["sha"])
        except (KeyError, TypeError) as error:
            raise self._odd(subject, error) from None

    def date(self, repository: str, commit: str) -> str:
        subject = f"{repository}@{commit[:12]}"
        found = self._json(f"/repos/{repository}/commits/{commit}", subject)
        try:
            return str(found["commit"]["committer"]["date"])[:10]
        except (KeyError, TypeError) as error:
            raise self._odd(subject, error) from None

    def diff(self, repository: str, base: str, commit: str) -> bytes:
        path = f"/repos/{repository}/compare/{base}...{commit}"
        return self._client.get(path, _DIFF, f"{repository}@{commit[:12]}")

    def releases_with(self, repository: str, commit: str) -> tuple[str, ...] | None:
        del repository, commit
        return None  # one question per tag: the files of the releases answer it instead

    def commit(self, repository: str, name: str) -> str:
        return self._full_name(repository, name)

    def archive(self, repository: str, commit: str) -> bytes:
        path, subject = f"/repos/{repository}/tarball/{commit}", f"{repository}@{commit[:12]}"
        return self._client.get(path, _JSON, subject, limit=MAX_ARCHIVE)

    # -- shared

    def _json(self, path: str, subject: str) -> Any:
        data = self._client.get(path, _JSON, subject)
        try:
            return json.loads(data)
        except ValueError as error:
            raise self._odd(subject, error) from None

    def _odd(self, subject: str, error: Exception) -> RemoteError:
        return RemoteError(
            f"{subject}: {self._client.site.host} did not answer like GitHub's API "
            f"({type(error).__name__}: {error})",
            hint="SPARK_BUILD_FORGE should be the address of the API",
        )

    def _full_name(self, repository: str, commit: str) -> str:
        if _FULL.fullmatch(commit):
            return commit
        found = self._json(f"/repos/{repository}/commits/{commit}", f"{repository}@{commit}")
        return str(found["sha"])

    def _off_head(self, repository: str, commit: str, head: str) -> str:
        """A notice if a named commit is not part of the pull request's current head."""
        if commit == head:
            return ""
        subject = f"{repository}: {commit[:12]}...{head[:12]}"
        try:
            compared = self._json(f"/repos/{repository}/compare/{commit}...{head}", subject)
        except ForgeMissing:
            compared = {}
        if compared.get("status") == "ahead":
            return f"its head is now {head[:12]}, {compared.get('ahead_by')} commits ahead"
        return f"{commit[:12]} is not in the history of its head, now {head[:12]}"

    def _superseded(self, pull: dict[str, Any], repository: str, ref: PullRef) -> str:
        """The pull request that supersedes this one, if its text or a comment says so."""
        texts = [str(pull.get("body") or "")]
        path = f"/repos/{repository}/issues/{ref.number}/comments?per_page=100"
        comments = self._json(path, f"comments of {ref}")
        texts += [str(comment.get("body") or "") for comment in comments]
        for text in reversed(texts):
            for mention in _SUPERSEDED.finditer(text):
                named = _NAMED.search(text, mention.end(), mention.end() + 160)
                if named:
                    where = named["repository"] or named["page"] or repository
                    return f"{where}#{named['number']}"
        return ""
