"""Loaded checkpoints of every family give transformers' logits, however they were stored."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_parity import LENGTH, logits_of_both, random_batch
from published_models import PUBLISHED, VOCAB
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparseformer.nn.positions import SinusoidalPositions
from sparseformer.pretrained import read_pretrained

T5, T5_1_1 = "t5 1.0, 3 heads of 5 in 16", "t5 1.1, 3 heads of 5 in 16, untied"
BART, MARIAN = "bart, 3 heads of 4 in 12", "marian, 3 heads of 4 in 12"
Make = Callable[[str], Any]


def _assert_equal(expected: Tensor, actual: Tensor) -> None:
    assert expected.std() > 0.2, "too flat to tell"
    # Promised are 1e-4, seen are 6e-6; the two forms of gelu differ by more than this.
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0.0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_are_those_of_transformers(saved: Make, name: str) -> None:
    folder, theirs = saved(name)
    expected, actual = logits_of_both(theirs, read_pretrained(folder))
    _assert_equal(expected, actual)


@pytest.mark.parametrize("name", [T5_1_1, BART], ids=["t5", "bart"])
def test_entmax_near_1_is_near_softmax(saved: Make, name: str) -> None:
    checkpoint = read_pretrained(saved(name).folder)
    src, tgt = random_batch(checkpoint.pad_id)
    softmax, near, start = (
        checkpoint.build(attn, alpha).eval()
        for attn, alpha in [(None, None), ("entmax", 1.0001), ("entmax_adaptive", None)]
    )
    heads = [alpha for layers in start.alphas().values() for layer in layers for alpha in layer]
    assert heads == pytest.approx([1.05] * len(heads), abs=1e-6)
    expected, close, further = (m.logits(m(src, LENGTH, tgt)) for m in (softmax, near, start))
    torch.testing.assert_close(close, expected, atol=2e-2, rtol=0.0)
    assert (further - expected).abs().max() > 1e-3


def test_a_long_input_meets_every_bucket_of_t5(saved: Make) -> None:
    folder, theirs = saved(T5)
    model = read_pretrained(folder).build().eval()
    src = torch.randint(3, VOCAB, (1, 300), generator=torch.Generator().manual_seed(3))
    tgt = src[:, :200]
    with torch.no_grad():
        expected = theirs(input_ids=src, decoder_input_ids=tgt).logits
        _assert_equal(expected, model.logits(model(src, torch.tensor([300]), tgt)))


def _rewrite(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Copy a checkpoint of one file, its tensors changed in place."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def _same_as_before(saved: Make, name: str, folder: Path) -> None:
    _, theirs = saved(name)
    _assert_equal(*logits_of_both(theirs, read_pretrained(folder)))


def test_copies_of_the_embedding_are_accepted_and_named(saved: Make, tmp_path: Path) -> None:
    """Files of transformers 4 hold the embedding under each of its names."""
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"]

    def add(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: tensors["shared.weight"].clone() for name in copies}

    folder = _rewrite(saved(T5).folder, tmp_path / "x", add)
    assert read_pretrained(folder).unused == tuple(copies)
    _same_as_before(saved, T5, folder)


@pytest.mark.parametrize("kept", ["encoder.embed_tokens.weight", "lm_head.weight"])
def test_the_embedding_may_be_stored_under_another_name(
    saved: Make, tmp_path: Path, kept: str
) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        tensors[kept] = tensors.pop("shared.weight")

    _same_as_before(saved, T5, _rewrite(saved(T5).folder, tmp_path / "x", rename))


def test_a_tensor_that_t5_never_reads_is_named(saved: Make, tmp_path: Path) -> None:
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    folder = _rewrite(saved(T5).folder, tmp_path / "x", lambda t: t.update({name: torch.ones(3)}))
    assert read_pretrained(folder).unused == (name,)
    _same_as_before(saved, T5, folder)


def test_names_without_model_are_those_of_a_bare_bart(saved: Make, tmp_path: Path) -> None:
    """facebook/bart-base was saved without its head: no `model.` and no final_logits_bias."""

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        del tensors["final_logits_bias"]

    folder, theirs = saved(BART)
    checkpoint = read_pretrained(_rewrite(folder, tmp_path / "x", strip))
    expected, actual = logits_of_both(theirs, checkpoint)
    _assert_equal(expected - theirs.final_logits_bias, actual)


def test_a_stored_table_of_marian_is_checked_and_named(saved: Make, tmp_path: Path) -> None:
    name = "model.encoder.embed_positions.weight"
    table = SinusoidalPositions(30, 12).table.half()
    folder = _rewrite(saved(MARIAN).folder, tmp_path / "x", lambda t: t.update({name: table}))
    assert read_pretrained(folder).unused == (name,)
    _same_as_before(saved, MARIAN, folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision_files_become_fp32(saved: Make, tmp_path: Path, dtype: Any) -> None:
    def halve(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items()}

    folder, theirs = saved(BART)
    checkpoint = read_pretrained(_rewrite(folder, tmp_path / "x", halve))
    assert {tensor.dtype for tensor in checkpoint.weights.values()} == {torch.float32}
    stored = theirs.model.shared.weight.to(dtype).float()
    assert torch.equal(checkpoint.weights["embedding.weight"], stored)


def test_a_config_of_the_first_t5_leaves_out_what_the_format_fills_in(
    saved: Make, tmp_path: Path
) -> None:
    """Configurations of 2020 hold neither the activation nor the largest distance nor a tie."""
    folder, theirs = saved(T5)
    shutil.copytree(folder, tmp_path / "x")
    kept = ["model_type", "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads"]
    values = json.loads((folder / "config.json").read_text())
    values = {key: values[key] for key in [*kept, "num_decoder_layers"]}
    (tmp_path / "x/config.json").write_text(json.dumps(values))
    (tmp_path / "x/generation_config.json").unlink()
    checkpoint = read_pretrained(tmp_path / "x")
    assert (checkpoint.pad_id, checkpoint.start_id, checkpoint.eos_id) == (0, 0, 1)
    assert checkpoint.generation.forced_eos_id is None
    _assert_equal(*logits_of_both(theirs, checkpoint))


def test_every_dropout_is_taken_over_and_off_in_evaluation(saved: Make) -> None:
    checkpoint = read_pretrained(saved(T5).folder)
    assert (checkpoint.model.dropout, checkpoint.model.attention_dropout) == (0.1, 0.1)
    model: nn.Module = checkpoint.build()
    src, tgt = random_batch(0)
    assert model.training
    assert not torch.equal(model(src, LENGTH, tgt), model(src, LENGTH, tgt))
    model.eval()
    assert torch.equal(model(src, LENGTH, tgt), model(src, LENGTH, tgt))
