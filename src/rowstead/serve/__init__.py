"""Predictions from a trained model: to Parquet, and as an exported program that carries its own preprocessing."""
