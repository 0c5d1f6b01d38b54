"""The kernels of level ``numbers`` on a Hopper GPU: docs/hopper.md."""
