"""The values that every step of a build uses: a base and its kind, a platform, a plan."""
