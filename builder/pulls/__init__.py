"""Turn pull requests into layers: from a diff of the forge to ops that work offline."""
