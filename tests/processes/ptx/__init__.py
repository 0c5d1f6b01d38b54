"""Programs that run the PTX executor on hostile input."""
