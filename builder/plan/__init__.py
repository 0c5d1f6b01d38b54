"""Plans: their values, making them, and what an image carries of them."""
