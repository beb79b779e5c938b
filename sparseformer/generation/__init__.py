"""Greedy, beam and sampling search for sequence-to-sequence models."""

from sparseformer.generation.interface import generate
from sparseformer.generation.rules import Constraints, Hypothesis

__all__ = ["Constraints", "Hypothesis", "generate"]
