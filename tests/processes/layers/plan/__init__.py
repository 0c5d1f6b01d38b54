"""Tests of ``builder/layers/plan``."""
