"""Sparse attention and sparse losses for training transformers.

The functions are in `sparseformer.functional`, the modules in `sparseformer.nn`.
"""

__version__ = "0.1.0"
