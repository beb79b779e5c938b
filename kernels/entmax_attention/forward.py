"""The forward pass of attention in Triton: which kernel serves a call, and its outputs."""

from collections.abc import Hashable

from torch import Tensor

from sparseformer.kernels.common.launch import Launch, kernel_input
from sparseformer.kernels.entmax_attention.arguments import Arguments, Saved
from sparseformer.kernels.entmax_attention.blocks import Blocks
from sparseformer.kernels.entmax_attention.forward_decode import decode_output
from sparseformer.kernels.entmax_attention.forward_one_tile import one_tile_output
from sparseformer.kernels.entmax_attention.forward_output import refine_and_output
from sparseformer.kernels.entmax_attention.forward_problem import Problem, State, forward_problem
from sparseformer.kernels.entmax_attention.forward_sketch import sketch_thresholds
from sparseformer.kernels.entmax_attention.forward_softmax import softmax_output
from sparseformer.kernels.entmax_attention.launch_table import (
    DECODE_LAUNCH,
    choose_launch,
    close_enough,
    decode_blocks,
    launch_case,
    one_tile_launch,
    one_tile_span,
    rounding_of,
)
from sparseformer.kernels.entmax_attention.pytorch import empty_output
from sparseformer.kernels.entmax_attention.saved import empty_saved, empty_tiles, tile_blocks


def attention_forward(
    arguments: Arguments, keep: bool, blocks: Blocks | None = None
) -> tuple[Tensor, Saved]:
    """Return the output [B, Hq, Lq, Dv] and what the backward pass needs if `keep`.

    Args:
        arguments: mapping is "entmax".
        keep: whether a backward pass follows.
        blocks: the tile; else that of blocks_for.
    """
    blocks = blocks or tile_blocks(arguments)
    saved = empty_saved(arguments, keep, blocks)
    sizes = (*arguments.query.shape[:3], *arguments.value.shape[2:])
    if 0 in sizes:
        return _nothing_seen(arguments, saved)
    problem = forward_problem(arguments)
    output = empty_output(arguments, problem.query.dtype)
    saved = saved._replace(direction=kernel_input(saved.direction))
    span = one_tile_span(arguments, blocks)
    decode = None if keep else decode_blocks(arguments)
    close, rounding = close_enough(problem.dtype, keep), rounding_of(problem.dtype)
    case = (*launch_case(arguments), keep)
    if span is not None:
        choose_launch(
            "one tile",
            one_tile_launch(span, blocks, problem.eps),
            lambda launch: one_tile_output(
                problem, span, close, rounding, launch, blocks, output, saved
            ),
            output,
            case,
        )
    elif decode is not None:
        choose_launch(
            "decode",
            DECODE_LAUNCH,
            lambda launch: decode_output(problem, rounding, launch, decode, output),
            output,
            case,
        )
    elif problem.eps == 0.0:
        choose_launch(
            "softmax",
            problem.plan(keep).launch,
            lambda launch: softmax_output(problem, launch, blocks, output, saved),
            output,
            case,
        )
    else:
        words = saved.tiles if keep else empty_tiles(arguments, blocks)
        two_passes(problem, blocks, output, saved, words, case)
    saved = saved._replace(direction=saved.direction.to(problem.dtype))
    return output.to(arguments.query.dtype), saved


def two_passes(
    problem: Problem,
    blocks: Blocks,
    output: Tensor,
    saved: Saved,
    words: Tensor,
    case: tuple[Hashable, ...],
) -> None:
    """Fill the output, what the backward pass needs and the words of active tiles; alpha > 1."""
    keep = saved.direction.numel() > 0
    plan, rounding = problem.plan(keep), rounding_of(problem.dtype)
    rows = saved.rows if keep else saved.rows.new_empty(problem.query.shape[:3])
    state = State(rows, words, words.new_empty(words.shape[:3]))

    def sketch(launch: Launch) -> None:
        sketch_thresholds(problem, plan._replace(sketch_launch=launch), rounding, blocks, state)

    def output_pass(launch: Launch) -> None:
        chosen = plan._replace(launch=launch)
        refine_and_output(problem, chosen, rounding, blocks, state, output, saved)

    choose_launch("sketch", plan.sketch_launch, sketch, output, case)
    restored = (state.threshold, state.words)
    choose_launch("output", plan.launch, output_pass, output, case, restored)


def _nothing_seen(arguments: Arguments, saved: Saved) -> tuple[Tensor, Saved]:
    rows = saved.rows.fill_(float("inf"))
    output = empty_output(arguments, arguments.query.dtype).zero_()
    return output, Saved(rows, saved.direction.zero_(), saved.tiles.zero_())
