#!/usr/bin/env python3
"""Checks an image from inside: ``docker run --rm IMAGE spark-verify``.

Standard library only, beside its two siblings ``spark_apply.py`` and ``dispatch_probe.py``.  It
reads the plan that was baked in, checks every receipt and the environment, and asks the image's own
vLLM which kernels it selects for SM121.  Exit status: 0 all passed, 5 a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import spark_apply  # type: ignore[import-not-found]

EXIT_FAILED = 5


def check(level: str, name: str, good: bool, expected: str, seen: str) -> dict[str, Any]:
    """One check with its evidence."""
    status = "pass" if good else "fail"
    return {"level": level, "name": name, "status": status, "expected": expected, "seen": seen}


def check_layers(plan: dict[str, Any], root: Path) -> list[dict[str, Any]]:
    """Is every layer that the plan applied still there, file by file?"""
    tree = spark_apply.DirTree(root)
    receipts = spark_apply.receipts_of(tree)
    checks = []
    for layer in plan["layers"]:
        if layer["state"] != "needed":
            continue
        receipt = next((r for r in receipts if r["layer"] == layer["name"]), None)
        expected = "receipt present and every file as it says"
        if receipt is None:
            seen, good = "no receipt: the layer is not applied", False
        else:
            wrong = spark_apply.unexplained(receipt, receipts, tree)
            good = not wrong
            seen = f"{len(wrong)} files differ, such as {wrong[0]}" if wrong else "as recorded"
        checks.append(check("static", f"layer {layer['name']}", good, expected, seen))
    return checks


def check_environment(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Does this process see the variables that the plan set?"""
    return [
        check(
            "static",
            f"env {name}",
            os.environ.get(name) == value,
            value,
            os.environ.get(name, "(unset)"),
        )
        for name, value in sorted(plan["env"].items())
    ]


def flag_value(flags: list[str], name: str) -> str:
    """The value of a ``vllm serve`` flag, or ``auto``."""
    return flags[flags.index(name) + 1] if name in flags else "auto"


def check_dispatch(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Does vLLM, told that the device is SM121, select what the profile expects?"""
    flags = [*plan["serve_flags"], *plan["moe_serve_flags"]]
    asks = []
    for item in plan["expect"]:
        setting = "moe-backend" if item["kind"].endswith("-moe") else "linear-backend"
        value = flag_value(flags, f"--{setting}")
        asks.append({"kind": item["kind"], setting.replace("-", "_"): value})
    if not asks:
        return []
    answer = subprocess.run(
        [sys.executable, "-B", str(HERE / "dispatch_probe.py")],
        input=json.dumps({"ask": asks}),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    try:
        result = json.loads(answer.stdout)
    except ValueError:
        seen = f"the probe ended with {answer.returncode} and no result"
        return [check("dispatch", i["kind"], False, i["line"], seen) for i in plan["expect"]]
    checks = []
    for number, item in enumerate(plan["expect"]):
        if result["fatal"]:
            good, seen = False, f"{result['fatal']['type']}: {result['fatal']['message']}"
        else:
            reply = result["answers"][number]
            telling = [t for t in reply["lines"] if t.startswith(("Using ", "Selected "))]
            error = reply["error"]
            good = error is None and any(item["line"] in text for text in reply["lines"])
            seen = telling[-1] if telling and error is None else str(error or reply["selected"])
        checks.append(check("dispatch", item["kind"], good, item["line"], seen))
    for part in result.get("simulated", []):
        print(f"  simulated  {part}", file=sys.stderr)
    return checks


def main() -> int:
    """Run all checks and print them."""
    parser = argparse.ArgumentParser(description="verify this spark-build image from inside")
    parser.add_argument("--json", action="store_true", help="print the evidence as JSON")
    options = parser.parse_args()
    plan = json.loads((HERE / "plan.json").read_bytes())
    root = Path(plan["base"]["site_packages"])
    if not root.is_dir():
        root = spark_apply.find_site_packages()
    checks = [*check_layers(plan, root), *check_environment(plan), *check_dispatch(plan)]
    passed = bool(checks) and all(item["status"] == "pass" for item in checks)
    if options.json:
        print(json.dumps({"schema": 1, "passed": passed, "checks": checks}, indent=1))
    else:
        for item in checks:
            mark = "PASS" if item["status"] == "pass" else "FAIL"
            print(f"{mark}  {item['level']:<9}{item['name']}: {item['seen']}")
            if item["status"] != "pass":
                print(f"      expected: {item['expected']}")
        print(f"plan {plan['plan_digest']}: {'verified' if passed else 'NOT verified'}")
    return 0 if passed else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
