"""transformers loads what we save with softmax; sparse attention comes back with its alphas."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pretrained_parity import LENGTH, logits_of_both, random_batch
from published_models import PUBLISHED, VOCAB
from safetensors.torch import load_file
from tokenizers import Tokenizer as Inner
from tokenizers import models
from torch import Tensor, nn

from sparseformer.errors import CheckpointError
from sparseformer.nn import AttentionChoice
from sparseformer.pretrained import (
    load_pretrained,
    read_pretrained,
    read_settings,
    save_pretrained,
    save_settings,
)

T5, T5_1_1 = "t5 1.0, 3 heads of 5 in 16", "t5 1.1, 3 heads of 5 in 16, untied"
BART = "bart, 3 heads of 4 in 12"
Make = Callable[[str], Any]


def _train(model: nn.Module) -> None:
    """Move every parameter, alphas too, as an optimiser would."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)


def _logits(model: nn.Module, pad_id: int) -> Tensor:
    src, tgt = random_batch(pad_id)
    with torch.no_grad():
        logits: Tensor = model.logits(model(src, LENGTH, tgt))
    return logits


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_loads_a_trained_softmax_model(saved: Make, tmp_path: Path, name: str) -> None:
    checkpoint = read_pretrained(saved(name).folder)
    model = checkpoint.build().eval()
    before = _logits(model, checkpoint.pad_id)
    _train(model)
    save_pretrained(model, tmp_path, checkpoint)
    theirs, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values())
    expected, again = logits_of_both(theirs.eval(), read_pretrained(tmp_path))
    ours = _logits(model, checkpoint.pad_id)
    assert (ours - before).abs().max() > 0.1
    torch.testing.assert_close(expected, ours, atol=1e-4, rtol=0.0)
    assert torch.equal(again, ours)


@pytest.mark.parametrize("name", [T5, T5_1_1, BART], ids=["t5", "t5 1.1", "bart"])
def test_an_unchanged_model_is_saved_bit_for_bit(saved: Make, tmp_path: Path, name: str) -> None:
    folder = saved(name).folder
    checkpoint = read_pretrained(folder)
    save_pretrained(checkpoint.build(), tmp_path, folder)
    written, original = (load_file(path / "model.safetensors") for path in (tmp_path, folder))
    for key, tensor in original.items():
        assert torch.equal(written[key], tensor), key
    for file in ("config.json", "generation_config.json"):
        values = [json.loads((path / file).read_text()) for path in (tmp_path, folder)]
        assert values[0] == values[1], file


@pytest.mark.parametrize(
    ("name", "attn"),
    [
        (T5, "entmax_adaptive"),
        (T5_1_1, AttentionChoice("softmax", "entmax_adaptive", "sparsemax")),
        (BART, AttentionChoice("entmax", "entmax15", "entmax_adaptive")),
        (BART, "topk"),
        (T5, "topp"),
    ],
    ids=["adaptive", "t5 mixed", "bart mixed", "topk", "topp"],
)
def test_sparse_attention_comes_back_whole(
    saved: Make, tmp_path: Path, name: str, attn: Any
) -> None:
    checkpoint = read_pretrained(saved(name).folder)
    sparse = dataclasses.replace(checkpoint.model, alpha=1.3, attn_k=3, attn_p=0.6)
    model = dataclasses.replace(checkpoint, model=sparse).build(attn).eval()
    _train(model)
    save_pretrained(model, tmp_path, checkpoint)
    again = read_pretrained(tmp_path).build().eval()
    assert again.alphas() == model.alphas()
    assert torch.equal(_logits(again, checkpoint.pad_id), _logits(model, checkpoint.pad_id))
    softmax = read_pretrained(tmp_path).build("softmax").eval()
    difference = _logits(softmax, checkpoint.pad_id) - _logits(model, checkpoint.pad_id)
    assert difference.abs().max() > 1e-3


def test_stored_alphas_give_way_to_a_stated_one(saved: Make, tmp_path: Path) -> None:
    checkpoint = read_pretrained(saved(T5).folder)
    model = checkpoint.build("entmax_adaptive", 1.4)
    _train(model)
    save_pretrained(model, tmp_path, checkpoint)
    read = read_pretrained(tmp_path)
    kept, changed = read.build("entmax_adaptive"), read.build("entmax_adaptive", 1.2)
    assert kept.alphas() == model.alphas()
    alphas = torch.tensor(list(changed.alphas()["cross"]))
    torch.testing.assert_close(alphas, torch.full_like(alphas, 1.2))


def test_transformers_refuses_a_sparse_model(saved: Make, tmp_path: Path) -> None:
    """It would compute softmax with weights that were trained for something else."""
    checkpoint = read_pretrained(saved(T5).folder)
    save_pretrained(checkpoint.build("entmax15"), tmp_path, checkpoint)
    with pytest.raises(ValueError, match="model type `sparseformer-t5`"):
        transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)


