"""A recipe as files of other tools, one module a format."""
