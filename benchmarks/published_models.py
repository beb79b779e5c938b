"""Small random checkpoints of every family, made and saved by transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

VOCAB = 40


class Published(NamedTuple):
    """One checkpoint: how its model is made, and the largest file of its weights."""

    build: Callable[[], nn.Module]
    shard: str = "5GB"


def _finish(model: nn.Module, *, untied: bool) -> nn.Module:
    """Leave no norm at 1 and no bias at 0, so that one that is dropped or swapped shows."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # tables of sines and cosines are fixed
            nn.init.normal_(parameter, mean=0.1, std=1.0 if "shared" in name else 0.3)
    head = model.get_output_embeddings()
    if untied:
        head.weight = nn.Parameter(torch.randn_like(head.weight))
        body = model.base_model
        for side in (body.encoder, body.decoder):
            side.embed_tokens.weight = body.shared.weight
    if hasattr(model, "final_logits_bias"):
        nn.init.normal_(model.final_logits_bias)
    return model.eval()


def _t5(kind: str, *, untied: bool = False, **settings: Any) -> nn.Module:
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 5, "d_ff": 24, "num_layers": 2}
    values = {**sizes, "num_heads": 3, "num_decoder_layers": 1, "decoder_start_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**(values | settings))
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return _finish(model, untied=untied)


def _t5_1_1(**settings: Any) -> nn.Module:
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return _t5("T5", **({"untied": True} | gated | settings))


def _bart(kind: str, heads: int, d_model: int, ffn_dim: int, **settings: Any) -> nn.Module:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": d_model,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": ffn_dim,
        "decoder_ffn_dim": ffn_dim,
        "max_position_embeddings": 30,
    }
    config = getattr(transformers, f"{kind}Config")(**(values | settings))
    name = "MarianMTModel" if kind == "Marian" else f"{kind}ForConditionalGeneration"
    is_tied = settings.get("tie_word_embeddings", True)
    return _finish(getattr(transformers, name)(config), untied=not is_tied)


_MARIAN = {
    "pad_token_id": VOCAB - 1,
    "decoder_start_token_id": VOCAB - 1,
    "activation_function": "swish",
    "scale_embedding": True,
}

PUBLISHED: dict[str, Published] = {
    "t5 1.0, 3 heads of 5 in 16": Published(lambda: _t5("T5")),
    "t5 1.0, 4 heads of 16 in 64, sharded": Published(
        lambda: _t5("T5", d_model=64, d_kv=16, d_ff=96, num_heads=4, num_decoder_layers=3),
        "100KB",
    ),
    "t5 1.1, 3 heads of 5 in 16, untied": Published(_t5_1_1),
    "t5 1.1, 6 heads of 8 in 64, untied, sharded": Published(
        lambda: _t5_1_1(d_model=64, d_kv=8, num_heads=6), "60KB"
    ),
    "t5 1.1, tied, 16 buckets up to 40, eps 0.1": Published(
        lambda: _t5_1_1(
            untied=False,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=40,
            layer_norm_epsilon=0.1,
        )
    ),
    "mt5, 3 heads of 5 in 16, untied": Published(lambda: _t5("MT5", untied=True)),
    "mt5, 5 heads of 8 in 64, untied, sharded": Published(
        lambda: _t5("MT5", d_model=64, d_kv=8, num_heads=5, untied=True), "60KB"
    ),
    "bart, 3 heads of 4 in 12": Published(lambda: _bart("Bart", 3, 12, 20)),
    "bart, 5 heads of 8 in 40, untied, sharded": Published(
        lambda: _bart("Bart", 5, 40, 64, tie_word_embeddings=False, scale_embedding=True), "30KB"
    ),
    "mbart, 3 heads of 4 in 12": Published(
        lambda: _bart("MBart", 3, 12, 20, scale_embedding=True, decoder_start_token_id=35)
    ),
    "mbart, 5 heads of 8 in 40, sharded": Published(
        lambda: _bart("MBart", 5, 40, 64, decoder_start_token_id=2), "30KB"
    ),
    "marian, 3 heads of 4 in 12": Published(lambda: _bart("Marian", 3, 12, 20, **_MARIAN)),
    "marian, 5 heads of 8 in 40, sharded": Published(
        lambda: _bart("Marian", 5, 40, 64, **(_MARIAN | {"activation_function": "relu"})), "30KB"
    ),
    "pegasus, 3 heads of 4 in 12": Published(lambda: _bart("Pegasus", 3, 12, 20)),
    "pegasus, 5 heads of 8 in 40, sharded": Published(
        lambda: _bart("Pegasus", 5, 40, 64, activation_function="relu", scale_embedding=True),
        "30KB",
    ),
}


def publish(name: str, folder: Path) -> nn.Module:
    """Make a checkpoint of `PUBLISHED` and save it; return the model of transformers."""
    torch.manual_seed(sorted(PUBLISHED).index(name))
    model = PUBLISHED[name].build()
    model.save_pretrained(folder, max_shard_size=PUBLISHED[name].shard)
    return model
