"""The encoder-decoder model: gradients, caches, padding, causality, alphas and names."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseformer.config import ATTN_NAMES, AttnName, ModelConfig
from sparseformer.nn.layers import Residual
from sparseformer.nn.mappings import AdaptiveAlpha
from sparseformer.nn.recording import record_attention
from sparseformer.nn.transformer import (
    AttentionChoice,
    Memory,
    Seq2SeqTransformer,
    TransformerDecoder,
    TransformerEncoder,
    alpha_parameters,
)

VOCAB = 23
POSITIONS = ["none", "learned", "sinusoidal", "rotary", "t5", "alibi"]


def _config(**options: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "d_model": 16,
        "num_heads": 4,
        "ffn_dim": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "dropout": 0.0,
        "max_positions": 32,
    }
    return ModelConfig(**(sizes | options))


def _model(attn: AttnName | AttentionChoice = "entmax15", **options: Any) -> Seq2SeqTransformer:
    torch.manual_seed(0)
    return Seq2SeqTransformer(_config(**options), VOCAB, attn=attn)


def _tokens(batch: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, length), generator=generator)


SRC, TGT = _tokens(3, 7, 1), _tokens(3, 6, 2)
LENGTH = torch.tensor([7, 4, 2])


def _assert_all_parameters_learn(model: Seq2SeqTransformer) -> None:
    hidden = model(SRC, LENGTH, TGT)
    assert hidden.shape == (3, 6, 16)
    logits = model.logits(hidden)
    assert logits.shape == (3, 6, VOCAB)
    nn.functional.cross_entropy(logits.flatten(0, 1), TGT.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    "attn",
    [*ATTN_NAMES, AttentionChoice("softmax", "topk", "entmax_adaptive")],
    ids=[*ATTN_NAMES, "mixed"],
)
def test_every_parameter_receives_a_gradient(attn: AttnName | AttentionChoice) -> None:
    _assert_all_parameters_learn(_model(attn, attn_k=3))


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "learned", "max_positions": 7, "tie_embeddings": False},
        {"positions": "t5", "norm": "rms_norm", "activation": "gated_gelu_tanh"},
        {"positions": "rotary", "norm_position": "post", "num_kv_heads": 1},
        {"positions": "alibi", "activation": "swish", "dropout": 0.1, "attention_dropout": 0.1},
    ],
    ids=["learned-untied", "t5-rms-gated", "rotary-post-multi-query", "alibi-dropout"],
)
def test_every_parameter_receives_a_gradient_with(options: dict[str, Any]) -> None:
    _assert_all_parameters_learn(_model("entmax_adaptive", **options))


def test_bfloat16_autocast_stays_close() -> None:
    model = _model("entmax_adaptive", positions="rotary", norm="rms_norm")
    exact = model(SRC, LENGTH, TGT)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(SRC, LENGTH, TGT)
    assert (rounded - exact).square().mean().sqrt() < 0.03
    rounded.float().sin().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@torch.inference_mode()
@pytest.mark.parametrize("positions", POSITIONS)
def test_cached_decoding_equals_uncached(positions: str) -> None:
    model = _model("entmax15", positions=positions, num_kv_heads=2).eval()
    tokens = _tokens(3, 20, 3)
    memory = model.encode(SRC, LENGTH)
    whole = model.decode(tokens, memory)
    cache = model.new_cache(memory)
    parts = [model.decode(tokens[:, :3], memory, cache)]
    parts += [model.decode(tokens[:, t : t + 1], memory, cache) for t in range(3, 20)]
    assert cache.length == 20
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "t5"])
def test_reordered_cache_continues_the_chosen_rows(positions: str) -> None:
    model = _model("entmax15", positions=positions, num_kv_heads=2).eval()
    memory = model.encode(SRC, LENGTH)
    cache = model.new_cache(memory)
    model.decode(TGT, memory, cache)
    rows = torch.tensor([2, 2, 0, 1])
    cache.reorder(rows)
    following = _tokens(4, 2, 4)
    stepped = model.decode(following, memory, cache)
    chosen = Memory(memory.states[rows], memory.length[rows])
    whole = model.decode(torch.cat([TGT[rows], following], dim=1), chosen)
    torch.testing.assert_close(stepped, whole[:, -2:], atol=1e-5, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("positions", POSITIONS)
def test_output_does_not_depend_on_padding_or_batch_mates(positions: str) -> None:
    """Transformers, fairseq and OpenNMT had outputs that changed with the batch's longest row."""
    model = _model("entmax15", positions=positions).eval()
    batched = model.encode(SRC, LENGTH).states
    hidden = model(SRC, LENGTH, TGT)
    for row, length in enumerate(LENGTH.tolist()):
        alone = model.encode(SRC[row : row + 1, :length], LENGTH[row : row + 1])
        torch.testing.assert_close(batched[row, :length], alone.states[0], atol=1e-5, rtol=0)
        decoded = model.decode(TGT[row : row + 1], alone)
        torch.testing.assert_close(hidden[row], decoded[0], atol=1e-5, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("positions", POSITIONS)
def test_the_future_does_not_change_the_past(positions: str) -> None:
    model = _model("entmax15", positions=positions).eval()
    changed = TGT.clone()
    changed[:, 4:] = (changed[:, 4:] + 5) % VOCAB
    before, after = model(SRC, LENGTH, TGT), model(SRC, LENGTH, changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], atol=1e-6, rtol=0)
    assert (before[:, 4:] - after[:, 4:]).abs().max() > 1e-2


