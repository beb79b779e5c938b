"""The blocks of docs/pretrained.md run, on a tiny random T5 under the name that the page uses."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from doc_blocks import run_code_blocks
from published_models import PUBLISHED

from sparseformer.data import Tokenizer
from sparseformer.pretrained.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs/pretrained.md"


def _tiny_t5(folder: Path) -> Any:
    texts = ["a red fox", "the brown dog sleeps"]
    tokenizer = Tokenizer.train(texts, "char", 40)
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=tokenizer.vocab_size + 8,  # published embeddings have spare rows
        d_model=16,
        d_kv=5,
        d_ff=24,
        num_layers=2,
        num_heads=3,
        pad_token_id=tokenizer.pad_id,
        eos_token_id=tokenizer.eos_id,
        decoder_start_token_id=tokenizer.pad_id,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    return model


def test_the_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = _tiny_t5(tmp_path / "flan-t5-small")
    monkeypatch.chdir(tmp_path)
    names = run_code_blocks(PAGE)
    with torch.no_grad():
        expected = theirs(input_ids=names["src"], decoder_input_ids=names["start"]).logits
    torch.testing.assert_close(names["logits"].detach(), expected, atol=1e-4, rtol=0.0)
    heads = torch.tensor(names["sparse"].alphas()["cross"])
    torch.testing.assert_close(heads, torch.full_like(heads, 1.05))
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained("tuned")
    with torch.no_grad():
        same = again(input_ids=names["src"], decoder_input_ids=names["start"]).logits
    torch.testing.assert_close(same, expected)


def test_the_tables_name_every_family_and_every_compared_checkpoint() -> None:
    page = PAGE.read_text()
    rows = re.findall(r"^\| `?([^|`]+?)`? \|", page, flags=re.MULTILINE)
    assert set(FAMILIES) <= set(rows)
    assert set(PUBLISHED) <= set(rows)
