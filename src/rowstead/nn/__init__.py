"""Networks above the embedding tables, and `EmbeddingBags` for any other PyTorch model."""
