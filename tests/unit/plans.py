"""Plans for tests that look at one part of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from builder.common.document import plain, read
from builder.common.plan import PlanDocument, PullReport
from tests.unit.fakes import fake_base, make_plan_of, vllm_files

if TYPE_CHECKING:
    from builder.common.plan import BuildPlan

PULL = PullReport(
    base="a" * 40, commit="b" * 40, date="2026-01-01", forge="f", repository="o/r",
    request="o/r#1", sha256="c" * 64, size=1, layer="pr-1", in_base="no", installed=(),
    compiled=(), dropped=(), conflicts=(), hints=(),
)  # fmt: skip


def planned(
    made: BuildPlan | PlanDocument | None = None, *, vllm: str = "", **changes: Any
) -> PlanDocument:
    """A plan with other JSON under some of its keys; without one, a plan of no layers.

    ``vllm`` is the release that it is for.
    """
    made = made or make_plan_of(fake_base(vllm_files()))
    document = plain(made if isinstance(made, PlanDocument) else made.document)
    if vllm:
        document["base"]["packages"] = {"vllm": vllm}
    return read({**document, **changes}, PlanDocument)
