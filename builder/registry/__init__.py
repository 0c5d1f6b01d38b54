"""Images where they live: registries and OCI layouts, read and written without a Docker Engine."""
