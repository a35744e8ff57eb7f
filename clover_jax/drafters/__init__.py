"""Draft heads: the contract (`drafter.py`), and one file a method."""
