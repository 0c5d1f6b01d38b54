"""Publishing: names, proof, attachments, and the order in which a registry is written to."""
