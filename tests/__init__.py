"""Tests: unit (no network), wheels (real released wheels), engine (a real Docker Engine)."""
