"""axe: what a page lacks for people who use a screen reader, a keyboard or strong contrast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import npm

if TYPE_CHECKING:
    from .chromium import Page

PACKAGE = "axe-core@4.14.1"
#: `npm view axe-core@4.14.1 dist.integrity`
INTEGRITY = (
    "sha512-"
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
)
_RUN = """
axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.flatMap(
  rule => rule.nodes.map(
    node => rule.id + ': ' + node.target.join(' ') + ': ' + node.failureSummary)))
"""


def violations(page: Page) -> list[str]:
    """Every violation: rule, element, and what to change."""
    source = (npm.package(PACKAGE, INTEGRITY) / "axe.min.js").read_text("utf-8")
    page.evaluate(f"{source};0")
    found: list[str] = page.evaluate(_RUN)
    return found
