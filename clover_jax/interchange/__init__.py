"""Draft heads in the layouts of other programs, read and written."""
