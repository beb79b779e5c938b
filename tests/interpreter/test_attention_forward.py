"""The forward kernels of attention, interpreted: output, t, direction and tiles by definition."""

from dataclasses import replace

import pytest
import torch
from attention_backward_case import BackwardCase, forward_state
from attention_forward_case import plain_output, reference_output
from torch import Tensor

from sparseformer.kernels.entmax_attention.arguments import Arguments, Saved
from sparseformer.kernels.entmax_attention.forward import attention_forward
from sparseformer.testing import assert_close_to_reference, poison_empty

ONE_HEAD = BackwardCase(heads=1, key_heads=1)
LONG = replace(ONE_HEAD, queries=5, keys=67)
LEARNED = (1.2, 1.6)
# Up to 64 keys fit one tile of the 16 x 16 blocks; more take a sketch and an output pass.
CASES = {
    "one-key": replace(ONE_HEAD, queries=17, keys=1),
    "one-tile": BackwardCase(keys=64, alpha=LEARNED, bias=True),
    "one-tile-causal": replace(ONE_HEAD, queries=33, keys=33, is_causal=True),
    "one-tile-softmax": replace(ONE_HEAD, alpha=1.0, bias=True),
    "one-tile-sparsemax": BackwardCase(alpha=2.0, dropout_p=0.3),
    "one-tile-of-a-window": replace(
        LONG, queries=90, window=(9, 4), bias=True, start=(3,), length=(75,)
    ),
    "sketch": LONG,
    "sketch-learned": replace(LONG, alpha=(1.1,), bias=True),
    "sketch-near-softmax": replace(LONG, queries=3, alpha=(1.001,)),
    "sketch-causal": replace(LONG, queries=67, is_causal=True),
    "sketch-causal-more-queries": replace(LONG, queries=80, is_causal=True),
    "sketch-causal-more-keys": replace(LONG, queries=18, is_causal=True, alpha=2.0),
    "sketch-window": replace(LONG, queries=30, window=(60, 9)),
    "sketch-dropout": replace(LONG, dropout_p=0.3, bias=True),
    "sketch-scale": replace(LONG, scale=-0.11),
    "sketch-flat": replace(LONG, spread=0.01),
    "sketch-large-scores": replace(LONG, spread=3000.0),
    "sketch-odd-dims": replace(LONG, dim=24, value_dim=40),
    "softmax": replace(LONG, alpha=1.0, bias=True, dropout_p=0.2),
    "softmax-causal": replace(LONG, queries=80, alpha=1.0, is_causal=True),
    "grouped": BackwardCase(heads=4, key_heads=2, queries=3, keys=67),
    "padding": replace(LONG, batch=3, start=(0, 20, 3), length=(67, 50, 66)),
    "packed": replace(
        ONE_HEAD,
        queries=40,
        keys=80,
        packed_q=(0, 3, 3, 21, 22, 40),
        packed_k=(0, 20, 24, 61, 61, 80),
        is_causal=True,
        bias=True,
    ),
    "dead-rows": replace(LONG, batch=2, queries=70, start=(17, 67), is_causal=True),
}
INFERENCE = (
    "one-tile",
    "one-tile-sparsemax",
    "sketch-learned",
    "sketch-causal",
    "sketch-dropout",
    "sketch-flat",
    "softmax",
    "padding",
)
SIXTEEN_BITS = ("one-tile", "sketch", "sketch-learned", "sketch-causal", "sketch-flat", "softmax")
LENGTHS = [(1, 2), (2, 1), (15, 16), (16, 15), (17, 63), (1, 65), (65, 17), (2, 129)]
DIMS = [(1, 1), (8, 40), (72, 16), (16, 160), (256, 96)]


def run(case: BackwardCase, arguments: Arguments, keep: bool) -> tuple[Tensor, Saved]:
    """Run the kernels with memory poisoned beforehand."""
    with poison_empty():
        return attention_forward(arguments, keep, case.blocks)


