"""What goes wrong silently with a custom attention in transformers is refused or works."""

from typing import Any

import pytest
import torch
import transformers
from hf_models import BUILDERS, batch, build, logits, use_dense_oracle
from torch import nn
from torch.nn import functional as F
from transformers import StaticCache
from transformers.masking_utils import create_causal_mask

from sparseformer.functional import entmax_attention
from sparseformer.integrations.transformers import alphas, use_sparse_attention
from sparseformer.integrations.transformers.attention import attention_forward, relative_bias
from sparseformer.integrations.transformers.masks import attention_mask, padding_of


@pytest.mark.parametrize("family", ["t5", "bart", "marian", "llama", "gpt2"])
def test_a_static_cache_is_refused(family: str) -> None:
    """BART, Marian and Llama fail on its mask by themselves; T5 would give wrong tokens."""
    model, inputs = build(family, torch.float32), batch(family)
    use_sparse_attention(model, "entmax15")
    ids = {name: x[:1, :4] for name, x in inputs.items() if name != "decoder_input_ids"}
    with pytest.raises(ValueError, match="dynamic"):
        model.generate(**ids, max_new_tokens=3, cache_implementation="static")


@pytest.mark.parametrize("with_mask", [True, False])
def test_a_static_cache_given_by_hand_is_refused(with_mask: bool) -> None:
    model, inputs = build("llama", torch.float32), batch("llama")
    use_sparse_attention(model, "entmax15")
    cache = StaticCache(config=model.config, max_cache_len=16)
    mask = inputs["attention_mask"] if with_mask else None
    with pytest.raises(ValueError, match="dynamic"):
        model(inputs["input_ids"], mask, None, cache)


def test_both_stacks_of_t5_are_swapped_from_any_start() -> None:
    """set_attn_implementation left the decoder's own configuration alone in 5.17 to 5.19."""
    model = build("t5")
    model.decoder.config = type(model.config)(**model.decoder.config.to_dict())
    assert len(use_sparse_attention(model)) == 6
    configs = [model.config, model.encoder.config, model.decoder.config]
    assert [config._attn_implementation for config in configs] == ["sparseformer"] * 3


def test_modules_that_do_not_call_are_named_and_the_model_stays() -> None:
    """A cross-attention that the trial run doesn't reach would keep its softmax unseen."""
    model, inputs = build("t5"), batch("t5")
    own, encoder = logits(model, inputs), {"input_ids": inputs["input_ids"]}
    with pytest.raises(ValueError, match=r"decoder\.block\.0\.layer\.1\.EncDecAttention"):
        use_sparse_attention(_EncoderOnly(model), inputs=encoder)
    assert model.config._attn_implementation == "sdpa"
    assert not [name for name in model.state_dict() if "sparseformer" in name]
    assert torch.equal(logits(model, inputs), own)


class _EncoderOnly(nn.Module):
    """T5 with a forward pass that never reaches the decoder."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.t5, self.config = model, model.config

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.t5.encoder(input_ids)


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    config = transformers.XLNetConfig(vocab_size=61, d_model=24, n_layer=1, n_head=3, d_inner=32)
    model = transformers.XLNetModel(config)
    with pytest.raises(ValueError, match="No module of XLNetModel calls"):
        use_sparse_attention(model)


def test_a_torch_module_is_refused() -> None:
    with pytest.raises(ValueError, match="no model of transformers"):
        use_sparse_attention(nn.Linear(2, 2))


def test_the_trial_run_leaves_modes_and_random_state_alone() -> None:
    model = build("bart").train()
    model.model.encoder.eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    use_sparse_attention(model, "sparsemax")
    assert [m.training for n, m in model.named_modules() if not n.endswith("sparseformer")] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_holes_in_the_padding_mask_are_refused() -> None:
    model, inputs = build("bert"), batch("bert")
    use_sparse_attention(model, "entmax15")
    inputs["attention_mask"][1, 2] = 0
    with pytest.raises(ValueError, match="Row 1 of the attention mask hides keys between"):
        model(**inputs)


def test_a_whole_mask_of_scores_is_refused() -> None:
    model, inputs = build("bert"), batch("bert")
    use_sparse_attention(model, "entmax15")
    inputs["attention_mask"] = torch.zeros(3, 1, 10, 10, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"takes padding masks \[B, L\]"):
        model(**inputs)


def test_a_row_of_padding_only_gives_finite_logits() -> None:
    model, inputs = build("llama"), batch("llama")
    use_sparse_attention(model, "entmax15")
    inputs["attention_mask"][2] = 0
    assert bool(model(**inputs).logits.isfinite().all())


def test_packed_sequences_equal_separate_ones() -> None:
    """Positions that start again in a row mean several sequences, which don't see each other."""
    model, inputs = build("llama"), batch("llama")
    use_sparse_attention(model, "entmax", alpha=1.3)
    ids = inputs["input_ids"][:1]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        parts = [model(part, use_cache=False).logits for part in (ids[:, :4], ids[:, 4:])]
    torch.testing.assert_close(packed, torch.cat(parts, 1), rtol=0, atol=1e-5)


def test_packed_sequences_in_several_rows_are_refused() -> None:
    model, inputs = build("llama"), batch("llama")
    use_sparse_attention(model, "entmax15")
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5]).expand(3, -1)
    with pytest.raises(ValueError, match="packed sequences as a batch of 1 row"):
        model(inputs["input_ids"], position_ids=positions, use_cache=False)


