"""Attention of a few queries over many keys, split over the keys; no backward pass follows.

Three steps: the scores of all splits, t of each row from its scores, and the outputs of all splits,
which read the values of tiles that hold a probability above 0 only.
"""

import torch
from torch import Tensor

from sparseformer.kernels.common.launch import Launch, cdiv
from sparseformer.kernels.entmax_attention.blocks import Blocks
from sparseformer.kernels.entmax_attention.decode_kernels import (
    _entmax_attention_decode_output_kernel,
    _entmax_attention_decode_scores_kernel,
    _entmax_attention_decode_threshold_kernel,
)
from sparseformer.kernels.entmax_attention.forward_problem import Problem

# Programs per key head: enough to fill a GPU with few heads, few enough that the parts stay small.
MAX_SPLITS = 64
ROW_LAUNCH = Launch(num_warps=4, num_stages=1)
# Of the row sketch, in 1024 lanes: 4096 scores hold nearly every support.
DEPTH = 4
LANES = 1024


def decode_output(
    problem: Problem,
    rounding: float,
    launch: Launch,
    blocks: Blocks,
    output: Tensor,
    lanes: int = LANES,
) -> None:
    """Fill the output [B, Hq, Lq, Dv].

    Args:
        problem: the call; a program takes the queries of all heads that share a key head.
        rounding: a step below this share of t is rounding.
        launch: warps and stages of the first and the last step.
        blocks: rows of a program, at least Hq / Hkv Lq, and keys of a tile.
        output: any strides.
        lanes: of the sketch that t of a row is solved on, a power of 2.
    """
    batch, key_heads, num_keys, _ = problem.key.shape
    rows = problem.query.shape[1] // key_heads * problem.query.shape[2]
    tiles_per_split = cdiv(cdiv(num_keys, blocks.keys), MAX_SPLITS)
    splits = cdiv(num_keys, blocks.keys * tiles_per_split)
    wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
    shape = (batch, key_heads, rows)
    scores = output.new_empty((*shape, num_keys), dtype=wide)
    _launch_scores(problem, launch, blocks, scores)
    threshold = output.new_empty(shape, dtype=wide)
    _launch_thresholds(problem, rounding, lanes, scores, threshold)
    masses = output.new_empty((splits, *shape), dtype=wide)
    parts = output.new_empty((splits, *shape, problem.value.shape[3]), dtype=wide)
    _launch_outputs(problem, launch, blocks, scores, threshold, masses, parts, tiles_per_split)
    total = masses.sum(0)
    # A row without keys has mass 0 and parts of 0.
    factor = problem.scalars()["keep_scale"] / total.masked_fill(total == 0.0, 1.0)
    output.copy_((parts.sum(0) * factor[..., None]).view(output.shape))


def _launch_scores(problem: Problem, launch: Launch, blocks: Blocks, scores: Tensor) -> None:
    strides, constants = problem.strides(), problem.constants()
    batch, key_heads, num_keys, _ = problem.key.shape
    _entmax_attention_decode_scores_kernel[(batch * key_heads * cdiv(num_keys, blocks.keys),)](
        query_ptr=problem.query,
        key_ptr=problem.key,
        bias_ptr=problem.bias,
        rows_ptr=problem.bounds.rows,
        spans_ptr=problem.bounds.spans,
        scores_ptr=scores,
        **{name: n for name, n in strides.items() if name[:-1] in ("stride_q", "stride_k")},
        **problem.sizes(),
        scale=problem.scale,
        **{name: constants[name] for name in ("DIM", "BLOCK_D", "HAS_BIAS", "ACC")},
        BLOCK_M=blocks.queries,
        BLOCK_N=blocks.keys,
        **launch.options(),
    )


def _launch_thresholds(
    problem: Problem, rounding: float, lanes: int, scores: Tensor, threshold: Tensor
) -> None:
    _entmax_attention_decode_threshold_kernel[(threshold.numel(),)](
        scores_ptr=scores,
        alpha_ptr=problem.alpha,
        threshold_ptr=threshold,
        heads=problem.query.shape[1],
        num_queries=problem.query.shape[2],
        num_keys=scores.shape[3],
        EPS=problem.eps,
        ACC=problem.constants()["ACC"],
        LANES=lanes,
        DEPTH=DEPTH,
        ROUNDING=rounding,
        **ROW_LAUNCH.options(),
    )


def _launch_outputs(
    problem: Problem,
    launch: Launch,
    blocks: Blocks,
    scores: Tensor,
    threshold: Tensor,
    masses: Tensor,
    parts: Tensor,
    tiles_per_split: int,
) -> None:
    constants = problem.constants()
    batch, key_heads = problem.key.shape[:2]
    _entmax_attention_decode_output_kernel[(batch * key_heads, masses.shape[0])](
        value_ptr=problem.value,
        alpha_ptr=problem.alpha,
        spans_ptr=problem.bounds.spans,
        seed_ptr=problem.seed,
        scores_ptr=scores,
        threshold_ptr=threshold,
        masses_ptr=masses,
        parts_ptr=parts,
        **{name: n for name, n in problem.strides().items() if name.startswith("stride_v")},
        **problem.sizes(),
        tiles_per_split=tiles_per_split,
        keep_bound=problem.scalars()["keep_bound"],
        **{name: constants[name] for name in ("EPS", "VALUE_DIM", "BLOCK_V", "HAS_DROPOUT", "ACC")},
        BLOCK_M=blocks.queries,
        BLOCK_N=blocks.keys,
        **launch.options(),
    )
