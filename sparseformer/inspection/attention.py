"""The attention probabilities of a model, for looking at."""

import torch
from torch import Tensor

from sparseformer.nn.attention_map import AttentionMap, AttentionOptions
from sparseformer.nn.modes import evaluating
from sparseformer.nn.recording import DensityMeter
from sparseformer.nn.transformer import Seq2SeqTransformer


class _MapMeter(DensityMeter):
    """Attend in the place of one layer, and keep the probabilities."""

    maps: Tensor

    def attend(
        self,
        layer: AttentionMap,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Return what the layer's own attention returns, which is maps @ v."""
        identity = torch.eye(k.shape[2], dtype=v.dtype, device=v.device)
        self.maps = super().attend(layer, q, k, identity.expand(*k.shape[:2], -1, -1), options)
        return super().attend(layer, q, k, v, options)


def attention_maps(
    model: Seq2SeqTransformer, src: Tensor, src_length: Tensor, decoder_input: Tensor
) -> dict[str, list[Tensor]]:
    """Return every head's probabilities in one forward pass, without dropout.

    Each layer attends once more with the identity matrix as values, so what is returned is what
    the layer computes, whichever its map and its implementation.

    Args:
        model: Its modules get their mode back.
        src: int64 [B, S], padded on the right.
        src_length: int [B], real tokens of each row.
        decoder_input: int64 [B, T], BOS first.

    Returns:
        By "encoder_self", "decoder_self" and "cross", a tensor [B, H, queries, keys] per layer;
        queries at padded positions are there too.

    Raises:
        ValueError: If the model is being recorded already.
    """
    layers = model.attention_layers()
    flat = [layer for group in layers.values() for layer in group]
    if any(layer.meter is not None for layer in flat):
        raise ValueError("The model is being recorded already; call this outside that block.")
    meters = {name: [_MapMeter() for _ in group] for name, group in layers.items()}
    try:
        for name, group in layers.items():
            for layer, meter in zip(group, meters[name], strict=True):
                layer.meter = meter
        with evaluating(model), torch.no_grad():
            model(src, src_length, decoder_input)
    finally:
        for layer in flat:
            layer.meter = None
    return {name: [meter.maps for meter in group] for name, group in meters.items()}
