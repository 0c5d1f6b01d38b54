"""Tests of ``builder/proof``."""
