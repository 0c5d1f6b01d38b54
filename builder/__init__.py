"""Build and verify patched vLLM images for the NVIDIA DGX Spark (GB10, SM121)."""

__version__ = "0.1.0"
