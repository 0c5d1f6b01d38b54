"""Tests of ``builder/registry``."""
