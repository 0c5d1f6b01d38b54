"""Tests of ``builder/common/forge``."""
