"""Draft heads behind one contract (`drafter.py`), one file each, found through `registry.py`."""
