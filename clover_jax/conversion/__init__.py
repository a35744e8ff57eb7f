"""The command `convert`: a head in another layout, verified by decoding."""
