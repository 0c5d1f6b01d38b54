"""Read and write images in registries and OCI layouts, without a Docker Engine."""
