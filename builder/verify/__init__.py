"""Verification: what was expected, what was seen, where; pass, fail, or not run and why.

A check that could not run is never a pass.
"""
