"""Sparse attention in each family: equal to softmax, to a dense oracle, and under padding."""

from typing import Any

import pytest
import torch
from hf_models import BUILDERS, DECODERS, MODULES, SEQ2SEQ, batch, build, logits, use_dense_oracle
from torch import Tensor

from sparseformer.integrations.transformers import (
    alphas,
    record_density,
    remove_sparse_attention,
    use_sparse_attention,
)

FAMILIES = list(BUILDERS)


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_gives_the_models_own_logits(family: str) -> None:
    model, inputs = build(family), batch(family)
    own = logits(model, inputs)
    assert len(use_sparse_attention(model, "softmax")) == MODULES[family]
    torch.testing.assert_close(logits(model, inputs), own, rtol=0, atol=1e-9)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["t5", "bart", "bert", "llama"])
def test_softmax_in_fp32_is_within_1e_5(family: str, implementation: str) -> None:
    model, inputs = build(family, torch.float32), batch(family)
    model.set_attn_implementation(implementation)
    own = logits(model, inputs)
    use_sparse_attention(model, "softmax")
    assert float((logits(model, inputs) - own).abs().max()) < 1e-5 * float(own.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_entmax_equals_a_dense_oracle(family: str) -> None:
    model, inputs = build(family), batch(family)
    softmax = logits(model, inputs)
    use_dense_oracle(model, 1.5)
    expected = logits(model, inputs)
    use_sparse_attention(model, "entmax", alpha=1.5)
    torch.testing.assert_close(logits(model, inputs), expected, rtol=0, atol=1e-9)
    assert float((expected - softmax).abs().max()) > 1e-2


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SEQ2SEQ])
def test_a_right_padded_row_equals_the_row_alone(family: str) -> None:
    model, inputs = build(family), batch(family)
    use_sparse_attention(model, "entmax", alpha=1.3)
    _hold_rows_to_themselves(model, inputs, 1e-9)


@pytest.mark.parametrize("family", ["modernbert", *DECODERS])
def test_a_left_padded_row_equals_the_row_alone(family: str) -> None:
    """The tolerance is that of rotary angles, which transformers takes in fp32."""
    model, inputs = build(family), batch(family, "left")
    use_sparse_attention(model, "entmax", alpha=1.3)
    if family == "gpt2":
        # Learned positions count padding unless they are told.
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    _hold_rows_to_themselves(model, inputs, 1e-5)


def _hold_rows_to_themselves(model: Any, inputs: dict[str, Tensor], tolerance: float) -> None:
    padded = logits(model, inputs)
    for row in range(3):
        real = inputs["attention_mask"][row].bool()
        ids = inputs["input_ids"][row][real][None]
        alone = logits(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        torch.testing.assert_close(padded[row][real], alone[0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_padding_of_the_source_reaches_no_logits(family: str) -> None:
    model, inputs = build(family), batch(family)
    use_sparse_attention(model, "entmax", alpha=1.3)
    padded = logits(model, inputs)
    for row, length in enumerate([10, 6, 3]):
        alone = {name: x[row : row + 1] for name, x in inputs.items()}
        alone |= {name: alone[name][:, :length] for name in ("input_ids", "attention_mask")}
        torch.testing.assert_close(padded[row], logits(model, alone)[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", [*DECODERS, *SEQ2SEQ])
def test_later_tokens_change_nothing_before_them(family: str) -> None:
    """Where the mask is None, the attention function has to be causal, or the future leaks."""
    model, inputs = build(family), batch(family)
    use_sparse_attention(model, "entmax", alpha=1.5)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    name = "decoder_input_ids" if family in SEQ2SEQ else "input_ids"
    changed = {**inputs, name: inputs[name].clone()}
    changed[name][:, 5:] = 3 + (changed[name][:, 5:] + 1) % 50
    before, after = logits(model, inputs), logits(model, changed)
    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=0, atol=1e-9)
    assert float((after[:, 5:] - before[:, 5:]).abs().amax(-1).min()) > 1e-3


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_encoders_see_later_tokens(family: str) -> None:
    model, inputs = build(family), batch(family)
    use_sparse_attention(model, "softmax")
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][0, 3] = 3 + (changed["input_ids"][0, 3] + 1) % 50
    assert not torch.equal(logits(model, inputs)[0, 0], logits(model, changed)[0, 0])


@pytest.mark.parametrize("attn", ["topk", "topp", "entmax15", "sparsemax"])
def test_every_map_runs_and_is_sparse(attn: str) -> None:
    model, inputs = build("bert"), batch("bert")
    use_sparse_attention(model, attn, k=2, p=0.7)  # type: ignore[arg-type]
    with record_density(model) as record:
        logits(model, inputs)
    assert 0.1 < record.share_of_zeros() < 0.9
    expected = {"entmax15": 1.5, "sparsemax": 2.0}.get(attn)
    found = {alpha for heads in alphas(model).values() for alpha in heads}
    assert found == ({expected} if expected else set())


def test_alphas_start_at_init_and_belong_to_the_model() -> None:
    model = build("t5")
    names = use_sparse_attention(model, "entmax_adaptive", init=1.2)
    assert list(alphas(model)) == names
    assert all(values == pytest.approx([1.2] * 3) for values in alphas(model).values())
    learned = [n for n, _ in model.named_parameters() if n.endswith("adaptive_alpha.logits")]
    assert [n.removesuffix(".sparseformer.adaptive_alpha.logits") for n in learned] == names


def test_gradients_reach_every_alpha() -> None:
    model, inputs = build("bart"), batch("bart")
    use_sparse_attention(model, init=1.3)
    model(**inputs).logits.square().sum().backward()
    grads = [p.grad for n, p in model.named_parameters() if n.endswith("adaptive_alpha.logits")]
    assert len(grads) == 6
    assert all(grad is not None and bool((grad != 0).all()) for grad in grads)


def test_layers_restrict_the_swap() -> None:
    model, inputs = build("bert"), batch("bert")
    names = use_sparse_attention(model, "sparsemax", layers=["*.layer.1.*"])
    assert names == ["bert.encoder.layer.1.attention.self"]
    one = logits(model, inputs)
    use_sparse_attention(model, "sparsemax")
    assert not torch.allclose(one, logits(model, inputs))
    with record_density(model) as record:
        logits(model, inputs)
    assert len(record.densities()) == 2


def test_removal_gives_the_model_back() -> None:
    model, inputs = build("t5"), batch("t5")
    own = logits(model, inputs)
    before = set(model.state_dict())
    use_sparse_attention(model)
    use_sparse_attention(model, "sparsemax")
    remove_sparse_attention(model)
    assert set(model.state_dict()) == before
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "sparseformer")
    assert torch.equal(logits(model, inputs), own)
    with pytest.raises(ValueError, match="no sparse attention"):
        remove_sparse_attention(model)


def test_a_second_swap_replaces_the_first() -> None:
    model = build("bert")
    use_sparse_attention(model, init=1.4)
    use_sparse_attention(model, init=1.1)
    assert all(values == pytest.approx([1.1] * 3) for values in alphas(model).values())
