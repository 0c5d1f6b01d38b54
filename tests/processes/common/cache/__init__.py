"""Tests of ``builder/common/cache``."""
