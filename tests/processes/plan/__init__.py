"""Tests of ``builder/plan``."""
