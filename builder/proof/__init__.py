"""Verify a target: each check has an expected and a seen value, and passes, fails or did not run.

A check that could not run is never a pass.
"""
