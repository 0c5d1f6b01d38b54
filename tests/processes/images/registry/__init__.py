"""Tests of ``builder/images/registry``."""
