"""What attention keeps for the backward pass: the bytes that docs/attention.md says."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from sparseformer.functional import entmax_attention

ROOT = Path(__file__).parents[2]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return benchmarks/attention_memory.py, which draws the table."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import attention_memory

    return attention_memory


@pytest.mark.parametrize("length", [64, 65, 4096, 65536])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 64), (torch.float16, 32)], ids=str)
def test_a_vector_a_number_and_bits_are_kept(
    memory: ModuleType, length: int, dtype: torch.dtype, dim: int
) -> None:
    assert memory.measured("triton", length, dtype, dim) == memory.meant(length, dtype, dim)


def test_two_numbers_are_kept_without_triton(memory: ModuleType) -> None:
    assert memory.measured("pytorch", 4096) == 8.0


@pytest.mark.parametrize("backend", ["triton", "pytorch"])
def test_a_real_call_keeps_what_the_measurement_says(memory: ModuleType, backend: str) -> None:
    shape = (1, memory.HEADS, 70, 16)
    inputs = [torch.randn(shape, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        entmax_attention(*inputs, 1.5, is_causal=True, backend=backend)
    given = {x.data_ptr() for x in inputs}
    size = sum(x.numel() * x.element_size() for x in kept if x.data_ptr() not in given)
    assert size / (memory.HEADS * 70) == memory.measured(backend, 70, torch.float16, 16)


def test_the_page_shows_the_table(memory: ModuleType) -> None:
    assert "\n".join(memory.table()) in (ROOT / "docs" / "attention.md").read_text()
