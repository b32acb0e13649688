"""Drafters: each a strategy in a file of its own."""
