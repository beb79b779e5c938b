"""A swapped model survives save_pretrained and comes back with its alphas."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import batch, build, logits
from safetensors.torch import load_file, save_file

from sparseformer.integrations.transformers import (
    alphas,
    from_pretrained,
    parameter_groups,
    use_sparse_attention,
)


def _trained(family: str) -> Any:
    """Return a model with a different alpha in every head."""
    model = build(family, torch.float32)
    use_sparse_attention(model, "entmax_adaptive", init=1.3)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith("adaptive_alpha.logits"):
            parameter.data += torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("family", ["t5", "bart", "marian", "bert", "modernbert", "llama", "gpt2"])
def test_the_round_trip_keeps_alphas_and_logits(family: str, tmp_path: Path) -> None:
    model, inputs = _trained(family), batch(family)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(str(tmp_path))
    assert type(loaded) is type(model)
    assert alphas(loaded) == alphas(model)
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))


def test_a_loaded_model_saves_the_same_again(tmp_path: Path) -> None:
    model = _trained("t5")
    model.save_pretrained(tmp_path / "first")
    from_pretrained(str(tmp_path / "first")).save_pretrained(tmp_path / "second")
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    configs = [(tmp_path / n / "config.json").read_text() for n in ("first", "second")]
    assert configs[0] == configs[1]


def test_shards_come_back(tmp_path: Path) -> None:
    model = _trained("bart")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert alphas(from_pretrained(str(tmp_path))) == alphas(model)


@pytest.mark.parametrize("attn", ["entmax", "topk", "sparsemax"])
def test_maps_without_parameters_come_back(attn: Any, tmp_path: Path) -> None:
    model, inputs = build("bert", torch.float32), batch("bert")
    use_sparse_attention(model, attn, alpha=1.7, k=3, layers=["*.layer.0.*"])
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(from_pretrained(str(tmp_path)), inputs), logits(model, inputs))


def test_the_body_loads_from_a_model_with_a_head(tmp_path: Path) -> None:
    model = _trained("bert")
    model.save_pretrained(tmp_path)
    body = from_pretrained(str(tmp_path), transformers.BertModel)
    assert type(body) is transformers.BertModel
    assert list(alphas(body).values()) == list(alphas(model).values())


def test_alphas_stay_fp32_in_a_16_bit_model(tmp_path: Path) -> None:
    model = _trained("llama")
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(str(tmp_path), dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert alphas(loaded) == alphas(model)
    assert bool(loaded(**batch("llama")).logits.isfinite().all())


def test_missing_alphas_are_named(tmp_path: Path) -> None:
    _trained("bert").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if "layer.1" in name and "adaptive_alpha" in name)
    del weights[lost]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks learned alphas: .*layer\.1\."):
        from_pretrained(str(tmp_path))


def test_a_model_saved_without_sparse_attention_is_refused(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was not saved with sparse attention"):
        from_pretrained(str(tmp_path))


def test_an_auto_class_is_refused(tmp_path: Path) -> None:
    """It is no class of models, so it can't get the alphas before the weights."""
    _trained("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="AutoModel'> is no model class"):
        from_pretrained(str(tmp_path), transformers.AutoModel)


def test_transformers_own_loader_gives_softmax_back(tmp_path: Path) -> None:
    """The weights of the model itself stay in the format of transformers."""
    own, inputs = build("bert", torch.float32), batch("bert")
    expected = logits(own, inputs)
    use_sparse_attention(own, init=1.5)
    own.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded, inputs), expected, rtol=0, atol=1e-5)


def test_groups_hold_every_parameter_once_and_alphas_do_not_decay() -> None:
    model = _trained("t5")
    model.encoder.final_layer_norm.weight.requires_grad = False
    groups = parameter_groups(model, lr=1e-4, alpha_lr=1e-2, weight_decay=0.1)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [
        (1e-4, 0.1),
        (1e-4, 0.0),
        (1e-2, 0.0),
    ]
    listed = [id(p) for group in groups for p in group["params"]]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert len(listed) == len(set(listed))
    assert set(listed) == trainable
    assert len(groups[2]["params"]) == 6
