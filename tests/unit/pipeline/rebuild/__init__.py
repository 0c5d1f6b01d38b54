"""Unit tests of ``builder/pipeline/rebuild``."""
