"""Sparse attention and sparse losses inside models of other libraries."""
