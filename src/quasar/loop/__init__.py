"""Decoding one sequence: draft, verify, decide, commit, stop."""
