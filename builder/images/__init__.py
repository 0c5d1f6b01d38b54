"""Images: registries, layouts, trees of files, engines, and what is identified as a base."""
