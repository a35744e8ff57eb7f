"""Decoding: trees, the one step and its stages, and the engine with its continuous batching."""
