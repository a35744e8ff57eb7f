"""Bases and draft heads as files: reading, writing, foreign layouts."""
