"""Tests of ``builder/common``."""
