"""Open or update one pull request with a report; merge nothing.

    propose.py REPORT.md

The branch ``outdated`` gets one commit on top of ``main``, with the report as a file.  Reads
GITHUB_API_URL, GITHUB_REPOSITORY and GITHUB_TOKEN.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

BRANCH, BASE, FILE = "outdated", "main", ".github/outdated.md"
#: GitHub refuses a body of more than 65,536 characters.
LONGEST = 60_000
MISSING = (404, 422)


def ask(method: str, path: str, body: object = None) -> Any:
    """One request to the API; None where it says that there is no such thing."""
    repository = f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}"
    request = urllib.request.Request(  # noqa: S310 - GitHub's own address
        f"{repository}/{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {os.environ['GITHUB_TOKEN']}",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code in MISSING and (method, path) == ("PATCH", f"git/refs/heads/{BRANCH}"):
            return None
        raise SystemExit(f"{method} {path}: {error.code} {error.read(500)!r}") from None


def put_on_branch(text: str, title: str) -> None:
    """Let the branch be one commit on top of main; it is never equal to main on the way."""
    main = ask("GET", f"git/ref/heads/{BASE}")["object"]["sha"]
    tree = ask("GET", f"git/commits/{main}")["tree"]["sha"]
    entry = {"path": FILE, "mode": "100644", "type": "blob", "content": text}
    new = ask("POST", "git/trees", {"base_tree": tree, "tree": [entry]})["sha"]
    commit = ask("POST", "git/commits", {"message": title, "tree": new, "parents": [main]})["sha"]
    if ask("PATCH", f"git/refs/heads/{BRANCH}", {"sha": commit, "force": True}) is None:
        ask("POST", "git/refs", {"ref": f"refs/heads/{BRANCH}", "sha": commit})


def propose(text: str, title: str) -> str:
    """Update the open pull request of the branch, else open one; its address."""
    body = text if len(text) <= LONGEST else f"{text[:LONGEST]}\n\nThe rest is in `{FILE}`.\n"
    owner = os.environ["GITHUB_REPOSITORY"].partition("/")[0]
    open_ones = ask("GET", f"pulls?state=open&base={BASE}&head={owner}:{BRANCH}")
    if open_ones:
        pull = ask("PATCH", f"pulls/{open_ones[0]['number']}", {"title": title, "body": body})
    else:
        pull = ask("POST", "pulls", {"title": title, "head": BRANCH, "base": BASE, "body": body})
    return str(pull["html_url"])


def main() -> None:
    """Read the report, and propose it."""
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    put_on_branch(text, title)
    print(propose(text, title))


if __name__ == "__main__":
    main()
