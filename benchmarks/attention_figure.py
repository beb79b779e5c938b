"""Draw docs/attention.svg: the tiles that each pass of attention visits, from a real call.

    python benchmarks/attention_figure.py

One causal head of 1024 keys, alpha 1.5, in Triton's interpreter: local scores with a few global
keys, and queries at the end whose scores are nearly equal.
"""

import os
from pathlib import Path

import torch
from attention_inputs import local
from torch import Tensor

PAGE = Path(__file__).parents[1] / "docs" / "attention.svg"
LENGTH, TILE = 1024, 64
# The last queries look at everything a little.
FLAT_QUERIES, FLATNESS = 128, 0.02
LABELS = ("not visited", "scored", "scored and marked")
COLOURS = ("#e4e8ee", "#9db4d3", "#234a86")
CELL, GAP, TOP, BOTTOM = 11, 24, 58, 34


def main() -> None:
    """Run the two forward passes and draw what they visited."""
    # Triton reads this when it is imported, which nothing here has done yet.
    os.environ["TRITON_INTERPRET"] = "1"
    flagged, refined, active = _tiles()
    visible = torch.ones_like(active).tril()
    panels = {
        "1 sketch: every visible tile\nonce; t, and a bit where\nsupport may lie": (
            visible,
            flagged,
        ),
        "2 refinement: where t is not\nyet close enough, flagged\ntiles once more": (
            refined,
            refined,
        ),
        "3 output: flagged tiles;\nvalues only where there\nis weight": (flagged, active),
        "4 backward: tiles with\nweight, by query (dQ) and\nby key (dK, dV)": (active, active),
    }
    PAGE.write_text(_draw(panels))


def _tiles() -> tuple[Tensor, Tensor, Tensor]:
    """Return which tiles are flagged, refined and active, each bool [blocks, blocks]."""
    from sparseformer.kernels.entmax_attention.checks import Options, entmax_arguments
    from sparseformer.kernels.entmax_attention.forward import attention_forward
    from sparseformer.kernels.entmax_attention.forward_problem import State, forward_problem
    from sparseformer.kernels.entmax_attention.forward_sketch import sketch_thresholds
    from sparseformer.kernels.entmax_attention.launch_table import rounding_of
    from sparseformer.kernels.entmax_attention.saved import empty_tiles, tile_blocks

    inputs = local(LENGTH, has_global=True)
    inputs.query[:, :, -FLAT_QUERIES:] *= FLATNESS
    arguments = entmax_arguments(*inputs, 1.5, Options(is_causal=True))
    problem, blocks = forward_problem(arguments), tile_blocks(arguments)
    words = empty_tiles(arguments, blocks)
    threshold = torch.empty(1, 1, LENGTH)
    state = State(threshold, words, words.new_empty(words.shape[:3]))
    sketch_thresholds(problem, problem.plan(True), rounding_of(problem.dtype), blocks, state)
    flagged = _bits(words)
    refined = flagged & (state.refine[0, 0] & 1).bool()[:, None]
    _, saved = attention_forward(arguments, True)
    return flagged, refined, _bits(saved.tiles)


def _bits(words: Tensor) -> Tensor:
    tiles = (words[0, 0, :, :, None] >> torch.arange(32)) & 1
    return tiles.flatten(1)[:, : LENGTH // TILE].bool()


def _draw(panels: dict[str, tuple[Tensor, Tensor]]) -> str:
    """Return the picture: a panel per pass, its rows blocks of queries, its columns of keys."""
    side = LENGTH // TILE * CELL
    width, height = len(panels) * (side + GAP) + GAP, TOP + side + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, (title, (visited, marked)) in enumerate(panels.items()):
        left = GAP + index * (side + GAP)
        for line, text in enumerate(title.splitlines()):
            parts.append(f'<text x="{left}" y="{16 + 15 * line}">{text}</text>')
        for row, column in torch.ones_like(visited).tril().nonzero().tolist():
            colour = COLOURS[int(visited[row, column]) + int((visited & marked)[row, column])]
            x, y = left + column * CELL, TOP + row * CELL
            parts.append(
                f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{colour}"/>'
            )
    for index, (label, colour) in enumerate(zip(LABELS, COLOURS, strict=True)):
        x, y = GAP + index * 190, TOP + side + 14
        parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{colour}"/>')
        parts.append(f'<text x="{x + CELL + 6}" y="{y + 10}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
