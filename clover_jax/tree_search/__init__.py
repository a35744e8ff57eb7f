"""tree_search."""
