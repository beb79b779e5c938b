"""Attention block by block in plain PyTorch: memory grows with L x chunk, never with Lq x Lk."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparseformer.kernels.entmax_attention.arguments import Gradients
from sparseformer.kernels.entmax_attention.masks import (
    AttentionParams,
    Block,
    Padding,
    band_mask,
    dropout_keep,
    padded_keys,
    plan_blocks,
    rows_without_keys,
)
from sparseformer.kernels.entmax_attention.row_maps import Entmax, RowMap
from sparseformer.kernels.entmax_attention.stats import StatsCollector

# Below this norm no product of two slots overflows fp32, so that adding -inf hides a score
# and a probability of 0 hides a value.
TAME_NORM = 1e15


class Inputs(NamedTuple):
    """The tensors of one call in the dtype of the arithmetic."""

    query: Tensor  # [B, Hq, Lq, D]
    key: Tensor  # [B, Hkv, Lk, D]
    value: Tensor  # [B, Hkv, Lk, Dv]
    relative_bias: Tensor | None  # [Hq, Lq + Lk - 1]
    padding: Padding | None


def prepare_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative_bias: Tensor | None,
    padding: Padding | None,
    params: AttentionParams,
) -> Inputs:
    """Bring the tensors to one dtype, and make the content of padding harmless."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    if query.shape[1] * query.shape[2] * key.shape[2] > params.chunk_elements:
        # Several blocks read the same keys: one copy now saves one in each of them.
        query, key, value = (x.contiguous() for x in (query, key, value))
    if relative_bias is not None:
        # Masks are written as -inf or as the most negative number of the dtype: both hide.
        lowest = torch.finfo(relative_bias.dtype).min / 2
        relative_bias = relative_bias.to(dtype).masked_fill(relative_bias <= lowest, -math.inf)
    inputs = Inputs(query, key, value, relative_bias, padding)
    if padding is None or _is_tame(query, key, value):
        return inputs
    hidden = padded_keys(padding, key.shape[2])[:, None, :, None]
    return inputs._replace(
        query=zero_dead_rows(query, padding, params),
        key=key.masked_fill(hidden, 0.0),
        value=value.masked_fill(hidden, 0.0),
    )


def zero_dead_rows(rows: Tensor, padding: Padding, params: AttentionParams) -> Tensor:
    """Zero the rows of queries that see no key where anything in them could spoil a product."""
    if _is_tame(rows):
        return rows
    return rows.masked_fill(rows_without_keys(padding, params)[:, None, :, None], 0.0)


def _is_tame(*tensors: Tensor) -> bool:
    """Report whether sums of products of the entries stay finite (a NaN compares as False)."""
    return all(float(torch.linalg.vector_norm(x)) < TAME_NORM for x in tensors)


def forward_blocks(
    inputs: Inputs,
    row_map: RowMap,
    params: AttentionParams,
    output: Tensor,
    kept: Tensor | None,
    stats: StatsCollector | None = None,
) -> None:
    """Fill output [B, Hq, Lq, Dv] and, if given, kept [B, Hq, Lq, m], which are 0 before."""
    for block in plan_blocks(inputs.query, params):
        scores = block_scores(inputs, block, params)
        probs, kept_of_block = row_map.solve(scores)
        if kept is not None:
            kept[block.batch, :, block.queries] = kept_of_block
        if stats is not None:
            stats.add(block, scores, probs)
        if params.dropout_p:
            probs = probs * dropout_keep(block, params, _score_shape(inputs), probs)
        result = torch.bmm(_by_key_head(probs, inputs), _columns(inputs.value, block))
        target = output[block.batch, :, block.queries]
        target.copy_(result.view(target.shape))
    if params.dropout_p:
        output.mul_(1.0 / (1.0 - params.dropout_p))


def backward_blocks(
    inputs: Inputs,
    row_map: RowMap,
    params: AttentionParams,
    kept: Tensor,
    grad_output: Tensor,
    grads: Gradients,
) -> None:
    """Recompute the probabilities block by block and add to the gradients, which are 0 before.

    With dP = dO V^T, delta = sum(u dP) / sum(u) and C = dP - delta of each row:
    dS = u C, dV = P^T dO, dQ = scale dS K, dK = scale dS^T Q, dalpha = sum p g C, and the
    gradient of the bias is the sum of dS along each diagonal.
    """
    if params.dropout_p:
        grad_output = grad_output * (1.0 / (1.0 - params.dropout_p))
    for block in plan_blocks(inputs.query, params):
        scores = block_scores(inputs, block, params)
        probs, u = row_map.recompute(scores, kept[block.batch, :, block.queries])
        _add_block(grads, inputs, row_map, params, block, probs, u, grad_output)


