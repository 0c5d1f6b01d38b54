"""Turn a plan into an image: BuildKit, or the embedded OCI engine.  Both give the same files."""