def test_a_sparse_model_made_softmax_again_is_transformers_own(saved: Make, tmp_path: Path) -> None:
    checkpoint = read_pretrained(saved(T5).folder)
    save_pretrained(checkpoint.build("entmax_adaptive"), tmp_path / "sparse", checkpoint)
    sparse = read_pretrained(tmp_path / "sparse")
    save_pretrained(sparse.build("softmax"), tmp_path / "softmax", sparse)
    assert set(read_pretrained(tmp_path / "softmax").attention) == {"softmax"}
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "softmax")
    expected, actual = logits_of_both(theirs.eval(), checkpoint)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0.0)


def test_a_half_precision_checkpoint_is_saved_in_fp32(saved: Make, tmp_path: Path) -> None:
    """Left as it was, the dtype of config.json would make transformers round what was trained."""
    shutil.copytree(saved(T5).folder, tmp_path / "half")
    config = json.loads((tmp_path / "half/config.json").read_text()) | {"dtype": "float16"}
    (tmp_path / "half/config.json").write_text(json.dumps(config))
    checkpoint = read_pretrained(tmp_path / "half")
    save_pretrained(checkpoint.build(), tmp_path / "x", checkpoint)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "x")
    assert {parameter.dtype for parameter in theirs.parameters()} == {torch.float32}


def _word_tokenizer(path: Path, size: int = VOCAB, unk: int = 2) -> Path:
    names = {"<pad>": 0, "</s>": 1, "<unk>": unk}
    words = {f"w{i}": i for i in range(size) if i not in names.values()}
    inner = Inner(models.WordLevel(names | words, unk_token="<unk>"))
    inner.save(str(path / "tokenizer.json"))
    return path


def test_a_model_and_its_tokenizer_come_back_together(saved: Make, tmp_path: Path) -> None:
    folder = _word_tokenizer(Path(shutil.copytree(saved(T5).folder, tmp_path / "t5")))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    model, tokenizer = load_pretrained(folder, attn="entmax_adaptive", alpha=1.1)
    assert not model.training
    assert tokenizer.vocab_size == VOCAB
    save_pretrained(model, tmp_path / "copied", folder)
    save_pretrained(model, tmp_path / "given", folder, tokenizer=tokenizer)
    for name in ("copied", "given"):
        again, same = load_pretrained(tmp_path / name)
        assert same.content_hash == tokenizer.content_hash
        assert again.alphas() == model.alphas()
        assert (tmp_path / name / "tokenizer_config.json").exists()


def test_saving_over_its_own_source_is_safe(saved: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved(T5).folder, tmp_path / "t5"))
    checkpoint = read_pretrained(folder)
    model = checkpoint.build().eval()
    _train(model)
    save_pretrained(model, folder, checkpoint)
    assert torch.equal(_logits(read_pretrained(folder).build().eval(), 0), _logits(model, 0))
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_settings_alone_are_enough_to_save(saved: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved(T5_1_1).folder, tmp_path / "t5"))
    checkpoint = read_pretrained(_word_tokenizer(folder))
    save_settings(checkpoint, tmp_path / "kept")
    shutil.rmtree(folder)
    settings = read_settings(tmp_path / "kept")
    assert settings.generation == checkpoint.generation
    assert settings.conventions == checkpoint.conventions
    save_pretrained(checkpoint.build(), tmp_path / "x", settings)
    again = read_pretrained(tmp_path / "x")
    assert again.weights.keys() == checkpoint.weights.keys()
    assert load_pretrained(tmp_path / "x")[1].vocab_size == VOCAB


def test_a_model_of_another_shape_is_refused(saved: Make, tmp_path: Path) -> None:
    bart, t5 = (read_pretrained(saved(name).folder) for name in (BART, T5))
    with pytest.raises(CheckpointError, match="isn't of the shape of"):
        save_pretrained(bart.build(), tmp_path / "x", t5)
    wider = dataclasses.replace(t5, vocab_size=VOCAB + 1).new_model()
    with pytest.raises(CheckpointError, match=r"embedding\.weight differs"):
        save_pretrained(wider, tmp_path / "x", t5)
    assert not (tmp_path / "x").exists()


def test_layers_of_several_maps_are_refused(saved: Make, tmp_path: Path) -> None:
    checkpoint = read_pretrained(saved(T5).folder)
    model, other = checkpoint.build(), checkpoint.build("sparsemax")
    model.encoder.blocks[1] = other.encoder.blocks[1]
    with pytest.raises(CheckpointError, match=r"encoder_self have the maps \['softmax', 'sparse"):
        save_pretrained(model, tmp_path, checkpoint)


def test_a_folder_that_cannot_be_written_is_named(saved: Make, tmp_path: Path) -> None:
    checkpoint = read_pretrained(saved(T5).folder)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=f"Can't write to {tmp_path / 'file'}"):
        save_pretrained(checkpoint.build(), tmp_path / "file", checkpoint)
