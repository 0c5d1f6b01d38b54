"""Values that every step of a build uses: base, platform, plan."""
