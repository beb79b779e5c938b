"""SparseTopKLoss and swapped models in transformers' Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import VOCAB, batch, build, enable_checkpointing
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from sparseformer.functional import sparse_cross_entropy
from sparseformer.integrations.transformers import (
    SparseTopKLoss,
    alphas,
    from_pretrained,
    parameter_groups,
    use_sparse_attention,
)
from sparseformer.testing import largest_tensor

LANGUAGE_MODELS = ["t5", "t5_gated", "bart", "marian", "bert", "roberta", "modernbert", "llama"]


def _labelled(family: str) -> tuple[dict[str, Tensor], Tensor]:
    inputs = batch(family)
    labels = inputs.get("decoder_input_ids", inputs["input_ids"]).clone()
    labels[1, 4:] = -100
    labels[2, :2] = -100
    return inputs, labels


@pytest.mark.parametrize("family", [*LANGUAGE_MODELS, "gpt2", "qwen2"])
def test_every_class_kept_is_the_models_own_loss(family: str) -> None:
    """This is also what finds out whether labels are shifted: GPT-2's are, T5's are not."""
    model = build(family)
    inputs, labels = _labelled(family)
    own = model(**inputs, labels=labels).loss
    loss = SparseTopKLoss(model, k=VOCAB)
    assert loss.shifts_labels == (family in ("llama", "gpt2", "qwen2"))
    torch.testing.assert_close(loss(model(**inputs), labels), own, check_dtype=False)


@pytest.mark.parametrize("family", [*LANGUAGE_MODELS, "gpt2", "qwen2"])
def test_the_fused_loss_equals_that_of_the_logits(family: str) -> None:
    """In fp64, dropout off, gradients of every parameter included."""
    model = _without_dropout(build(family))
    inputs, labels = _labelled(family)
    expected = SparseTopKLoss(model, k=5, label_smoothing=0.1)(model(**inputs), labels)
    expected.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    fused = SparseTopKLoss(model, k=5, label_smoothing=0.1, fused=True)
    outputs = model.train()(**inputs)
    assert outputs.logits.numel() == 0
    found = fused(outputs, labels)
    found.backward()
    torch.testing.assert_close(found, expected)
    for name, parameter in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-8, atol=1e-10)


def test_the_fused_loss_holds_no_logits() -> None:
    model = _without_dropout(build("llama", torch.float32)).train()
    model.resize_token_embeddings(4000)
    loss = SparseTopKLoss(model, k=5, fused=True)
    ids = torch.randint(3, VOCAB, (8, 100), generator=torch.Generator().manual_seed(0))
    with largest_tensor() as gauge:
        outputs = model(ids)
    assert gauge.numel < ids.numel() * 4000
    assert loss(outputs, ids).isfinite()


def test_evaluation_keeps_the_logits() -> None:
    model = build("t5")
    inputs, labels = _labelled("t5")
    loss = SparseTopKLoss(model, k=5, fused=True)
    model.train()(**inputs)
    outputs = model.eval()(**inputs)
    assert outputs.logits.shape == (3, 7, VOCAB)
    kept = SparseTopKLoss(model, k=5)(outputs, labels)
    torch.testing.assert_close(loss(outputs, labels), kept)


def test_the_loss_is_divided_by_the_labels_of_the_whole_step() -> None:
    model = build("bart")
    inputs, labels = _labelled("bart")
    outputs = model(**inputs)
    loss = SparseTopKLoss(model, k=5)
    total = sparse_cross_entropy(outputs.logits, labels, k=5, reduction="sum")
    torch.testing.assert_close(loss(outputs, labels), total / int((labels != -100).sum()))
    torch.testing.assert_close(loss(outputs, labels, num_items_in_batch=40), total / 40)
    count = torch.tensor(40)
    torch.testing.assert_close(loss(outputs, labels, num_items_in_batch=count), total / 40)
    torch.testing.assert_close(loss(outputs.to_tuple(), labels), loss(outputs, labels))


def test_a_batch_without_labels_has_loss_0() -> None:
    model = build("bart")
    inputs, labels = _labelled("bart")
    loss = SparseTopKLoss(model)(model(**inputs), torch.full_like(labels, -100))
    assert float(loss.detach()) == 0.0


def test_the_nucleus_may_be_kept_in_place_of_k() -> None:
    model = build("t5")
    inputs, labels = _labelled("t5")
    outputs = model(**inputs)
    expected = sparse_cross_entropy(outputs.logits, labels, top_p=0.5)
    torch.testing.assert_close(SparseTopKLoss(model, top_p=0.5)(outputs, labels), expected)


def test_a_change_of_the_logits_after_the_head_is_refused() -> None:
    """Cohere scales its logits; a loss that doesn't know would train another model."""
    model = build("bart")
    model.final_logits_bias.fill_(3.0)
    SparseTopKLoss(model, fused=True).head.remove()  # type: ignore[union-attr]
    forward = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        outputs["logits"] = outputs["logits"] * 2
        return outputs

    model.forward = scaled
    with pytest.raises(ValueError, match="changes its logits after the output layer"):
        SparseTopKLoss(model, fused=True)
    assert model.train()(**batch("bart")).logits.numel() > 0


