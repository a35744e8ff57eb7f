"""The network of a base: attention over a committed cache, decoder layers, int8 matrices."""
