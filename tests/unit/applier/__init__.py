"""Unit tests of ``builder/applier``."""
