"""Attention with backend="triton" through the public functions: results, statistics, graphs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseformer.arguments import load_run_config
from sparseformer.config import BackendName
from sparseformer.data import build_tokenizer, collate, encode_pairs, load_dataset
from sparseformer.functional import (
    entmax_attention,
    entmax_attention_with_stats,
    topk_attention,
)
from sparseformer.kernels.entmax_attention.checks import Options, entmax_arguments
from sparseformer.nn import MultiheadAttention, Seq2SeqTransformer
from sparseformer.training.objective import Objective

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ROOT = Path(__file__).parents[2]
ALPHAS = (1.0, 1.3, 1.7, 2.0)
LENGTHS = {"one-tile": (24, 24), "two-passes": (9, 140)}
MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal-padded": {"is_causal": True, "key_start": torch.tensor([0, 9])},
    "window": {"window": (9, 3), "key_start": torch.tensor([0, 15])},
}


def _leaves(queries: int, keys: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    sizes = {"query": (4, queries), "key": (2, keys), "value": (2, keys)}
    drawn = {n: torch.randn(2, h, length, 8) for n, (h, length) in sizes.items()}
    drawn["alpha"] = torch.tensor(ALPHAS)
    return {name: x.requires_grad_() for name, x in drawn.items()}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_outputs_gradients_and_statistics_equal_pytorchs(
    lengths: tuple[int, int], masks: dict[str, Any]
) -> None:
    results = []
    for backend in ("pytorch", "triton"):
        leaves = _leaves(*lengths)
        output, stats = entmax_attention_with_stats(**leaves, **masks, backend=backend)
        grads = torch.autograd.grad(output.square().sum(), list(leaves.values()))
        results.append([output, *grads, *stats])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


def test_statistics_of_tiles_smaller_than_64_are_counted_in_64() -> None:
    leaves = {n: x[:1, :1].detach() if x.dim() == 4 else x for n, x in _leaves(130, 140).items()}
    leaves["alpha"] = torch.tensor([1.9])
    shares = [
        entmax_attention_with_stats(**leaves, is_causal=True, backend=backend)[1].active_tiles
        for backend in ("pytorch", "triton")
    ]
    assert 0 < float(shares[0]) <= 1
    torch.testing.assert_close(shares[1], shares[0], atol=0, rtol=0)


def test_dropout_drops_what_pytorch_drops() -> None:
    leaves = _leaves(20, 70)
    outputs = []
    for backend in ("pytorch", "triton"):
        torch.manual_seed(3)
        outputs.append(entmax_attention(**leaves, dropout_p=0.4, backend=backend))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keep", [False, True], ids=["inference", "training"])
def test_opcheck_passes(keep: bool) -> None:
    leaves = _leaves(3, 20)
    tensors = [x if keep else x.detach() for x in leaves.values()]
    arguments = entmax_arguments(*tensors, Options(is_causal=True, backend="triton"))
    arguments = arguments._replace(alpha=tensors[3])
    torch.library.opcheck(torch.ops.sparseformer.attention.default, (*arguments, keep, keep))


def test_a_compiled_layer_equals_the_eager_one() -> None:
    torch.manual_seed(0)
    layer = MultiheadAttention(16, 2, attn="entmax_adaptive", backend="triton")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 20, 16)
    outputs = [module(x, is_causal=True) for module in (layer, compiled)]
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=1e-5)
    grads = [torch.autograd.grad(y.sum(), list(layer.parameters())) for y in outputs]
    for eager, traced in zip(*grads, strict=True):
        torch.testing.assert_close(traced, eager, atol=1e-6, rtol=1e-5)


def test_maps_without_a_kernel_refuse_it_by_name() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"topk_attention: backend is 'triton'.*'auto', 'pytorch'"):
        topk_attention(q, q, q, 2, backend="triton")  # type: ignore[arg-type]


def test_an_alpha_out_of_range_is_named() -> None:
    leaves = _leaves(4, 4) | {"alpha": torch.tensor([1.5, 1.5, 2.5, 1.5])}
    with pytest.raises(ValueError, match=r"alpha of head 2 is 2.5"):
        entmax_attention(**leaves, backend="triton")


def test_training_takes_the_steps_that_it_takes_in_pytorch() -> None:
    """Losses and alphas of the tiny configuration agree over a few steps of the optimiser."""
    logs = [_train(backend) for backend in ("pytorch", "triton")]
    assert logs[0][0][0] > logs[0][-1][0]
    for (expected_loss, expected), (loss, alphas) in zip(*logs, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        torch.testing.assert_close(alphas, expected, atol=1e-5, rtol=0)


def _train(backend: BackendName, steps: int = 3) -> list[tuple[float, Tensor]]:
    """Return the loss and all alphas of each step."""
    config = load_run_config(ROOT / "configs/copy_tiny.toml")
    torch.manual_seed(0)
    dataset = load_dataset(config.data, seed=1)
    tokenizer = build_tokenizer(config.data, dataset)
    encoded = encode_pairs(dataset.train[:40], tokenizer, 16, 16)
    sizes = replace(config.model, backend=backend)
    model = Seq2SeqTransformer(sizes, tokenizer.vocab_size, attn="entmax_adaptive")
    objective = Objective("sparse_topk", config.objective, tokenizer.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    log = []
    for step in range(steps):
        batch = collate(encoded, range(2 * step, 2 * step + 2), tokenizer)
        hidden = model(batch.src, batch.src_length, batch.decoder_input)
        loss = objective(hidden, model.output_weight, batch.labels) / batch.num_targets
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss.item(), torch.tensor(list(model.alphas().values()))))
    return log
