"""Tests of ``builder/common/net``."""
