"""Copy an image to machines over SSH; each fetches only the layers that it lacks."""
