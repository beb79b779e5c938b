"""What our weights are called in the files of each family."""

from sparseformer.config import ModelConfig

Names = dict[str, tuple[str, ...]]
"""From our name to theirs; several are joined along their first dimension."""


def t5_names(model: ModelConfig) -> Names:
    """Name the weights of T5 and mT5, without the output matrix."""
    names: Names = {"embedding.weight": ("shared.weight",)}
    sides = {"encoder": model.encoder_layers, "decoder": model.decoder_layers}
    for side, num_layers in sides.items():
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        names[f"{side}.positions.t5.weight"] = (bias,)
        names[f"{side}.final_norm.weight"] = (f"{side}.final_layer_norm.weight",)
        for i in range(num_layers):
            names |= _t5_block(f"{side}.blocks.{i}.", f"{side}.block.{i}.layer.", model)
    return names


def _t5_block(ours: str, theirs: str, model: ModelConfig) -> Names:
    names: Names = {}
    parts = [("self_attention", "SelfAttention")]
    if ours.startswith("decoder."):
        parts.append(("cross_attention", "EncDecAttention"))
    for i, (name, source) in enumerate(parts):
        matrices = tuple(f"{theirs}{i}.{source}.{part}.weight" for part in "qkv")
        names[f"{ours}{name}.in_proj.weight"] = matrices
        names[f"{ours}{name}.out_proj.weight"] = (f"{theirs}{i}.{source}.o.weight",)
        names[f"{ours}{name}_residual.norm.weight"] = (f"{theirs}{i}.layer_norm.weight",)
    last = f"{theirs}{len(parts)}."
    inputs = ("wi_0", "wi_1") if model.activation.startswith("gated_") else ("wi",)
    matrices = tuple(f"{last}DenseReluDense.{name}.weight" for name in inputs)
    names[f"{ours}feed_forward.in_proj.weight"] = matrices
    names[f"{ours}feed_forward.out_proj.weight"] = (f"{last}DenseReluDense.wo.weight",)
    names[f"{ours}feed_forward_residual.norm.weight"] = (f"{last}layer_norm.weight",)
    return names


def bart_names(model: ModelConfig, *, embedding_norm: bool) -> Names:
    """Name the weights of BART, mBART, Marian and Pegasus, without the output matrix."""
    names: Names = {
        "embedding.weight": ("model.shared.weight",),
        "logits_bias": ("final_logits_bias",),
    }
    sides = {"encoder": model.encoder_layers, "decoder": model.decoder_layers}
    for side, num_layers in sides.items():
        theirs = f"model.{side}."
        if model.positions == "learned":
            names[f"{side}.positions.added.weight"] = (f"{theirs}embed_positions.weight",)
        if embedding_norm:
            names |= _affine(f"{side}.first_norm", f"{theirs}layernorm_embedding")
        if model.norm_position == "pre":
            names |= _affine(f"{side}.final_norm", f"{theirs}layer_norm")
        for i in range(num_layers):
            names |= _bart_block(f"{side}.blocks.{i}.", f"{theirs}layers.{i}.")
    return names


def _bart_block(ours: str, theirs: str) -> Names:
    names: Names = {}
    parts = [("self_attention", "self_attn")]
    if ours.startswith("decoder."):
        parts.append(("cross_attention", "encoder_attn"))
    for name, source in parts:
        matrices = [f"{theirs}{source}.{part}_proj" for part in "qkv"]
        names |= _affine(f"{ours}{name}.in_proj", *matrices)
        names |= _affine(f"{ours}{name}.out_proj", f"{theirs}{source}.out_proj")
        names |= _affine(f"{ours}{name}_residual.norm", f"{theirs}{source}_layer_norm")
    names |= _affine(f"{ours}feed_forward.in_proj", f"{theirs}fc1")
    names |= _affine(f"{ours}feed_forward.out_proj", f"{theirs}fc2")
    names |= _affine(f"{ours}feed_forward_residual.norm", f"{theirs}final_layer_norm")
    return names


def _affine(ours: str, *theirs: str) -> Names:
    return {
        f"{ours}.{kind}": tuple(f"{name}.{kind}" for name in theirs) for kind in ("weight", "bias")
    }
