"""Names of symbols, as c++filt reads them."""

from __future__ import annotations

from builder.compile.operators import demangled


def test_symbol_names_match_the_sources() -> None:
    symbols = ["_Z8launcheri", "_ZN4vllm5splitIiEEvT_", "main"]
    assert demangled(symbols) == {("launcher",), ("vllm", "split"), ("main",)}
