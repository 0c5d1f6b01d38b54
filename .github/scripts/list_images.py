"""Print the jobs of the images workflow as step outputs: every profile on every base.

``thin`` lists what the oci engine builds; ``docker`` what needs a Docker Engine and disk.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path


def jobs(wanted: dict[str, list[str]], only: str = "") -> dict[str, list[dict[str, str]]]:
    """Both lists; ``only`` keeps the jobs whose profile or base holds that text."""
    chosen: dict[str, list[dict[str, str]]] = {"thin": [], "docker": []}
    for profile, base in itertools.product(wanted["profiles"], wanted["bases"]):
        if only and only not in profile and only not in base:
            continue
        name = f"{profile}-{re.sub(r'[^A-Za-z0-9.]+', '-', base.rpartition('/')[2])}"
        lane = "docker" if profile in wanted["docker"] else "thin"
        chosen[lane].append({"name": name, "profile": profile, "base": base})
        # no two jobs move the same tag; a profile's own name follows the last base of the list
        version = re.sub(r"[^A-Za-z0-9.]+", "-", base.rpartition(":")[2]).removeprefix("v")
        tags = [f"{version}-{profile}", *([profile] if base == wanted["bases"][-1] else [])]
        chosen[lane][-1]["tags"] = " ".join(tags)
    return chosen


if __name__ == "__main__":
    table = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    listed = jobs(table, sys.argv[2] if len(sys.argv) > 2 else "")
    if not any(listed.values()):
        sys.exit(f"no image in {sys.argv[1]} matches {sys.argv[2]!r}")
    for lane, rows in listed.items():
        print(f"{lane}={json.dumps(rows)}")
