"""Measure a decoding step, here or for hardware that is not here."""
