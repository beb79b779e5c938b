"""Generation with sparse attention: dynamic caches, beams, left padding, chunks, windows."""

import inspect
from typing import Any

import pytest
import torch
from hf_models import DECODERS, SEQ2SEQ, batch, build, use_dense_oracle
from transformers import DynamicCache

from sparseformer.integrations.transformers import use_sparse_attention


def _prompt(family: str) -> dict[str, torch.Tensor]:
    found = batch(family, "right" if family in SEQ2SEQ else "left")
    found.pop("decoder_input_ids", None)
    return found


def _generate(model: Any, family: str, **arguments: Any) -> list[list[int]]:
    ids: torch.Tensor = model.generate(
        **_prompt(family), max_new_tokens=8, do_sample=False, **arguments
    )
    tokens: list[list[int]] = ids.tolist()
    return tokens


@pytest.mark.parametrize("family", [*DECODERS, *SEQ2SEQ])
def test_greedy_tokens_equal_the_dense_oracles(family: str) -> None:
    """Its eager masks and whole score matrices are right with every cache and padding."""
    model = build(family)
    own = _generate(model, family)
    use_dense_oracle(model, 2.0)
    expected = _generate(model, family)
    use_sparse_attention(model, "sparsemax")
    assert _generate(model, family) == expected
    # Greedy tokens of this Marian don't leave their first cycle under any map.
    assert expected != own or family == "marian"


@pytest.mark.parametrize("family", ["t5", "bart", "llama", "qwen2"])
def test_the_cache_changes_no_token(family: str) -> None:
    model = build(family)
    use_sparse_attention(model, "sparsemax")
    assert _generate(model, family, use_cache=True) == _generate(model, family, use_cache=False)


@pytest.mark.parametrize("family", ["t5", "marian", "gpt2", "qwen3"])
def test_beams_equal_the_dense_oracles(family: str) -> None:
    model = build(family)
    use_dense_oracle(model, 1.5)
    expected = _generate(model, family, num_beams=3)
    use_sparse_attention(model, "entmax15")
    assert _generate(model, family, num_beams=3) == expected


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_learned_alphas_generate(family: str) -> None:
    model = build(family)
    use_sparse_attention(model, "entmax_adaptive", init=1.5)
    learned = _generate(model, family)
    use_sparse_attention(model, "entmax15")
    assert learned == _generate(model, family)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_chunks_through_a_cache_equal_the_whole(family: str) -> None:
    """The last query sees the last key, also when a chunk of several tokens meets a cache."""
    model = build(family)
    use_sparse_attention(model, "entmax", alpha=1.3)
    ids = batch(family)["input_ids"][:1]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        chunks = [_call(model, part, cache) for part in (ids[:, :4], ids[:, 4:7], ids[:, 7:])]
    torch.testing.assert_close(torch.cat(chunks, 1), whole, rtol=0, atol=1e-5)


def _call(model: Any, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    # The parameter has another name in older versions.
    is_new = "cache" in inspect.signature(type(model).forward).parameters
    found: torch.Tensor = model(ids, **{"cache" if is_new else "past_key_values": cache}).logits
    return found
