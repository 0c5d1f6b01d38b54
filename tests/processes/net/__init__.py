"""Tests of ``builder/net``."""
