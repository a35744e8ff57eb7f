"""The process and its machine: processes, memory, dtypes, progress, compile times."""
