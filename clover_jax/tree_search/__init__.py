"""The race of `--tree=auto`: a few trees are timed and the fastest is used."""
