"""A wrong, truncated or foreign file is refused in one sentence that names it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Inner
from tokenizers import models
from torch import Tensor

from sparseformer.errors import CheckpointError
from sparseformer.pretrained import (
    is_pretrained,
    load_pretrained,
    read_pretrained,
    save_pretrained,
)

T5, T5_SHARDED = "t5 1.0, 3 heads of 5 in 16", "t5 1.0, 4 heads of 16 in 64, sharded"
BART, MARIAN = "bart, 3 heads of 4 in 12", "marian, 3 heads of 4 in 12"
BART_UNTIED = "bart, 5 heads of 8 in 40, untied, sharded"
ALPHA = "sparseformer.decoder.blocks.0.cross_attention.adaptive_alpha.logits"
Make = Callable[[str], Any]
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture
def copied(saved: Make, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function from a name to a copy of the checkpoint that a test may spoil."""
    return lambda name: Path(shutil.copytree(saved(name).folder, tmp_path / "checkpoint"))


def _refused(source: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_pretrained(str(source))
    assert "\n" not in str(caught.value)


def _edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: v for key, v in content.items() if v != "absent"}))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (T5, {"model_type": "longt5"}, "model_type is 'longt5'.*t5, mt5, bart, mbart, marian, peg"),
        (T5, {"model_type": "absent"}, "model_type is None"),
        (T5, {"model_type": 3}, "model_type is 3"),
        (T5, {"d_model": "absent"}, "config.json has no d_model"),
        (T5, {"d_model": "16"}, "d_model is '16', but it must be a whole number of 1"),
        (T5, {"num_heads": 0}, "num_heads is 0"),
        (T5, {"d_kv": True}, "d_kv is True"),
        (T5, {"vocab_size": -1}, "vocab_size is -1"),
        (T5, {"feed_forward_proj": "gated-mish"}, "feed_forward_proj is 'gated-mish'"),
        (T5, {"dropout_rate": 1.5}, r"config.json: model.dropout is 1.5"),
        (T5, {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        (BART, {"decoder_attention_heads": 4}, "encoder_attention_heads 3 and decoder_att.* 4"),
        (BART, {"decoder_ffn_dim": 21}, "encoder_ffn_dim 20 and decoder_ffn_dim 21"),
        (BART, {"d_model": 13}, "a divisor of d_model = 13"),
        (BART, {"eos_token_id": 40}, "the eos_id is 40, but vocab_size is 40"),
        (BART, {"eos_token_id": [2, 3]}, r"eos_token_id is \[2, 3\], but it must be one token id"),
        (MARIAN, {"pad_token_id": None}, "pad_token_id is None"),
        (MARIAN, {"share_encoder_decoder_embeddings": False}, "one vocabulary"),
        (BART, {"sparseformer": 3}, "sparseformer is 3, but it must be an object"),
        (BART, {"sparseformer": {"encoder_self": "hard"}}, "config.json has no decoder_self"),
    ],
)
def test_settings(copied: Make, name: str, values: dict[str, Any], message: str) -> None:
    folder = copied(name)
    _edit(folder, **values)
    _refused(folder, message)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"encoder_self": "hard"}, "encoder_self is 'hard', but it must be one of softmax"),
        ({"alpha": 3}, "config.json: model.alpha is 3.0, but it must be in"),
        ({"attn_k": 0.5}, "attn_k is 0.5, but it must be a whole number of 1 or more"),
    ],
    ids=["map", "alpha", "k"],
)
def test_a_stored_attention_that_cannot_be_used(
    copied: Make, own: dict[str, Any], message: str
) -> None:
    usual = {"encoder_self": "topk", "decoder_self": "softmax", "cross": "softmax"}
    parameters = {"alpha": 1.5, "attn_k": 8, "attn_p": 0.9}
    _edit(folder := copied(BART), sparseformer=usual | parameters | own)
    _refused(folder, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json can't be read"),
        ("", "config.json isn't JSON"),
        ('{"model_type": "t5"', "config.json isn't JSON"),
        ("[1]", "config.json doesn't hold a JSON object"),
        ("[" * 100_000, "config.json isn't JSON"),
    ],
    ids=["missing", "empty", "cut", "list", "deep"],
)
def test_a_damaged_config(copied: Make, content: str | None, message: str) -> None:
    folder = copied(T5)
    assert is_pretrained(folder)
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    assert not is_pretrained(folder)
    _refused(folder, message)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (T5, lambda t: t.pop("encoder.final_layer_norm.weight"), "it lacks encoder.final_layer"),
        (T5, lambda t: t.pop("shared.weight"), "lacks shared.weight"),
        (BART, lambda t: t.pop("model.shared.weight"), "lacks model.shared.weight"),
        (
            T5,
            lambda t: t.pop("decoder.block.0.layer.1.EncDecAttention.k.weight"),
            "it lacks decoder.block.0.layer.1.EncDecAttention.k.weight",
        ),
        (T5, lambda t: t.update(more=torch.ones(2)), "it holds unexpectedly more"),
        (
            BART,
            lambda t: t.update({"classification_head.dense.weight": torch.ones(2)}),
            "it holds unexpectedly classification_head.dense.weight",
        ),
        (
            T5,
            lambda t: t.update({"shared.weight": torch.ones(39, 16)}),
            r"differs in shared.weight \(\[39, 16\] in the file, \[40, 16\] by config.json\)",
        ),
        (
            T5,
            lambda t: t.update({"encoder.block.1.layer.0.SelfAttention.q.weight": torch.ones(16)}),
            r"SelfAttention.q.weight \(\[16\] in the file, \[15, 16\] by config",
        ),
        (
            BART,
            lambda t: t.update(final_logits_bias=torch.ones(40)),
            r"final_logits_bias \(\[40\] in the file, \[1, 40\] by config",
        ),
        (
            BART,
            lambda t: t["model.encoder.layers.1.fc1.bias"].fill_(torch.nan),
            "model.encoder.layers.1.fc1.bias isn't finite",
        ),
        (
            BART,
            lambda t: t["model.encoder.layers.1.fc1.bias"].fill_(torch.inf),
            "model.encoder.layers.1.fc1.bias isn't finite",
        ),
        (
            T5,
            lambda t: t.update({"shared.weight": torch.ones(40, 16, dtype=torch.int8)}),
            "shared.weight has the type torch.int8",
        ),
        (
            T5,
            lambda t: t.update({"encoder.embed_tokens.weight": torch.ones(40, 16)}),
            "shared.weight and encoder.embed_tokens.weight differ",
        ),
        (
            BART,
            lambda t: t.update({"lm_head.weight": torch.ones(40, 12)}),
            "says tie_word_embeddings, but lm_head.weight differs",
        ),
        (
            BART_UNTIED,
            lambda t: t.update({"model.decoder.embed_tokens.weight": torch.ones(40, 40)}),
            "model.shared.weight and model.decoder.embed_tokens.weight differ",
        ),
        (
            BART_UNTIED,
            lambda t: t.pop("lm_head.weight"),
            "tie_word_embeddings: false, but there is no lm_head.weight",
        ),
        (
            MARIAN,
            lambda t: t.update({"model.encoder.embed_positions.weight": torch.ones(30, 12)}),
            "model.encoder.embed_positions.weight isn't the usual table",
        ),
    ],
)
def test_tensors(copied: Make, name: str, change: Change, message: str) -> None:
    folder = copied(name)
    shards = sorted(folder.glob("*.safetensors"))
    tensors = {key: value for path in shards for key, value in load_file(path).items()}
    change(tensors)
    for path in [*shards, folder / "model.safetensors.index.json"]:
        path.unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors")
    _refused(folder, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, n: t.pop(n), "it lacks sparseformer.decoder.blocks.0.cross_attention"),
        (lambda t, n: t.update({n: torch.ones(4)}), r"logits \(\[4\] in the file, \[3\] by config"),
        (lambda t, n: t[n].fill_(torch.nan), f"{ALPHA} isn't finite"),
        (lambda t, n: t.update({n + "2": t[n] + 0}), "it holds unexpectedly sparseformer"),
    ],
    ids=["missing", "other heads", "nan", "unexpected"],
)
def test_learned_alphas(
    saved: Make, tmp_path: Path, change: Callable[..., object], message: str
) -> None:
    checkpoint = read_pretrained(saved(T5).folder)
    save_pretrained(checkpoint.build("entmax_adaptive"), tmp_path, checkpoint)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors, ALPHA)
    save_file(tensors, tmp_path / "model.safetensors")
    _refused(tmp_path, message)


