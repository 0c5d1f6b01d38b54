"""Explain the log of a model server: selected kernels, the cause of a failure, the fix."""
