"""Drafting a token tree, verifying it in one base forward, accepting a path: one compiled step."""
