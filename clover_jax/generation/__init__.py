"""Prompt rows into output rows: what `generate` does."""
