"""Bytes to batches: synthetic logs, Parquet, Criteo, MovieLens; hashing, transforms, statistics."""