@torch.inference_mode()
@pytest.mark.parametrize("positions", POSITIONS)
def test_order_matters_with_positions_only(positions: str) -> None:
    model = _model("entmax15", positions=positions).eval()
    order = torch.tensor([1, 0, 2, 3, 6, 5, 4])
    states = model.encode(SRC[:1], LENGTH[:1]).states[:, order]
    reordered = model.encode(SRC[:1, order], LENGTH[:1]).states
    difference = (states - reordered).abs().max()
    assert difference < 1e-5 if positions == "none" else difference > 1e-3


def test_lengths_default_to_the_last_token_that_is_not_padding() -> None:
    model = _model().eval()
    padded = torch.tensor([[5, 0, 6, 0], [7, 8, 9, 9], [0, 0, 0, 0]])
    assert model.encode(padded).length.tolist() == [3, 4, 0]


def test_alphas_nest_by_attention_layer_and_head() -> None:
    model = _model(AttentionChoice("softmax", "topk", "entmax_adaptive"), alpha=1.25)
    alphas = model.alphas()
    assert list(alphas) == ["encoder_self", "cross"]
    assert alphas["encoder_self"] == [[1.0] * 4] * 2
    assert [len(heads) for heads in alphas["cross"]] == [4, 4]
    assert alphas["cross"][1] == pytest.approx([1.25] * 4, abs=1e-6)


def test_alpha_parameters_move_with_a_step() -> None:
    model = _model("entmax_adaptive")
    parameters = alpha_parameters(model)
    modules = [module for module in model.modules() if isinstance(module, AdaptiveAlpha)]
    assert len(modules) == 6
    assert {id(p) for p in parameters} == {id(p) for m in modules for p in m.parameters()}
    model(SRC, LENGTH, TGT).sin().sum().backward()
    torch.optim.SGD(parameters, lr=1.0).step()
    moved = [head for layers in model.alphas().values() for heads in layers for head in heads]
    assert len(moved) == 24
    assert all(alpha != 1.5 and 1.0 < alpha <= 2.0 for alpha in moved)
    assert alpha_parameters(_model("softmax")) == []


@pytest.mark.parametrize(
    ("attn", "expected"),
    [
        ("softmax", {"encoder_self": 1.5, "decoder_self": 1.0, "cross": 2.0}),
        (
            AttentionChoice("softmax", "softmax", "softmax"),
            {"encoder_self": 1.0, "decoder_self": 1.0, "cross": 1.0},
        ),
    ],
    ids=["name", "choice"],
)
def test_config_overrides_a_name_but_not_a_choice(
    attn: AttnName | AttentionChoice, expected: dict[str, float]
) -> None:
    model = _model(attn, encoder_attn="entmax15", cross_attn="sparsemax")
    assert model.alphas() == {name: [[alpha] * 4] * 2 for name, alpha in expected.items()}


