"""Published checkpoints: T5, mT5, BART, mBART, Marian and Pegasus, loaded and saved back."""

from sparseformer.pretrained.checkpoint import (
    PretrainedCheckpoint,
    load_pretrained,
    load_tokenizer,
    read_pretrained,
)
from sparseformer.pretrained.files import is_pretrained
from sparseformer.pretrained.generation import GenerationDefaults
from sparseformer.pretrained.saving import attention_of, save_pretrained, save_settings
from sparseformer.pretrained.settings import START_ALPHA, PretrainedSettings, read_settings

__all__ = [
    "START_ALPHA",
    "GenerationDefaults",
    "PretrainedCheckpoint",
    "PretrainedSettings",
    "attention_of",
    "is_pretrained",
    "load_pretrained",
    "load_tokenizer",
    "read_pretrained",
    "read_settings",
    "save_pretrained",
    "save_settings",
]
