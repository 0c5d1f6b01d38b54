"""HTTP to registries, package indexes and forges: sessions, TLS, and limits on time."""