def test_alphas_without_the_key_are_unexpected(saved: Make, tmp_path: Path) -> None:
    checkpoint = read_pretrained(saved(T5).folder)
    save_pretrained(checkpoint.build("entmax_adaptive"), tmp_path, checkpoint)
    _edit(tmp_path, sparseformer="absent")
    _refused(tmp_path, "it holds unexpectedly sparseformer.decoder")


def test_a_t5_that_says_untied_needs_its_head(copied: Make) -> None:
    _edit(folder := copied(T5), tie_word_embeddings=False)
    _refused(folder, "tie_word_embeddings: false, but there is no lm_head.weight")


@pytest.mark.parametrize("size", [0, 5, 8, 400, -1], ids=lambda size: f"{size}-bytes")
def test_a_truncated_file(copied: Make, size: int) -> None:
    path = copied(T5) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    _refused(path.parent, "model.safetensors isn't a whole safetensors file")


def test_a_truncated_or_missing_shard(copied: Make) -> None:
    folder = copied(T5_SHARDED)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    _refused(folder, f"{shard.name} isn't a whole safetensors file")
    shard.unlink()
    _refused(folder, f"lacks the shard {shard.name}")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "weight_map is None"),
        ({"shared.weight": 3}, "weight_map is .* an object from tensor to file"),
        ({"shared.weight": "../x.safetensors"}, "outside its folder"),
        ({"shared.weight": "model-00001-of-00009.safetensors"}, "shards disagree about"),
    ],
    ids=["none", "number", "outside", "incomplete"],
)
def test_a_wrong_index(copied: Make, weight_map: Any, message: str) -> None:
    folder = copied(T5_SHARDED)
    content = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(content)
    _refused(folder, message)