def test_a_model_without_a_language_head_is_refused() -> None:
    with pytest.raises(ValueError, match="no language modelling head"):
        SparseTopKLoss(build("bert").bert)


def _without_dropout(model: Any) -> Any:
    for module in model.modules():
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("family", ["t5", "bert", "gpt2"])
def test_gradient_checkpointing_changes_no_gradient(family: str) -> None:
    model = _without_dropout(build(family)).train()
    use_sparse_attention(model, init=1.3)
    inputs, labels = _labelled(family)
    loss = SparseTopKLoss(model, k=5)
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            enable_checkpointing(model)
        model.zero_grad()
        loss(model(**inputs), labels).backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert any("adaptive_alpha" in name for name in grads[0])
    for name, expected in grads[0].items():
        torch.testing.assert_close(grads[1][name], expected, rtol=1e-9, atol=1e-9)


def _rows(count: int, family: str) -> list[dict[str, Any]]:
    """Return a copy task: labels are the input, padded with -100."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in torch.randint(4, 9, (count,), generator=generator).tolist():
        ids = torch.randint(3, 9, (length,), generator=generator)
        padded = F.pad(ids, (0, 8 - length))
        row = {
            "input_ids": padded,
            "attention_mask": (torch.arange(8) < length).long(),
            "labels": F.pad(ids, (0, 8 - length), value=-100),
        }
        if family == "t5":
            row["decoder_input_ids"] = F.pad(padded[:-1], (1, 0))
        rows.append(row)
    return rows


def _arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 20,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "logging_steps": 5,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 1,
    }


def _losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("fused", [False, True])
def test_trainer_learns_and_saves_what_loads_again(fused: bool, tmp_path: Path) -> None:
    model = build("gpt2", torch.float32)
    use_sparse_attention(model, init=1.05)
    enable_checkpointing(model)
    groups = parameter_groups(model, lr=3e-3, alpha_lr=3e-2, weight_decay=0.1)
    trainer = Trainer(
        model,
        TrainingArguments(**_arguments(tmp_path)),
        train_dataset=_rows(64, "gpt2"),
        compute_loss_func=SparseTopKLoss(model, k=8, fused=fused),
        optimizers=(torch.optim.AdamW(groups), None),
    )
    trainer.train()
    losses = _losses(trainer)
    assert losses[-1] < 0.8 * losses[0]
    learned = alphas(model)
    assert any(abs(alpha - 1.05) > 1e-3 for heads in learned.values() for alpha in heads)
    trainer.save_model(str(tmp_path / "final"))
    assert alphas(from_pretrained(str(tmp_path / "final"))) == learned


def test_seq2seq_trainer_learns_and_generates(tmp_path: Path) -> None:
    model = build("t5", torch.float32)
    use_sparse_attention(model, init=1.05)
    rows = _rows(64, "t5")
    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            **_arguments(tmp_path),
            learning_rate=3e-3,
            predict_with_generate=True,
            generation_max_length=8,
            save_steps=20,
        ),
        train_dataset=rows,
        eval_dataset=rows[:4],
        compute_loss_func=SparseTopKLoss(model, k=8, fused=True),
        compute_metrics=lambda predictions: {"rows": float(len(predictions.predictions))},
    )
    trainer.train()
    losses = _losses(trainer)
    assert losses[-1] < 0.8 * losses[0]
    metrics = trainer.evaluate()
    assert metrics["eval_rows"] == 4.0
    assert 0.0 < metrics["eval_loss"] < losses[0]
    assert alphas(from_pretrained(str(tmp_path / "checkpoint-20"))) == alphas(model)


def test_the_fused_trainer_takes_the_same_steps(tmp_path: Path) -> None:
    """Losses of accumulated batches, so the division by the labels of the whole step, too."""
    losses = []
    for fused in (False, True):
        model = _without_dropout(build("t5", torch.float64))
        trainer = Trainer(
            model,
            TrainingArguments(**_arguments(tmp_path), learning_rate=1e-3),
            train_dataset=_rows(64, "t5"),
            compute_loss_func=SparseTopKLoss(model, k=8, fused=fused),
        )
        trainer.train()
        losses.append(_losses(trainer))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
