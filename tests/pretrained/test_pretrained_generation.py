"""Greedy and beam outputs of loaded checkpoints are transformers', as their files ask for them."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from published_models import PUBLISHED, VOCAB, publish
from torch import Tensor, nn

from sparseformer.errors import CheckpointError
from sparseformer.generation import generate
from sparseformer.pretrained import PretrainedCheckpoint, read_pretrained, read_settings

ROWS = 24
LENGTH = torch.randint(1, 13, (ROWS,), generator=torch.Generator().manual_seed(5))


class Search(NamedTuple):
    """A checkpoint and what its generation_config.json says."""

    name: str
    settings: dict[str, Any]


def _named(start: str) -> str:
    return next(name for name in PUBLISHED if name.startswith(start))


T5, T5_1_1, MT5 = _named("t5 1.0"), _named("t5 1.1"), _named("mt5")
BART, MBART, MARIAN, PEGASUS = map(_named, ("bart", "mbart, 5", "marian", "pegasus"))
PAD_0, PAD_1 = {"suppress_tokens": [0]}, {"suppress_tokens": [1]}
NEVER = {"early_stopping": "never"}
CASES = {
    "t5 greedy": Search(T5, PAD_0),
    "t5 beam": Search(T5, PAD_0 | {"num_beams": 4}),
    "t5 beam until full": Search(T5, PAD_0 | {"num_beams": 3, "early_stopping": True}),
    "t5 1.1 greedy without repeats": Search(T5_1_1, PAD_0 | {"no_repeat_ngram_size": 2}),
    "t5 1.1 beam, exact, short": Search(
        T5_1_1, PAD_0 | NEVER | {"num_beams": 5, "length_penalty": 0.3}
    ),
    "mt5 beam": Search(MT5, PAD_0 | {"num_beams": 2, "length_penalty": 1.7}),
    "bart greedy from a forced token": Search(BART, PAD_1 | {"forced_bos_token_id": 0}),
    "bart as for news": Search(
        BART,
        PAD_1
        | {
            "forced_bos_token_id": 0,
            "num_beams": 4,
            "length_penalty": 2.0,
            "early_stopping": True,
            "no_repeat_ngram_size": 3,
            "min_length": 6,
        },
    ),
    "bart beam without a forced end": Search(
        BART, PAD_1 | {"num_beams": 3, "forced_eos_token_id": None}
    ),
    "mbart into a language": Search(MBART, PAD_1 | {"forced_bos_token_id": 37, "num_beams": 5}),
    "bart greedy by new tokens": Search(BART, PAD_1 | {"max_new_tokens": 8, "min_new_tokens": 4}),
    "mbart greedy, long": Search(MBART, PAD_1 | {"min_length": 9}),
    "marian greedy": Search(MARIAN, {"bad_words_ids": [[VOCAB - 1]]}),
    "marian beam": Search(MARIAN, {"bad_words_ids": [[VOCAB - 1]], "num_beams": 6}),
    "pegasus beam": Search(PEGASUS, PAD_0 | {"num_beams": 8, "length_penalty": 0.8}),
}


def _source(pad_id: int) -> tuple[Tensor, Tensor]:
    src = torch.randint(3, 35, (ROWS, 12), generator=torch.Generator().manual_seed(4))
    is_real = torch.arange(12) < LENGTH[:, None]
    return torch.where(is_real, src, pad_id), is_real.long()


def _generate_ours(checkpoint: PretrainedCheckpoint, **changes: Any) -> list[list[int]]:
    src, _ = _source(checkpoint.pad_id)
    hypotheses = generate(
        checkpoint.build(),
        src,
        LENGTH,
        checkpoint.generation.config(),
        bos_id=checkpoint.start_id,
        eos_id=checkpoint.eos_id,
        pad_id=checkpoint.pad_id,
        max_length=1,
        constraints=dataclasses.replace(checkpoint.generation, **changes),
    )
    return [hypothesis.ids for hypothesis in hypotheses]


def _generate_theirs(model: Any, checkpoint: PretrainedCheckpoint) -> list[list[int]]:
    src, mask = _source(checkpoint.pad_id)
    rows = model.generate(input_ids=src, attention_mask=mask)[:, 1:].tolist()
    eos = checkpoint.eos_id
    ends = [row.index(eos) if eos in row else len(row) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


@torch.no_grad()
def _enliven(model: nn.Module) -> None:
    """Let outputs depend on their sources, and end at many lengths."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.mul_(0.5).add_(0.8 if name.endswith("weight") else 0.0)
        if "EncDecAttention" in name or "encoder_attn." in name:
            parameter.mul_(2.5)
    eos = model.config.eos_token_id
    model.get_output_embeddings().weight[eos] *= 1.5
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias *= 0.3
        model.final_logits_bias[:, eos] += 2.0


def _publish(search: Search, folder: Path) -> Any:
    """Save a checkpoint that says how to search; return the model of transformers."""
    theirs = publish(search.name, folder)
    _enliven(theirs)
    for key, value in ({"max_length": 14} | search.settings).items():
        setattr(theirs.generation_config, key, value)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("search", CASES.values(), ids=CASES.keys())
