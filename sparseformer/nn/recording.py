"""Measure how sparse the attention of a model is while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from sparseformer.functional import (
    entmax_attention_with_stats,
    topk_attention_with_stats,
    topp_attention_with_stats,
)
from sparseformer.nn.attention import MultiheadAttention
from sparseformer.nn.attention_map import AttentionMap, AttentionOptions


@runtime_checkable
class HasAttentionLayers(Protocol):
    """A model that names its attention layers, as those of sparseformer.nn.transformer do."""

    def attention_layers(self) -> dict[str, list[MultiheadAttention]]: ...


class DensityMeter:
    """Attend in the place of one layer, and add up the density of each head."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._weight: Tensor | None = None

    def attend(
        self,
        layer: AttentionMap,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Return what the layer's own attention returns, and count its density."""
        if layer.attn == "topk":
            output, stats = topk_attention_with_stats(q, k, v, layer.k, **options)
        elif layer.attn == "topp":
            output, stats = topp_attention_with_stats(q, k, v, layer.p, **options)
        else:
            alpha = layer.alpha()
            assert alpha is not None
            output, stats = entmax_attention_with_stats(q, k, v, alpha, **options)
        self._count(stats.density, q.shape[0] * q.shape[2])
        return output

    def density(self) -> list[float] | None:
        """Return each head's mean density, NaN if it never saw a key; None if nothing ran."""
        if self._total is None or self._weight is None:
            return None
        mean: list[float] = (self._total / self._weight).tolist()
        return mean

    def _count(self, density: Tensor, queries: int) -> None:
        density = density.detach().double()
        weight = (~density.isnan()).double() * queries
        total = density.nan_to_num() * weight
        self._total = total if self._total is None else self._total + total
        self._weight = weight if self._weight is None else self._weight + weight


class AttentionRecord:
    """What `record_attention` has measured so far.

    Args:
        meters: By attention name, one meter per layer.
    """

    def __init__(self, meters: dict[str, list[DensityMeter]]) -> None:
        self._meters = meters

    def densities(self) -> dict[str, list[list[float]]]:
        """Return the share of visible keys with a non-zero probability: [layer][head] by name.

        It is the mean over the calls, weighted by their queries; queries at padded positions count
        like others. Layers that did not run are left out, and names without any that ran.
        """
        found = {
            name: [density for meter in meters if (density := meter.density()) is not None]
            for name, meters in self._meters.items()
        }
        return {name: layers for name, layers in found.items() if layers}


@contextmanager
def record_attention(model: nn.Module) -> Iterator[AttentionRecord]:
    """Measure the density of every head in whatever runs inside the block.

        with record_attention(model) as record:
            model(src, src_length, decoder_input)
        record.densities()["cross"][layer][head]

    Outputs and gradients stay the same; the counting costs some time, and none outside the block.

    Args:
        model: A model of sparseformer.nn.transformer, whose names are "encoder_self",
            "decoder_self" and "cross"; or any with MultiheadAttention layers, all under the
            name "attention".

    Raises:
        ValueError: If the model has no such layer, or one is being recorded already.
    """
    layers = _attention_layers(model)
    flat = [layer for group in layers.values() for layer in group]
    if not flat:
        raise ValueError(f"{type(model).__name__} has no MultiheadAttention layer to record.")
    if any(layer.meter is not None for layer in flat):
        raise ValueError("The model is being recorded already; use the record of the outer block.")
    meters = {name: [DensityMeter() for _ in group] for name, group in layers.items()}
    for name, group in layers.items():
        for layer, meter in zip(group, meters[name], strict=True):
            layer.meter = meter
    try:
        yield AttentionRecord(meters)
    finally:
        for layer in flat:
            layer.meter = None


def _attention_layers(model: nn.Module) -> dict[str, list[MultiheadAttention]]:
    if isinstance(model, HasAttentionLayers):
        return model.attention_layers()
    return {"attention": [m for m in model.modules() if isinstance(m, MultiheadAttention)]}
