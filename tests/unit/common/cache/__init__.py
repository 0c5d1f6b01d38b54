"""Unit tests of ``builder/common/cache``."""
