"""``spark-build lock``: write, check or renew the project's lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.console import console, print_json
from builder.pipeline.locking import lock_requests

if TYPE_CHECKING:
    from builder.pipeline.options import PlanOptions


def lock_command(options: PlanOptions, *, check: bool, json: bool) -> None:
    """Write the lock, or with ``check`` only check it (exit 9 if stale)."""
    done = lock_requests(options, check=check)
    if json:
        print_json(done)
    if check:
        done.refuse_stale()
        if not json:
            print(f"{done.lock} is up to date for {len(done.requests)}")
        return
    if json:
        return
    for key, lines in done.changes.items():
        console.say(f"  {key}")
        for line in lines:
            console.say(f"    {line}")
    changed = "" if done.written else ", nothing changed"
    print(f"{done.lock}: {len(done.requests)} locked{changed}")
