"""Unit tests of ``builder/distribute``."""
