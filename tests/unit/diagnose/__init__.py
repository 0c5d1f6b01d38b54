"""Unit tests of ``builder/diagnose``."""
