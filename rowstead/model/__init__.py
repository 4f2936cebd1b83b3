"""DLRM in one process; takes any EmbeddingStore."""
