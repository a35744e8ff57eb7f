"""Time the parts of a decoding step, alternating."""
