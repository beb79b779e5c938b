"""The blocks express T5, BART, Marian and mBART: equal outputs with copied random weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseformer.config import ModelConfig
from sparseformer.nn.attention import MultiheadAttention
from sparseformer.nn.blocks import Conventions
from sparseformer.nn.layers import FeedForward
from sparseformer.nn.transformer import Seq2SeqTransformer

VOCAB = 30
SIZES: dict[str, Any] = {
    "d_model": 16,
    "num_heads": 4,
    "ffn_dim": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "max_positions": 20,
}
BART_NAMES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
SRC = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
TGT = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(2))
LENGTH = torch.tensor([9, 5])


def _copy_linear(ours: nn.Linear, *theirs: nn.Module) -> None:
    state = {
        name: [layer.state_dict()[name] for layer in theirs] for name in theirs[0].state_dict()
    }
    ours.load_state_dict({name: torch.cat(parts) for name, parts in state.items()})


def _copy_attention(ours: MultiheadAttention, theirs: nn.Module, names: str) -> None:
    q, k, v, o = (getattr(theirs, name) for name in names.split())
    _copy_linear(ours.in_proj, q, k, v)
    _copy_linear(ours.out_proj, o)


def _copy_norm(ours: nn.Module, theirs: nn.Module) -> None:
    ours.load_state_dict(theirs.state_dict())


def _copy_t5_feed_forward(ours: FeedForward, theirs: nn.Module) -> None:
    names = ["wi_0", "wi_1"] if ours.is_gated else ["wi"]
    _copy_linear(ours.in_proj, *(getattr(theirs, name) for name in names))
    _copy_linear(ours.out_proj, theirs.wo)


def _copy_t5_stack(ours: nn.Module, theirs: nn.Module) -> None:
    bias = theirs.block[0].layer[0].SelfAttention.relative_attention_bias
    ours.positions.t5.load_state_dict(bias.state_dict())
    _copy_norm(ours.final_norm, theirs.final_layer_norm)
    for block, source in zip(ours.blocks, theirs.block, strict=True):
        _copy_attention(block.self_attention, source.layer[0].SelfAttention, "q k v o")
        _copy_norm(block.self_attention_residual.norm, source.layer[0].layer_norm)
        if len(source.layer) == 3:
            _copy_attention(block.cross_attention, source.layer[1].EncDecAttention, "q k v o")
            _copy_norm(block.cross_attention_residual.norm, source.layer[1].layer_norm)
        _copy_t5_feed_forward(block.feed_forward, source.layer[-1].DenseReluDense)
        _copy_norm(block.feed_forward_residual.norm, source.layer[-1].layer_norm)


def _copy_bart_stack(ours: nn.Module, theirs: nn.Module) -> None:
    names = "q_proj k_proj v_proj out_proj"
    if ours.positions.kind == "learned":
        ours.positions.added.load_state_dict(theirs.embed_positions.state_dict())
    for name, source in [("first_norm", "layernorm_embedding"), ("final_norm", "layer_norm")]:
        if hasattr(theirs, source):
            _copy_norm(getattr(ours, name), getattr(theirs, source))
    for block, source in zip(ours.blocks, theirs.layers, strict=True):
        _copy_attention(block.self_attention, source.self_attn, names)
        _copy_norm(block.self_attention_residual.norm, source.self_attn_layer_norm)
        if hasattr(source, "encoder_attn"):
            _copy_attention(block.cross_attention, source.encoder_attn, names)
            _copy_norm(block.cross_attention_residual.norm, source.encoder_attn_layer_norm)
        _copy_linear(block.feed_forward.in_proj, source.fc1)
        _copy_linear(block.feed_forward.out_proj, source.fc2)
        _copy_norm(block.feed_forward_residual.norm, source.final_layer_norm)


def _assert_equal_logits(ours: Seq2SeqTransformer, theirs: nn.Module) -> None:
    mask = (torch.arange(9) < LENGTH[:, None]).long()
    with torch.no_grad():
        expected: Tensor = theirs(input_ids=SRC, attention_mask=mask, decoder_input_ids=TGT).logits
        actual = ours.logits(ours(SRC, LENGTH, TGT))
    assert expected.std() > 0.05
    torch.testing.assert_close(actual, expected, atol=3e-5, rtol=1e-4)


def _randomise(model: nn.Module) -> None:
    """Leave no norm at 1 and no bias at 0, so that one that is dropped or swapped shows."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, mean=0.1, std=0.3)


@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_t5(version: str) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    is_first = version == "v1.0"
    theirs = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=16,
            d_kv=6,
            d_ff=24,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="relu" if is_first else "gated-gelu",
            tie_word_embeddings=is_first,
        )
    ).eval()
    _randomise(theirs)
    config = ModelConfig(
        **SIZES,
        positions="t5",
        norm="rms_norm",
        activation="relu" if is_first else "gated_gelu_tanh",
        tie_embeddings=is_first,
    )
    conventions = Conventions(
        bias=False,
        head_dim=6,
        score_scale=1.0,
        embedding_scale=1.0,
        output_scale=16**-0.5 if is_first else 1.0,
    )
    ours = Seq2SeqTransformer(config, VOCAB, conventions=conventions).eval()
    ours.embedding.load_state_dict(theirs.shared.state_dict())
    if ours.output is not None:
        ours.output.load_state_dict(theirs.lm_head.state_dict())
    _copy_t5_stack(ours.encoder, theirs.encoder)
    _copy_t5_stack(ours.decoder, theirs.decoder)
    _assert_equal_logits(ours, theirs)


def _bart() -> tuple[nn.Module, ModelConfig, Conventions]:
    from transformers import BartConfig, BartForConditionalGeneration

    config = ModelConfig(**SIZES, positions="learned", norm_position="post", activation="gelu")
    conventions = Conventions(
        embedding_norm=True, embedding_scale=1.0, position_offset=2, logits_bias=True
    )
    return BartForConditionalGeneration(BartConfig(**BART_NAMES)), config, conventions


def _marian() -> tuple[nn.Module, ModelConfig, Conventions]:
    from transformers import MarianConfig, MarianMTModel

    config = ModelConfig(**SIZES, norm_position="post", activation="swish")
    theirs = MarianConfig(**BART_NAMES, activation_function="swish", scale_embedding=True)
    return MarianMTModel(theirs), config, Conventions(logits_bias=True)


def _mbart() -> tuple[nn.Module, ModelConfig, Conventions]:
    from transformers import MBartConfig, MBartForConditionalGeneration

    config = ModelConfig(**SIZES, positions="learned", activation="gelu")
    conventions = Conventions(embedding_norm=True, position_offset=2, logits_bias=True)
    theirs = MBartConfig(**BART_NAMES, scale_embedding=True)
    return MBartForConditionalGeneration(theirs), config, conventions


@pytest.mark.parametrize("build", [_bart, _marian, _mbart], ids=["bart", "marian", "mbart"])
def test_bart_family(build: Any) -> None:
    torch.manual_seed(0)
    theirs, config, conventions = build()
    theirs.eval()
    _randomise(theirs)
    nn.init.normal_(theirs.final_logits_bias)
    ours = Seq2SeqTransformer(config, VOCAB, conventions=conventions).eval()
    ours.embedding.load_state_dict({"weight": theirs.get_input_embeddings().weight})
    ours.logits_bias.copy_(theirs.final_logits_bias[0])
    _copy_bart_stack(ours.encoder, theirs.model.encoder)
    _copy_bart_stack(ours.decoder, theirs.model.decoder)
    _assert_equal_logits(ours, theirs)
