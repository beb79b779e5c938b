"""Entmax, the family of mappings from softmax (alpha = 1) to sparsemax (alpha = 2) and beyond."""

from sparseformer.kernels.entmax.interface import entmax, entmax15, log_entmax, sparsemax

__all__ = ["entmax", "entmax15", "log_entmax", "sparsemax"]
