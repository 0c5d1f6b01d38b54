"""Tests of ``builder/compile``."""
