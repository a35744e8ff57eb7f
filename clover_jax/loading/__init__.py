"""Base, head and tree together, the input of an engine, loaded or as shapes alone."""
