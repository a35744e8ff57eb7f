"""From files to prompts and training batches."""
