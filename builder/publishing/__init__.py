"""Publish images: tags, evidence, attachments, and the order of writes to a registry."""
