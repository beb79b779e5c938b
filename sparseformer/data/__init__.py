"""Pairs of texts, tokenizers and batches."""

from sparseformer.data.baselines import baseline_predictions
from sparseformer.data.batching import Batch, collate, epoch_batches, eval_batches
from sparseformer.data.encoding import EncodedPairs, encode_pairs
from sparseformer.data.pairs import BaselineName, Pair, PairDataset, Rejection, shared_inputs
from sparseformer.data.report import describe
from sparseformer.data.sources import load_dataset
from sparseformer.data.tokenizer import Tokenizer, build_tokenizer

__all__ = [
    "BaselineName",
    "Batch",
    "EncodedPairs",
    "Pair",
    "PairDataset",
    "Rejection",
    "Tokenizer",
    "baseline_predictions",
    "build_tokenizer",
    "collate",
    "describe",
    "encode_pairs",
    "epoch_batches",
    "eval_batches",
    "load_dataset",
    "shared_inputs",
]
