"""Pooled look-up over many tables and the fused optimizer update, on plain tensors."""
