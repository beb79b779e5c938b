"""Tiny random models of the families that the integration serves, and a dense oracle of entmax."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from sparseformer.functional import entmax

VOCAB = 61
_TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BERT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
_LLAMA = {**_BERT, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_BART = {
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 3}


def _t5(**more: Any) -> nn.Module:
    config = transformers.T5Config(**_TOKENS, **_T5, decoder_start_token_id=0, **more)
    return transformers.T5ForConditionalGeneration(config)


def _modernbert() -> nn.Module:
    special = {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 6}
    config = transformers.ModernBertConfig(**{**_TOKENS, **_BERT, **special})
    config.layer_types = ["full_attention", "sliding_attention"]
    return transformers.ModernBertForMaskedLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(**_TOKENS, n_embd=24, n_layer=2, n_head=3, n_positions=64)
    return transformers.GPT2LMHeadModel(config)


def _qwen2() -> nn.Module:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_TOKENS, **_LLAMA, **window))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "t5": _t5,
    "t5_gated": lambda: _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(**_TOKENS, **_BART)
    ),
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**_TOKENS, **_BART)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_TOKENS, **_BERT)),
    "roberta": lambda: transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(**_TOKENS, **_BERT)
    ),
    "modernbert": _modernbert,
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TOKENS, **_LLAMA)),
    "gpt2": _gpt2,
    "qwen2": _qwen2,
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_TOKENS, **_LLAMA)),
}
SEQ2SEQ = ("t5", "t5_gated", "bart", "marian")
DECODERS = ("llama", "gpt2", "qwen2", "qwen3")
MODULES = {**dict.fromkeys(BUILDERS, 2), **dict.fromkeys(SEQ2SEQ, 6)}


def enable_checkpointing(model: Any) -> None:
    """Turn gradient checkpointing on, which newer versions call by another name."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)()


def build(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return a model in evaluation mode whose attention is far from uniform.

    Fresh weights give nearly equal scores, and then every map and mask looks right.
    """
    torch.manual_seed(7)
    model = BUILDERS[family]()
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "embed" not in name and "shared" not in name:
            nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
        elif parameter.dim() >= 2 and "embed_positions" not in name:
            nn.init.normal_(parameter)
    return model.to(dtype).eval()


def batch(family: str, padding: str = "right") -> dict[str, Tensor]:
    """Return ids [3, 10] of which rows hold 10, 6 and 3, and ids of a decoder [3, 7]."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([10, 6, 3])
    mask = (torch.arange(10) < lengths[:, None]).long()
    mask = mask.flip(1) if padding == "left" else mask
    ids = torch.randint(3, VOCAB, (3, 10), generator=generator) * mask
    found = {"input_ids": ids, "attention_mask": mask}
    if family in SEQ2SEQ:
        found["decoder_input_ids"] = torch.randint(3, VOCAB, (3, 7), generator=generator)
    return found


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits, with zeros at padded positions of models without a decoder input."""
    with torch.no_grad():
        found: Tensor = model(**inputs).logits
    if "decoder_input_ids" in inputs:
        return found
    return found * inputs["attention_mask"][..., None]


def use_dense_oracle(model: Any, alpha: float) -> None:
    """Attend with whole score matrices, transformers' own masks and the row-wise entmax."""

    def attend(
        _module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        position_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query @ key.transpose(2, 3) * scale
        if position_bias is not None:
            scores = scores + position_bias
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask < -1e30, -torch.inf)
        return (entmax(scores, alpha) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("dense_oracle", attend)
    AttentionMaskInterface.register("dense_oracle", eager_mask)
    # set_attn_implementation leaves T5's decoder as it is in 5.17 to 5.19.
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "dense_oracle"