def test_borders_of_packed_sequences_may_be_passed() -> None:
    module = nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    q, k, v = torch.randn(3, 1, 2, 7, 4, generator=torch.Generator().manual_seed(0))
    borders = torch.tensor([0, 3, 7], dtype=torch.int32)
    flat, _ = attention_forward(module, q, k, v, None, cu_seq_lens_q=borders, cu_seq_lens_k=borders)
    parts = [
        entmax_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], 1.0, is_causal=True)
        for a, b in ((0, 3), (3, 7))
    ]
    torch.testing.assert_close(flat, torch.cat(parts, 2).transpose(1, 2))


def test_unknown_patterns_of_attention_are_refused() -> None:
    """An image may see itself both ways in Gemma 3; a mask of padding can't say that."""
    model, inputs = build("llama"), batch("llama")
    use_sparse_attention(model, "entmax15")
    with pytest.raises(ValueError, match="or_masks"):
        create_causal_mask(
            config=model.config,
            inputs_embeds=torch.zeros(1, 10, 24),
            attention_mask=inputs["attention_mask"][:1],
            cache=None,
            or_mask_function=lambda _batch, _head, q_idx, kv_idx: q_idx == kv_idx,
        )


@pytest.mark.parametrize("argument", ["softcap", "s_aux"])
def test_additions_to_attention_are_refused(argument: str) -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match=f"passes {argument}"):
        attention_forward(nn.Module(), q, q, q, None, **{argument: torch.ones(1)})


def test_asking_for_the_probabilities_is_refused() -> None:
    model, inputs = build("bert"), batch("bert")
    use_sparse_attention(model, "entmax15")
    with pytest.raises(ValueError, match="output_attentions"):
        model(**inputs, output_attentions=True)


def test_decoders_configured_as_encoders_see_both_ways() -> None:
    model, inputs = build("llama"), batch("llama")
    model.config.is_causal = False
    use_dense_oracle(model, 1.5)
    expected = logits(model, inputs)
    use_sparse_attention(model, "entmax15")
    torch.testing.assert_close(logits(model, inputs), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3), (1, 6), (6, 1)])
def test_a_bias_of_offsets_keeps_every_entry(queries: int, keys: int) -> None:
    entries = torch.randn(2, queries + keys - 1, generator=torch.Generator().manual_seed(1))
    offsets = torch.arange(keys) - torch.arange(queries)[:, None] + queries - 1
    assert torch.equal(relative_bias(entries[:, offsets][None], 2), entries)


def test_a_bias_for_each_row_of_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="one bias for all rows"):
        relative_bias(torch.zeros(2, 1, 3, 3), 1)


def test_the_gradient_of_t5s_bias_table_is_that_of_the_dense_oracle() -> None:
    grads = []
    for swap in (lambda m: use_dense_oracle(m, 1.5), lambda m: use_sparse_attention(m, "entmax15")):
        model, inputs = build("t5"), batch("t5")
        swap(model)
        model(**inputs).logits.square().sum().backward()
        grads += [(n, p.grad) for n, p in model.named_parameters() if "relative" in n]
    assert len(grads) == 4
    for (name, expected), (_, found) in zip(grads[:2], grads[2:], strict=True):
        assert name.endswith("relative_attention_bias.weight")
        assert found is not None
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_the_mask_function_says_nothing_where_nothing_is_padded() -> None:
    """Layers then apply causality by themselves, which is what the kernels are quickest at."""
    assert attention_mask(2, 4, 4, attention_mask=torch.ones(2, 4, dtype=torch.bool)) is None
    assert attention_mask(2, 4, 4) is None


def test_padding_is_counted_from_both_ends() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]).bool()
    start, end = padding_of(mask)
    assert start[:3].tolist() == [2, 0, 1]
    assert end.tolist() == [4, 3, 3, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn": "relu"}, "attn is 'relu'"),
        ({"init": 1.0}, r"init is 1.0, but a learned alpha starts inside \(1, 2\)"),
        ({"attn": "entmax", "alpha": 2.5}, "alpha is 2.5"),
        ({"attn": "topk", "k": 0}, "k is 0"),
        ({"attn": "topp", "p": 1.5}, "p is 1.5"),
        ({"layers": ["encoder.*"]}, "'encoder.*', which fits no attention module"),
    ],
    ids=["attn", "init", "alpha", "k", "p", "layers"],
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use_sparse_attention(build("bert"), **arguments)


def test_a_model_of_pixels_wants_inputs() -> None:
    config = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
    )
    model = transformers.ViTModel(config)
    with pytest.raises(ValueError, match="takes pixel_values"):
        use_sparse_attention(model)
    use_sparse_attention(model, inputs={"pixel_values": torch.zeros(1, 3, 8, 8)})
    assert [len(values) for values in alphas(model).values()] == [3]


def test_random_tokens_stay_unpredictable() -> None:
    """A leak of the next token shows as a loss near 0 where nothing can be predicted."""
    torch.manual_seed(0)
    model = BUILDERS["gpt2"]().train()
    use_sparse_attention(model, init=1.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        ids = torch.randint(3, 61, (16, 12))
        loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) > 3.8