def test_outputs_are_those_of_transformers(tmp_path: Path, search: Search) -> None:
    theirs = _publish(search, tmp_path)
    checkpoint = read_pretrained(tmp_path)
    expected = _generate_theirs(theirs, checkpoint)
    assert len({tuple(ids) for ids in expected}) > 8, "too uniform to tell"
    assert _generate_ours(checkpoint) == expected


def test_each_way_to_stop_a_beam_search_has_its_own_outputs(tmp_path: Path) -> None:
    """What shows that the cases above tell them apart."""
    search = Search(PEGASUS, PAD_0 | {"num_beams": 2, "length_penalty": 2.0})
    theirs = _publish(search, tmp_path)
    checkpoint = read_pretrained(tmp_path)
    outputs = [_generate_ours(checkpoint, beam_stopping=s) for s in ("exact", "full", "heuristic")]
    assert all(outputs[i] != outputs[j] for i, j in [(0, 1), (0, 2), (1, 2)])
    for way, expected in zip(("never", True, False), outputs, strict=True):
        theirs.generation_config.early_stopping = way
        assert _generate_theirs(theirs, checkpoint) == expected


def test_padding_is_never_generated(tmp_path: Path) -> None:
    """transformers leaves it in, unless told; we leave it out before normalising."""
    checkpoint = read_pretrained(_saved(tmp_path, T5, {}))
    outputs = _generate_ours(checkpoint)
    assert all(checkpoint.pad_id not in ids for ids in outputs)
    assert len({len(ids) for ids in outputs}) > 2


def _saved(folder: Path, name: str, settings: dict[str, Any]) -> Path:
    _publish(Search(name, settings), folder)
    return folder


def _edit(folder: Path, name: str, **values: Any) -> None:
    content = json.loads((folder / name).read_text()) | values
    (folder / name).write_text(json.dumps(content))


def test_the_search_of_an_old_checkpoint_stands_in_its_config(tmp_path: Path) -> None:
    """Before transformers 4.26 there was no generation_config.json."""
    folder = _saved(tmp_path, BART, {})
    (folder / "generation_config.json").unlink()
    search = {"num_beams": 4, "length_penalty": 2.0, "max_length": 142, "min_length": 56}
    forced = {"forced_bos_token_id": 0, "no_repeat_ngram_size": 3, "early_stopping": True}
    _edit(folder, "config.json", **search, **forced)
    found = read_settings(folder).generation
    assert (found.forced_bos_id, found.forced_eos_id, found.min_length) == (0, 2, 56)
    assert (found.beam_stopping, found.suppressed_ids) == ("full", ())
    config = found.config()
    assert (config.strategy, config.beam_size, config.length_penalty) == ("beam", 4, 2.0)
    assert (config.max_length, config.no_repeat_ngram) == (141, 3)


def test_a_silent_generation_config_forces_no_end(tmp_path: Path) -> None:
    folder = _saved(tmp_path, BART, {"forced_eos_token_id": None})
    assert read_settings(folder).generation.forced_eos_id is None


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        (T5, {"decoder_start_token_id": None}, (0, 0, 1)),
        (BART, {"decoder_start_token_id": None}, (1, 2, 2)),
        (MBART, {"decoder_start_token_id": None, "bos_token_id": 4}, (1, 4, 2)),
        (MARIAN, {"decoder_start_token_id": None, "eos_token_id": [5]}, (39, 39, 5)),
        (PEGASUS, {"decoder_start_token_id": 7}, (0, 7, 1)),
    ],
    ids=["t5", "bart", "mbart", "marian", "pegasus"],
)
def test_control_ids(
    tmp_path: Path, name: str, values: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    folder = _saved(tmp_path, name, {})
    (folder / "generation_config.json").unlink()
    _edit(folder, "config.json", **values)
    found = read_settings(folder)
    assert (found.pad_id, found.start_id, found.eos_id) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bad_words_ids": [[3, 4]]}, "bad_words_ids is .* one token id"),
        ({"suppress_tokens": 3}, "suppress_tokens is 3"),
        ({"suppress_tokens": [-1]}, "made of token ids"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"length_penalty": "long"}, "length_penalty is 'long'"),
        ({"forced_bos_token_id": [1, 2]}, "forced_bos_token_id is .* one token id"),
        ({"decoder_start_token_id": 40}, "the start_id is 40, but vocab_size is 40"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_search_that_cannot_be_done_is_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    folder = _saved(tmp_path, BART, {})
    _edit(folder, "generation_config.json", **values)
    with pytest.raises(CheckpointError, match=message):
        read_settings(folder)


def test_a_forced_id_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    checkpoint = read_pretrained(_saved(tmp_path, BART, {}))
    with pytest.raises(ValueError, match="Token 40 is to be forced, but the model has 40 tokens"):
        _generate_ours(checkpoint, forced_bos_id=VOCAB)
