"""Greedy, beam and sampling search for sequence-to-sequence models."""

from sparseformer.generation.interface import generate
from sparseformer.generation.rules import Hypothesis

__all__ = ["Hypothesis", "generate"]