def check_saved(case: BackwardCase, arguments: Arguments, saved: Saved) -> None:
    """Hold what the backward pass reads to the definition."""
    expected = forward_state(case, arguments)
    seen = expected.rows.isfinite()
    assert torch.equal(saved.rows.isfinite(), seen)
    assert bool((saved.rows[~seen] == torch.inf).all())
    close = {"atol": 3e-6, "rtol": 1e-6} if saved.rows.dtype == torch.float32 else {}
    torch.testing.assert_close(saved.rows[seen], expected.rows[seen], **close)
    wide = arguments._replace(query=arguments.query.double())
    direction = forward_state(case, wide).direction
    assert_close_to_reference(saved.direction, direction)
    assert torch.equal(saved.tiles, expected.tiles)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_state_are_those_of_the_definition(case: BackwardCase) -> None:
    arguments = case.arguments()
    output, saved = run(case, arguments, keep=True)
    assert_close_to_reference(output, reference_output(case, arguments))
    check_saved(case, arguments, saved)


@pytest.mark.parametrize("name", INFERENCE)
def test_inference_gives_the_same_output(name: str) -> None:
    case = CASES[name]
    arguments = case.arguments()
    output, saved = run(case, arguments, keep=False)
    assert_close_to_reference(output, reference_output(case, arguments))
    assert not any(x.numel() for x in saved)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_sixteen_bit_inputs_lose_no_more_than_rounding(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    arguments = case.arguments(dtype)
    output, saved = run(case, arguments, keep=True)
    assert output.dtype == saved.direction.dtype == dtype
    plain = plain_output(case, arguments)
    assert_close_to_reference(output, reference_output(case, arguments), plain)


@pytest.mark.parametrize("name", ["one-tile", "sketch", "sketch-learned", "softmax"])
def test_float64_is_computed_in_float64(name: str) -> None:
    case = CASES[name]
    arguments = case.arguments(torch.float64)
    output, saved = run(case, arguments, keep=True)
    assert_close_to_reference(output, reference_output(case, arguments))
    check_saved(case, arguments, saved)


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_any_length(queries: int, keys: int) -> None:
    case = replace(ONE_HEAD, queries=queries, keys=keys, is_causal=True)
    arguments = case.arguments()
    output, saved = run(case, arguments, keep=True)
    assert_close_to_reference(output, reference_output(case, arguments))
    check_saved(case, arguments, saved)


@pytest.mark.parametrize(("dim", "value_dim"), DIMS)
def test_any_width(dim: int, value_dim: int) -> None:
    case = replace(ONE_HEAD, queries=3, keys=70, dim=dim, value_dim=value_dim, alpha=1.5)
    arguments = case.arguments()
    output, _ = run(case, arguments, keep=True)
    assert_close_to_reference(output, reference_output(case, arguments))


@pytest.mark.parametrize("name", ["padding", "dead-rows"])
def test_content_of_hidden_slots_reaches_nothing(name: str) -> None:
    case = CASES[name]
    arguments = case.arguments()
    clean = run(case, arguments, keep=True)
    sees = case.visible()
    for tensor, axis in ((arguments.query, 3), (arguments.key, 2), (arguments.value, 2)):
        tensor.masked_fill_(~sees.any(axis)[..., None], torch.nan)
    poisoned = run(case, arguments, keep=True)
    assert torch.equal(clean[0], poisoned[0])
    assert all(torch.equal(a, b) for a, b in zip(clean[1], poisoned[1], strict=True))


def test_a_bias_of_the_most_negative_number_hides() -> None:
    case = replace(LONG, queries=2, bias=True)
    arguments = case.arguments()
    assert arguments.relative_bias is not None
    hidden = arguments.relative_bias.clone()
    hidden[:, ::3] = torch.finfo(torch.float32).min
    lowest = run(case, arguments._replace(relative_bias=hidden), keep=True)
    hidden[:, ::3] = -torch.inf
    infinite = run(case, arguments._replace(relative_bias=hidden), keep=True)
    assert torch.equal(lowest[0], infinite[0])
    hidden[:] = torch.finfo(torch.float32).min
    output, saved = run(case, arguments._replace(relative_bias=hidden), keep=True)
    assert not output.any()
    assert bool((saved.rows == torch.inf).all())


def test_adding_a_number_to_all_scores_changes_nothing() -> None:
    """A row that saw no key in the first tiles starts from its own scores, not from 0."""
    case = replace(ONE_HEAD, queries=6, keys=140, packed_q=(0, 3, 6), packed_k=(0, 70, 140))
    arguments = case.arguments()
    bias = torch.zeros(1, 6 + 140 - 1)
    outputs = [
        run(case, arguments._replace(relative_bias=bias + shift), keep=True)[0]
        for shift in (-8.0, 0.0)
    ]
    assert_close_to_reference(outputs[0], reference_output(case, arguments))
    assert_close_to_reference(outputs[1], reference_output(case, arguments))


def _views(arguments: Arguments, name: str) -> Arguments:
    """Lay query, key and value out in another way."""

    def view(x: Tensor) -> Tensor:
        if name == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if name == "columns-first":
            return x.mT.contiguous().mT
        wide = x.new_full((*x.shape[:3], 2 * x.shape[3] + 3), torch.nan)
        wide[..., 3::2] = x
        return wide[..., 3::2]

    return arguments._replace(**{n: view(getattr(arguments, n)) for n in ("query", "key", "value")})


@pytest.mark.parametrize("layout", ["transposed", "columns-first", "every-other"])
@pytest.mark.parametrize("keys", [40, 70])
def test_strides_do_not_matter(layout: str, keys: int) -> None:
    case = BackwardCase(heads=2, queries=5, keys=keys, dim=8, value_dim=24)
    arguments = case.arguments()
    output, saved = run(case, arguments, keep=True)
    viewed, viewed_saved = run(case, _views(arguments, layout), keep=True)
    assert torch.equal(output, viewed)
    assert all(torch.equal(a, b) for a, b in zip(saved, viewed_saved, strict=True))


def test_offsets_pass_two_to_the_31() -> None:
    case = replace(ONE_HEAD, queries=2, keys=70, dim=16, value_dim=16)
    arguments = case.arguments(torch.float16)
    far = (1 << 31) // 69 + 1

    def spread_out(x: Tensor) -> Tensor:
        storage = torch.empty(69 * far + 16, dtype=x.dtype)  # untouched pages take no memory
        apart = storage.as_strided(x.shape, (0, 0, far, 1))
        apart.copy_(x)
        return apart

    key, value = spread_out(arguments.key), spread_out(arguments.value)
    output, _ = attention_forward(arguments, True, case.blocks)
    apart, _ = attention_forward(arguments._replace(key=key, value=value), True, case.blocks)
    assert torch.equal(output, apart)


def test_rows_do_not_depend_on_their_batch() -> None:
    case = BackwardCase(batch=2, queries=5, keys=70)
    arguments = case.arguments()
    whole, _ = run(case, arguments, keep=True)
    row = {name: getattr(arguments, name)[1:, :1] for name in ("query", "key", "value")}
    alone, _ = run(case, arguments._replace(**row), keep=True)
    assert torch.equal(alone, whole[1:, :1])


@pytest.mark.parametrize("sizes", [(0, 2, 5, 7), (1, 2, 0, 7), (1, 2, 5, 0)], ids=str)
def test_nothing_to_attend_to(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, queries, keys = sizes
    case = BackwardCase(batch=batch, heads=heads, queries=queries, keys=keys)
    output, saved = run(case, case.arguments(), keep=True)
    assert output.shape == (batch, heads, queries, case.value_dim)
    assert not output.any()
    assert bool((saved.rows == torch.inf).all())
