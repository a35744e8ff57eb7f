"""Atomic files, row files that resume, training checkpoints."""
