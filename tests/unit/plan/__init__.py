"""Unit tests of ``builder/plan``."""
