"""Networks above the embedding tables, and `EmbeddingBags` and `Embeddings` for any other PyTorch model."""