def _add_block(
    grads: Gradients,
    inputs: Inputs,
    row_map: RowMap,
    params: AttentionParams,
    block: Block,
    probs: Tensor,
    u: Tensor,
    grad_output: Tensor,
) -> None:
    grad_rows = _rows(grad_output, block, inputs)
    keep = None
    if params.dropout_p:
        keep = dropout_keep(block, params, _score_shape(inputs), probs)
    if grads.value is not None:
        weights = probs if keep is None else probs * keep
        target = grads.value[block.batch, :, block.keys]
        target.add_(torch.bmm(_by_key_head(weights, inputs).mT, grad_rows).view(target.shape))
    if grads[:2] == (None, None) and grads[3:] == (None, None):
        return
    grad_probs = torch.bmm(grad_rows, _columns(inputs.value, block).mT).view(probs.shape)
    if keep is not None:
        grad_probs.mul_(keep)
    # The sum of u is 1 or more wherever a key is visible, so the clamp only serves empty rows.
    delta = (u * grad_probs).sum(-1, keepdim=True).div_(u.sum(-1, keepdim=True).clamp_min_(0.5))
    centred = grad_probs.sub_(delta)
    if grads.alpha is not None:
        assert isinstance(row_map, Entmax)
        grads.alpha.add_(row_map.alpha_gradient(probs, u, centred))
    _add_score_gradient(grads, inputs, block, centred.mul_(u), params.scale)


def _add_score_gradient(
    grads: Gradients, inputs: Inputs, block: Block, grad_scores: Tensor, scale: float
) -> None:
    by_key_head = _by_key_head(grad_scores, inputs)
    if grads.query is not None:
        target = grads.query[block.batch, :, block.queries]
        target.copy_(
            _scaled_bmm(by_key_head, _columns(inputs.key, block), scale).view(target.shape)
        )
    if grads.key is not None:
        target = grads.key[block.batch, :, block.keys]
        rows = _rows(inputs.query, block, inputs)
        target.add_(_scaled_bmm(by_key_head.mT, rows, scale).view(target.shape))
    if grads.relative_bias is not None:
        sums = _diagonal_sums(grad_scores.sum(0))
        grads.relative_bias[:, block.bias_start : block.bias_start + sums.shape[1]] += sums


def block_scores(inputs: Inputs, block: Block, params: AttentionParams) -> Tensor:
    """Return scale q k^T + bias of a block, -inf where a key is hidden, [nb, Hq, R, K]."""
    query, key = _rows(inputs.query, block, inputs), _columns(inputs.key, block)
    shape = inputs.query[block.batch, :, block.queries].shape[:3]
    scores = _scaled_bmm(query, key.mT, params.scale).view(*shape, key.shape[1])
    if inputs.relative_bias is not None:
        scores.add_(_diagonal_bias(inputs.relative_bias, block))
    band = band_mask(block, params, scores)
    if band is not None:
        scores.add_(band)
    if inputs.padding is not None:
        hidden = padded_keys(inputs.padding, inputs.key.shape[2])[block.batch, block.keys]
        scores.add_(scores.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None, None])
    return scores


def _scaled_bmm(left: Tensor, right: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(left.new_empty(1), left, right, beta=0.0, alpha=scale)


def _score_shape(inputs: Inputs) -> torch.Size:
    return torch.Size((*inputs.query.shape[:3], inputs.key.shape[2]))


def _rows(x: Tensor, block: Block, inputs: Inputs) -> Tensor:
    """Take a block's queries out of [B, Hq, Lq, D] as [nb * Hkv, G * R, D]."""
    key_heads = inputs.key.shape[1]
    part = x[block.batch, :, block.queries]
    batch, heads, rows, width = part.shape
    return part.reshape(batch * key_heads, heads // key_heads * rows, width)


def _columns(x: Tensor, block: Block) -> Tensor:
    """Take a block's keys out of [B, Hkv, Lk, D] as [nb * Hkv, K, D]."""
    part = x[block.batch, :, block.keys]
    return part.reshape(part.shape[0] * part.shape[1], *part.shape[2:])


def _by_key_head(scores: Tensor, inputs: Inputs) -> Tensor:
    """View [nb, Hq, R, K] as [nb * Hkv, G * R, K]: query heads that share a key head are rows."""
    batch, heads, rows, keys = scores.shape
    key_heads = inputs.key.shape[1]
    return scores.view(batch * key_heads, heads // key_heads * rows, keys)


def _diagonal_bias(relative_bias: Tensor, block: Block) -> Tensor:
    """Spread the bias over a block by offset, [Hq, R, K]."""
    rows = block.queries.stop - block.queries.start
    keys = block.keys.stop - block.keys.start
    offsets = relative_bias[:, block.bias_start : block.bias_start + rows + keys - 1]
    # Row r of the unfolded view starts at offset r, and the last query has the lowest one.
    return offsets.unfold(1, keys, 1).flip(1)


def _diagonal_sums(scores: Tensor) -> Tensor:
    """Sum [Hq, R, K] along the diagonals, lowest offset first, [Hq, R + K - 1]."""
    heads, rows, keys = scores.shape
    # Padded to R + K and read again in rows of R + K - 1, every row moves one to the right.
    skewed = torch.nn.functional.pad(scores.flip(1), (0, rows)).flatten(1)
    return skewed[:, : rows * (rows + keys - 1)].view(heads, rows, -1).sum(1)
