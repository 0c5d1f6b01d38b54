"""Benchmarks: each compares alternatives in one run and reports ratios; none is a test."""
