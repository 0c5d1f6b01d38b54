"""Unit tests of ``builder/engines``."""
