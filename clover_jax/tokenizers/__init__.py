"""Tokenizers of bases, loaded without foreign code, and the text of tokens as they come."""
