"""Fine-tuning of published checkpoints: what it starts from, what it keeps, and its export."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import SPARSE, WORDS, Start, save_mbart, write_pairs
from safetensors.torch import load_file

from sparseformer.cli import main
from sparseformer.data import Pair, collate
from sparseformer.generation import generate
from sparseformer.pretrained import load_pretrained, read_pretrained
from sparseformer.training.framing import encode_split
from sparseformer.training.load_run import load_run


def _json(path: Path) -> dict:  # type: ignore[type-arg]
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_training_lowers_the_loss_and_moves_alphas_from_their_start(tuned: Start) -> None:
    lines = (tuned.runs / "run/metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "grad_norm" in line]
    assert losses[-1] < losses[0] - 0.2
    alpha = _json(tuned.runs / "run/results.json")["alpha"]
    heads = [value for layers in alpha.values() for layer in layers for value in layer]
    assert len(heads) == 9
    assert all(1.0 < value < 1.15 for value in heads)
    assert 1.05 not in heads


def test_run_folder_needs_the_checkpoint_no_more(
    tuned: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs/run"
    shutil.copytree(tuned.runs / "run", run)
    config = (run / "config.toml").read_text().replace(str(tuned.checkpoint), "./gone")
    (run / "config.toml").write_text(config)
    loss = _json(run / "results.json")["test"]["loss"]
    for verb in (["evaluate"], ["generate"], ["inspect"]):
        assert main([*verb, str(run), *(["1 w1 w3"] if verb == ["generate"] else [])]) == 0
    printed = capsys.readouterr().out
    assert f"{loss:.4f}" in printed
    more = tuned.arguments("run", *SPARSE, "--train.steps", "25", "--runs-dir", str(run.parent))
    more[more.index("--init-from") + 1] = "./gone"
    assert main(more) == 0
    assert "resumed at step 20 of 25" in capsys.readouterr().out
    assert _json(run / "results.json")["train"]["steps"] == 25


def test_resumed_run_equals_one_in_one_go(tuned: Start, tmp_path: Path) -> None:
    run = tmp_path / "runs/run"
    shutil.copytree(tuned.runs / "run", run)
    for step in ("0000020", "0000015"):
        shutil.rmtree(run / f"checkpoints/step-{step}", ignore_errors=True)
    if not list((run / "checkpoints").iterdir()):
        pytest.fail("the run kept no checkpoint before step 20")
    (run / "results.json").unlink()
    assert main(tuned.arguments("run", *SPARSE, "--runs-dir", str(run.parent))) == 0
    files = [r / "checkpoints/step-0000020/model.safetensors" for r in (run, tuned.runs / "run")]
    first, second = map(load_file, files)
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_outputs_start_as_forced_and_hold_no_control_tokens_or_padded_rows(
    tuned: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids: list[list[int]] = []

    def spy(*arguments: Any, **options: Any) -> list[Any]:
        hypotheses = generate(*arguments, **options)
        ids.extend(hypothesis.ids for hypothesis in hypotheses)
        return hypotheses

    monkeypatch.setattr("sparseformer.training.evaluation.generate", spy)
    hot = ["--generation.strategy", "sample", "--generation.temperature", "9"]
    capsys.readouterr()
    assert main(["generate", str(tuned.runs / "run"), *["1 w1 w3"] * 40, *hot]) == 0
    words = set(capsys.readouterr().out.split())
    assert words
    assert words <= {*WORDS, "0", "1", "2", "3"}
    vocab_size = load_run(tuned.runs / "run").tokenizer.vocab_size
    assert max(token for row in ids for token in row) < vocab_size
    first = {"t5": None, "bart": 0, "mbart": 29}[tuned.family]
    assert first is None or {tuple(row[:1]) for row in ids} == {(first,)}


def test_export_of_sparse_heads_is_read_back_with_its_alphas(tuned: Start, tmp_path: Path) -> None:
    assert main(["export", str(tuned.runs / "run"), "--to", str(tmp_path / "out")]) == 0
    model, _ = load_pretrained(tmp_path / "out")
    assert model.alphas() == load_run(tuned.runs / "run").module.model.alphas()


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_export_of_softmax_gives_transformers_the_same_logits(
    family: str, start: Callable[[str], Start], tmp_path: Path
) -> None:
    from transformers import AutoModelForSeq2SeqLM

    tuned = start(family)
    assert main(tuned.arguments("soft", "--attn", "softmax", "--train.steps", "5")) == 0
    assert main(["export", str(tuned.runs / "soft"), "--to", str(tmp_path / "out")]) == 0
    ours = load_run(tuned.runs / "soft").module.model
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    src, tgt = torch.tensor([[5, 9, 7, 2]]), torch.tensor([[2, 6, 8]])
    with torch.no_grad():
        mine = ours.logits(ours(src, torch.tensor([4]), tgt))
        logits = theirs(input_ids=src, decoder_input_ids=tgt).logits
    torch.testing.assert_close(mine, logits, rtol=0, atol=1e-4)
    assert not torch.equal(
        theirs.get_input_embeddings().weight,
        AutoModelForSeq2SeqLM.from_pretrained(tuned.checkpoint).get_input_embeddings().weight,
    )


def test_first_loss_is_that_of_transformers_on_the_same_ids(
    start: Callable[[str], Start], tmp_path: Path
) -> None:
    """A wrong frame, start token, bias of the logits or scale of the scores all show here."""
    from transformers import AutoModelForSeq2SeqLM

    for family, before, after in (("t5", [], 1), ("bart", [0], 2)):
        tuned = start(family)
        flags = ["--train.steps", "1", "--optim.lr", "0", "--runs-dir", str(tmp_path / family)]
        assert main(tuned.arguments("still", "--attn", "softmax", *flags)) == 0
        run = load_run(tmp_path / family / "still")
        rows = (tmp_path / family / "still/predictions.jsonl").read_text().splitlines()
        theirs = AutoModelForSeq2SeqLM.from_pretrained(tuned.checkpoint).eval()
        total, count = 0.0, 0
        for row in map(json.loads, rows):
            src, tgt = ([*before, *run.tokenizer.encode(row[k]), after] for k in ("src", "tgt"))
            labels = torch.tensor([tgt])
            with torch.no_grad():
                loss = theirs(input_ids=torch.tensor([src]), labels=labels).loss
            total, count = total + loss.item() * len(tgt), count + len(tgt)
        found = _json(tmp_path / family / "still/results.json")["test"]["loss"]
        assert found == pytest.approx(total / count, abs=1e-4)


@pytest.mark.parametrize(
    ("start_id", "src", "first", "forced"),
    [(2, [28, 4, 2], [2, 29], 29), (29, [4, 2, 28], [29, 4], None)],
    ids=["mbart-50", "mbart-en-ro"],
)
def test_languages_stand_where_each_mbart_expects_them(
    start_id: int, src: list[int], first: list[int], forced: int | None, tmp_path: Path
) -> None:
    tuned = Start.__new__(Start)
    tuned.family, tuned.runs = "mbart", tmp_path / "runs"
    tuned.checkpoint = save_mbart(tmp_path / "mbart", start_id=start_id)
    tuned.pairs = write_pairs(tmp_path / "pairs.jsonl")
    assert main(tuned.arguments("run", "--train.steps", "1")) == 0
    run = load_run(tuned.runs / "run")
    framing = run.module.framing
    encoded = encode_split([Pair("w0", "w0")], run.tokenizer, run.config.data, framing)
    assert encoded.src == [src]
    batch = collate(encoded, [0], run.tokenizer)
    assert batch.decoder_input[0, :2].tolist() == first
    assert framing.constraints.forced_bos_id == forced


@pytest.mark.parametrize(
    ("names", "still"),
    [
        (["encoder"], {"encoder."}),
        (["embedding", "decoder.blocks.0"], {"embedding.", "decoder.blocks.0."}),
        (["all_but_alpha"], {"embedding.", "encoder.", "decoder.", "output."}),
    ],
    ids=["encoder", "two-parts", "all-but-alpha"],
)
def test_frozen_parts_keep_their_weights_and_others_move(
    names: list[str], still: set[str], start: Callable[[str], Start], tmp_path: Path
) -> None:
    tuned = start("t5")
    flags = ["--train.steps", "5", "--runs-dir", str(tmp_path), "--train.freeze", *names]
    assert main(tuned.arguments("frozen", *SPARSE, *flags)) == 0
    before = read_pretrained(tuned.checkpoint).weights
    after = load_run(tmp_path / "frozen").module.model.state_dict()
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    frozen = {name for name in before if any(name.startswith(part) for part in still)}
    assert same == frozen
    alphas = [value for name, value in after.items() if ".adaptive_alpha." in name]
    start_logit = torch.tensor(0.05 / 0.95).log()
    moved = [not torch.allclose(logits, start_logit) for logits in alphas]
    assert sum(moved) == {"encoder": 2, "embedding": 1, "all_but_alpha": 3}[names[0]]


def test_ramp_of_alpha_follows_the_steps_and_its_checkpoint(
    start: Callable[[str], Start], tmp_path: Path
) -> None:
    tuned = start("t5")
    flags = ["--attn", "entmax", "--model.alpha", "1.1", "--optim.alpha-end", "1.5"]
    flags += ["--optim.alpha-ramp-steps", "10", "--train.save-every", "4", "--train.log-every", "4"]
    flags += ["--train.keep-checkpoints", "9", "--runs-dir", str(tmp_path)]
    # Only alpha moves, and the loss with it: the best step isn't the last one.
    flags += ["--optim.lr", "0", "--train.eval-every", "4"]
    assert main(tuned.arguments("ramp", *flags)) == 0
    run = tmp_path / "ramp"
    best = _json(run / "best.json")["step"]
    assert best < 10
    expected = 1.1 + 0.4 * min(1.0, best / 10)
    assert load_run(run).module.model.alphas()["cross"][0][0] == pytest.approx(expected)
    assert _json(run / "results.json")["alpha"]["cross"][0][0] == pytest.approx(expected)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    logged = {x["step"]: x["alpha"]["cross"][0][0] for x in lines if "grad_norm" in x}
    assert logged[4] == pytest.approx(1.1 + 0.4 * 3 / 10)
    assert logged[16] == pytest.approx(1.5)


def test_fine_tuning_a_fine_tuned_run_goes_on_from_its_weights(
    tuned: Start, tmp_path: Path
) -> None:
    flags = ["--train.steps", "1", "--optim.lr", "0", "--optim.alpha-lr", "0"]
    again = tuned.arguments("again", *SPARSE, *flags, "--runs-dir", str(tmp_path))
    again[again.index("--init-from") + 1] = str(tuned.runs / "run")
    assert main(again) == 0
    losses = [
        _json(r / "results.json")["test"]["loss"] for r in (tuned.runs / "run", tmp_path / "again")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
