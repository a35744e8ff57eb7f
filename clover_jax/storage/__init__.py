"""Atomic files, row files that resume, checkpoints."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "checkpoint": ["Checkpoints", "Restored"],
        "files": ["atomic_directory", "atomic_file", "only_process_in", "write_json", "write_text"],
        "json_files": ["read_json_object"],
        "jsonl": ["append_row", "keep_rows", "read_rows", "to_json"],
        "row_shards": ["Shard", "join_rows"],
        "row_writer": ["RowWriter"],
    },
)
