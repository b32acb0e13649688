"""Verifiers: what runs the target."""
