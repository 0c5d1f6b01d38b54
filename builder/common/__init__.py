"""Common ground: the network, the package index, caches, values, JSON documents, the console."""