def test_settings_reach_every_layer() -> None:
    model = _model("topp", attn_p=0.3, attn_k=5, num_kv_heads=2, attention_dropout=0.2, dropout=0.4)
    layers = [layer for group in model.attention_layers().values() for layer in group]
    assert len(layers) == 6
    for layer in layers:
        assert (layer.p, layer.k, layer.num_kv_heads, layer.dropout) == (0.3, 5, 2, 0.2)
    residuals = [module for module in model.modules() if isinstance(module, Residual)]
    assert [residual.dropout for residual in residuals] == [0.4] * 10
    assert model.encoder.dropout.p == model.decoder.dropout.p == 0.4
    assert not torch.equal(model(SRC, LENGTH, TGT), model(SRC, LENGTH, TGT))
    model.eval()
    assert torch.equal(model(SRC, LENGTH, TGT), model(SRC, LENGTH, TGT))


def test_record_has_the_nesting_of_alphas() -> None:
    model = _model(AttentionChoice("sparsemax", "softmax", "topk"), attn_k=1).eval()
    with record_attention(model) as record:
        model(SRC, LENGTH, TGT)
    densities = record.densities()
    assert list(densities) == ["encoder_self", "decoder_self", "cross"]
    assert all(0 < head < 1 for layer in densities["encoder_self"] for head in layer)
    assert densities["decoder_self"] == [[1.0] * 4] * 2
    # One key of 7, of 4 and of 2, for as many queries of each row.
    assert densities["cross"][0] == pytest.approx([3 / 13] * 4)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_are_a_product_with_the_output_weight(tied: bool) -> None:
    model = _model(tie_embeddings=tied)
    hidden = model(SRC, LENGTH, TGT)
    torch.testing.assert_close(model.logits(hidden), hidden @ model.output_weight.t())
    assert (model.output_weight is model.embedding.weight) == tied


def test_embeddings_enter_with_unit_variance() -> None:
    torch.manual_seed(0)
    model = Seq2SeqTransformer(_config(d_model=64, positions="none"), 500)
    entering: list[Tensor] = []
    model.encoder.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
    model.encode(torch.arange(500)[None])
    assert entering[0].var().item() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("layers", [1, 8])
def test_pre_norm_branches_start_with_the_variance_of_one(layers: int) -> None:
    torch.manual_seed(0)
    config = _config(d_model=64, encoder_layers=layers, positions="none")
    encoder = TransformerEncoder(config)
    encoder.final_norm = nn.Identity()
    x = torch.randn(8, 16, 64)
    change = (encoder(x) - x).var().item()
    assert 0.2 < change < 1.5


def test_state_dict_names_are_stable() -> None:
    names = set(_model("entmax_adaptive", encoder_layers=1, decoder_layers=1).state_dict())
    alpha = {name for name in names if "adaptive_alpha" in name}
    assert len(alpha) == 3
    attention = ["in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias"]
    parts = {"encoder": ["self_attention"], "decoder": ["self_attention", "cross_attention"]}
    expected = {"embedding.weight"}
    for stack, layers in parts.items():
        expected |= {f"{stack}.final_norm.weight", f"{stack}.final_norm.bias"}
        for part in [*layers, "feed_forward"]:
            prefix = f"{stack}.blocks.0.{part}"
            expected |= {f"{prefix}.{name}" for name in attention}
            expected |= {f"{prefix}_residual.norm.weight", f"{prefix}_residual.norm.bias"}
    assert names - alpha == expected


def test_encoder_and_decoder_serve_alone() -> None:
    torch.manual_seed(0)
    encoder = TransformerEncoder(_config(norm_position="post"), attn="sparsemax")
    decoder = TransformerDecoder(_config(), attn="softmax", cross_attn="topp")
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(encoder(x), encoder(x, torch.tensor([5, 5])))
    output = decoder(x[:, :3], Memory(encoder(x), torch.tensor([5, 5])))
    assert output.shape == (2, 3, 16)
    torch.testing.assert_close(output.mean(-1), torch.zeros(2, 3), atol=1e-5, rtol=0)


def test_input_longer_than_the_positions_is_refused() -> None:
    model = _model(max_positions=6)
    with pytest.raises(ValueError, match=r"7 tokens .* 6 sinusoidal .* model.max_positions to 7"):
        model.encode(SRC, LENGTH)


def test_padding_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pad_id is 9, but it must be in \[0, 9\)"):
        Seq2SeqTransformer(_config(), 9, pad_id=9)
