"""Tests against a real Docker Engine, a real registry and the real released wheels."""