def test_a_pickle_is_refused_with_the_way_out(copied: Make) -> None:
    folder = copied(T5)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    way_out = re.escape(f"AutoModelForSeq2SeqLM as A; A.from_pretrained('{folder}')")
    _refused(folder, f"has no model.safetensors .* a pickle .*{way_out}")


def test_a_name_that_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def offline(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert not any(pattern.endswith(".bin") for pattern in allow_patterns)
        raise LocalEntryNotFoundError("there is no network.\nMore lines.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    _refused(tmp_path / "nowhere", "neither a folder nor a name on the Hugging Face hub")
    _refused("some/model", r"some/model is no folder here, .*\(there is no network\); check")
    with pytest.raises(CheckpointError, match="no network"):
        read_pretrained("small", revision="main")
    assert asked == [("some/model", None), ("small", "main")]


def test_a_name_on_the_hub_is_fetched(
    saved: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(T5).folder
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    monkeypatch.chdir(tmp_path)
    checkpoint = read_pretrained("some/model", revision="abc")
    assert (checkpoint.source, checkpoint.folder) == ("some/model", folder)


def test_a_folder_has_no_revision(copied: Make) -> None:
    with pytest.raises(CheckpointError, match="is a folder, so it has no revision 'main'"):
        read_pretrained(copied(T5), revision="main")


def _tokenizer(folder: Path, *, size: int, pad: int) -> None:
    names = {"<pad>": pad, "</s>": 1, "<unk>": 2}
    words = {f"w{i}": i for i in range(size) if i not in names.values()}
    inner = Inner(models.WordLevel(names | words, unk_token="<unk>"))
    inner.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("spiece.model", "has no tokenizer.json; make one: .*AutoTokenizer as A"),
        ("source.spm", "Marian's two SentencePiece models.* MarianTokenizer"),
        (None, "has no tokenizer.json; make one: .*AutoTokenizer as A"),
    ],
)
def test_a_missing_tokenizer(copied: Make, file: str | None, message: str) -> None:
    folder = copied(T5)
    if file is not None:
        (folder / file).touch()
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("size", "pad", "message"),
    [
        (41, 0, "has 41 tokens, but the embedding has only 40 rows"),
        (40, 3, "has the pad_id 3, but .* says 0"),
    ],
    ids=["too large", "other ids"],
)
def test_a_tokenizer_of_another_model(copied: Make, size: int, pad: int, message: str) -> None:
    folder = copied(T5)
    _tokenizer(folder, size=size, pad=pad)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(folder)


def test_a_damaged_tokenizer(copied: Make) -> None:
    folder = copied(T5)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json isn't a tokenizer"):
        load_pretrained(folder)
