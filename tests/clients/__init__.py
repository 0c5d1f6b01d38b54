"""Recipes, held against the real clients that start them."""
