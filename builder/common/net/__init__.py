"""HTTP to registries, package indexes and forges: sessions, TLS, retries, and time limits."""
