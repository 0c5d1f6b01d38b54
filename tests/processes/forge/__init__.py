"""Tests of ``builder/forge``."""
