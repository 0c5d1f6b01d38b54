"""Turn pull requests into layers: from a forge's diff to ops that work offline."""
