"""Unit tests of ``builder/publishing/distribute``."""
