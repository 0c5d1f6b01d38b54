"""Tests of ``builder/util``."""
