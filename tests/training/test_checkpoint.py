"""What is saved comes back exactly, and what doesn't fit is refused by name."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import TinyModel, build, run, train_step
from torch import nn

from sparseformer.config import Config, OptimConfig
from sparseformer.errors import CheckpointError, NumericError
from sparseformer.training.checkpoint import (
    Best,
    differences,
    find_weights,
    load_latest_checkpoint,
    load_model_weights,
    prune_checkpoints,
    read_best,
    read_checkpoint,
    restore,
    save_checkpoint,
    write_best,
)
from sparseformer.training.manifest import write_manifest


def saved(run_dir: Path, step: int = 3, **options: object) -> tuple[TinyModel, torch.optim.AdamW]:
    """Train a few steps and save."""
    model, optimizer = build(**options)
    for number in range(step):
        train_step(model, optimizer, number)
    save_checkpoint(run_dir, step, model, optimizer, {"epoch": 1})
    return model, optimizer


def steps_of(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def rewrite(folder: Path, name: str, tensors: dict[str, torch.Tensor], step: int = 3) -> None:
    """Replace a tensor file, and make the manifest agree."""
    tied = {"head.weight": "embed.weight"} if name == "model.safetensors" else {}
    save_file(tensors, folder / name, metadata={"tied": json.dumps(tied)})
    write_manifest(folder, step, 1)


def test_a_folder_holds_four_files_and_no_leftovers(tmp_path: Path) -> None:
    saved(tmp_path)
    folder = tmp_path / "checkpoints/step-0000003"
    assert steps_of(tmp_path) == ["step-0000003"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "MANIFEST.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert (manifest["format_version"], manifest["step"], manifest["world_size"]) == (1, 3, 1)
    assert manifest["files"]["model.safetensors"]["size"] == (
        (folder / "model.safetensors").stat().st_size
    )


@pytest.mark.parametrize("stop", [7, 8, 1], ids=["between saves", "at a save", "before the first"])
def test_interrupted_training_is_bitwise_equal(tmp_path: Path, stop: int) -> None:
    whole_losses, whole_weights = run(tmp_path / "whole", 12)
    run(tmp_path / "stopped", stop)
    losses, weights = run(tmp_path / "stopped", 12)
    assert losses == whole_losses
    assert all(torch.equal(weights[name], whole_weights[name]) for name in whole_weights)


def test_optimizer_state_is_keyed_by_name(tmp_path: Path) -> None:
    """A changed order of groups gave moments to the wrong parameters where indices were the key."""
    model, optimizer = saved(tmp_path)
    checkpoint = load_latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.state == {"epoch": 1}
    other, _ = build(seed=9)
    reordered = torch.optim.AdamW(reversed(list(other.parameters())), lr=0.5)
    restore(checkpoint, other, reordered)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[ours][key], reordered.state[theirs][key])


def test_restored_optimizer_keeps_its_own_hyperparameters(tmp_path: Path) -> None:
    """A new --lr did nothing on resuming, because the file's groups won."""
    saved(tmp_path, lr=1e-2)
    checkpoint = load_latest_checkpoint(tmp_path)
    model, optimizer = build(lr=5e-4)
    assert checkpoint is not None
    restore(checkpoint, model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 5e-4]
    train_step(model, optimizer, 3)


def test_a_parameter_without_gradients_needs_no_state(tmp_path: Path) -> None:
    model, optimizer = build(is_tied=False)
    model.head.weight.requires_grad_(False)
    train_step(model, optimizer, 0)
    path = save_checkpoint(tmp_path, 1, model, optimizer, {})
    names = load_file(path / "optimizer.safetensors")
    assert "embed.weight:exp_avg" in names
    assert not any(name.startswith("head.") for name in names)
    restore(read_checkpoint(path), model, optimizer)
    assert model.head.weight not in optimizer.state


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_ties_stay_as_they_are(tmp_path: Path, is_tied: bool) -> None:
    """Tied embeddings were refused, stored twice, or untied by loading."""
    saved(tmp_path, is_tied=is_tied)
    stored = load_file(tmp_path / "checkpoints/step-0000003/model.safetensors")
    assert ("head.weight" in stored) is not is_tied
    model, optimizer = build(is_tied=is_tied)
    checkpoint = load_latest_checkpoint(tmp_path)
    assert checkpoint is not None
    restore(checkpoint, model, optimizer)
    assert (model.embed.weight.data_ptr() == model.head.weight.data_ptr()) is is_tied


def test_overlapping_and_empty_buffers_come_back(tmp_path: Path) -> None:
    def with_views(start: float) -> tuple[nn.Module, torch.optim.AdamW]:
        model = nn.Linear(2, 2)
        whole = torch.arange(8.0) + start
        model.register_buffer("left", whole[:6])
        model.register_buffer("right", whole[2:])
        model.register_buffer("none", torch.empty(0))
        model.register_buffer("nothing", torch.empty(0))
        return model, torch.optim.AdamW(model.parameters())

    path = save_checkpoint(tmp_path, 1, *with_views(0.0), {})
    model, optimizer = with_views(100.0)
    restore(read_checkpoint(path), model, optimizer)
    assert model.left.tolist() == [0, 1, 2, 3, 4, 5]
    assert model.right.tolist() == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("was_tied", [True, False], ids=["was tied", "was untied"])
def test_another_tie_is_refused(tmp_path: Path, was_tied: bool) -> None:
    saved(tmp_path, is_tied=was_tied)
    model, optimizer = build(is_tied=not was_tied)
    checkpoint = load_latest_checkpoint(tmp_path)
    assert checkpoint is not None
    with pytest.raises(CheckpointError, match="tie_embeddings"):
        restore(checkpoint, model, optimizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: setattr(m, "extra", nn.Linear(2, 2)),
            r"it is missing extra\.weight, extra\.bias",
        ),
        (lambda m: delattr(m, "norm"), r"it holds unexpectedly norm\.\w+, norm\.\w+"),
        (lambda m: setattr(m, "inner", nn.Linear(16, 8)), r"inner\.weight \(\[16, 16\] float32 in"),
        (lambda m: m.norm.double(), r"norm\.weight \(\[16\] float32 in .* \[16\] float64 in"),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change, message: str) -> None:
    saved(tmp_path)
    checkpoint = load_latest_checkpoint(tmp_path)
    model, _ = build(seed=9)
    change(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert checkpoint is not None
    with pytest.raises(CheckpointError, match=message):
        restore(checkpoint, model, torch.optim.AdamW(model.parameters()))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_frozen_parameter_is_named_by_the_optimizer(tmp_path: Path) -> None:
    saved(tmp_path)
    checkpoint = load_latest_checkpoint(tmp_path)
    model, _ = build(seed=9)
    before = model.inner.weight.clone()
    assert checkpoint is not None
    with pytest.raises(CheckpointError, match=r"optimiser: it holds unexpectedly inner\.bias"):
        restore(
            checkpoint,
            model,
            torch.optim.AdamW([p for p in model.parameters() if p is not model.inner.bias]),
        )
    assert torch.equal(model.inner.weight, before)


def test_an_embedding_is_never_shrunk(tmp_path: Path) -> None:
    """A padded embedding of 104 rows was cut to the tokenizer's 100 while loading."""
    model, _ = saved(tmp_path, vocab_size=104)
    with pytest.raises(CheckpointError, match=r"\[104, 16\] float32 in the file, \[100, 16\]"):
        load_model_weights(tmp_path, TinyModel(vocab_size=100))
    same = TinyModel(vocab_size=104)
    load_model_weights(tmp_path, same)
    assert torch.equal(same.embed.weight, model.embed.weight)


@pytest.mark.parametrize(
    ("file", "name"),
    [("model.safetensors", "inner.weight"), ("optimizer.safetensors", "norm.bias:exp_avg")],
    ids=["weight", "moment"],
)
def test_a_saved_nan_is_refused_by_name(tmp_path: Path, file: str, name: str) -> None:
    model, optimizer = saved(tmp_path)
    folder = tmp_path / "checkpoints/step-0000003"
    tensors = {key: value.clone() for key, value in load_file(folder / file).items()}
    tensors[name].view(-1)[3] = math.nan
    rewrite(folder, file, tensors)
    with pytest.raises(CheckpointError, match=f"{name} isn't finite"):
        restore(read_checkpoint(folder), model, optimizer)


def test_a_nan_is_not_saved_over_good_checkpoints(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path)
    with torch.no_grad():
        model.norm.weight[2] = math.inf
    with pytest.raises(NumericError, match=r"norm\.weight isn't finite at step 4"):
        save_checkpoint(tmp_path, 4, model, optimizer, {})
    assert steps_of(tmp_path) == ["step-0000003"]


def test_a_parameter_outside_the_model_is_refused(tmp_path: Path) -> None:
    model, _ = build()
    optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(7))])
    with pytest.raises(ValueError, match=r"shape \[7\] that isn't in the model"):
        save_checkpoint(tmp_path, 1, model, optimizer, {})


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path)
    save_checkpoint(tmp_path, 3, model, optimizer, {"epoch": 2})
    checkpoint = load_latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.state == {"epoch": 2}
    assert steps_of(tmp_path) == ["step-0000003"]


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    model, optimizer = build()
    for step in (1, 2, 3, 4, 10_000_000):
        save_checkpoint(tmp_path, step, model, optimizer, {})
    (tmp_path / "checkpoints/corrupt-step-0000001").mkdir()
    prune_checkpoints(tmp_path, keep=2, best_step=2)
    names = ["corrupt-step-0000001", "step-0000002", "step-0000004", "step-10000000"]
    assert steps_of(tmp_path) == names


def test_pruning_keeps_what_best_json_still_names(tmp_path: Path) -> None:
    """A run killed between its save and its new best.json had no best checkpoint any more."""
    model, optimizer = build()
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, model, optimizer, {})
    write_best(tmp_path, 1, "loss", 0.5)
    prune_checkpoints(tmp_path, keep=1, best_step=3)
    assert steps_of(tmp_path) == ["step-0000001", "step-0000003"]


def test_weights_come_from_the_best_step_or_the_newest(tmp_path: Path) -> None:
    saved(tmp_path, step=2)
    saved(tmp_path, step=3)
    newest = tmp_path / "checkpoints/step-0000003"
    assert find_weights(tmp_path) == newest
    write_best(tmp_path, 2, "loss", 0.5)
    assert find_weights(tmp_path).name == "step-0000002"
    assert find_weights(newest) == newest
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        find_weights(tmp_path / "elsewhere")


def test_weights_of_a_part_are_found_behind_their_prefix(tmp_path: Path) -> None:
    model, _ = build()
    whole = nn.ModuleDict({"model": model, "objective": nn.Linear(3, 3)})
    save_checkpoint(tmp_path, 1, whole, torch.optim.AdamW(whole.parameters()), {})
    part, _ = build(seed=9)
    load_model_weights(tmp_path, part, prefix="model.")
    assert torch.equal(part.inner.weight, model.inner.weight)
    with pytest.raises(CheckpointError, match=r"is missing embed\.weight"):
        load_model_weights(tmp_path, part)


def test_optional_weights_may_be_on_either_side_only(tmp_path: Path) -> None:
    model, _ = saved(tmp_path)
    other, _ = build(seed=9)
    other.extra = other.norm
    del other.norm
    kept = other.extra.weight.clone()
    load_model_weights(tmp_path, other, optional=lambda name: name.startswith(("extra", "norm")))
    assert torch.equal(other.extra.weight, kept)
    assert torch.equal(other.inner.weight, model.inner.weight)


def test_untied_models_take_tied_weights_twice(tmp_path: Path) -> None:
    model, _ = saved(tmp_path)
    other, _ = build(seed=9, is_tied=False)
    load_model_weights(tmp_path, other)
    assert torch.equal(other.head.weight, model.embed.weight)
    assert other.head.weight.data_ptr() != other.embed.weight.data_ptr()


@pytest.mark.parametrize("value", [0.25, math.nan, -math.inf], ids=["finite", "nan", "-inf"])
def test_best_comes_back(tmp_path: Path, value: float) -> None:
    assert read_best(tmp_path) is None
    write_best(tmp_path, 500, "loss", value)
    json.loads((tmp_path / "best.json").read_text(), parse_constant=pytest.fail)
    best = read_best(tmp_path)
    assert best is not None
    assert repr(best) == repr(Best(500, "loss", value))


def test_a_damaged_best_is_refused(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text('{"step": 5')
    with pytest.raises(CheckpointError, match=r"best\.json is damaged"):
        read_best(tmp_path)


def test_differences_name_each_changed_setting() -> None:
    """A resumed run ignored new settings without a word."""
    saved = Config(optim=OptimConfig(lr=0.002))
    old = json.loads(json.dumps(asdict(saved)))
    new = replace(saved, seed=2, metrics=("per", "exact_match"), optim=OptimConfig(lr=0.001))
    assert differences(old, saved) == []
    assert differences(old, new) == [
        "seed: 1 in the checkpoint, 2 now",
        "metrics: ['exact_match', 'per', 'chrf'] in the checkpoint, ['per', 'exact_match'] now",
        "optim.lr: 0.002 in the checkpoint, 0.001 now",
    ]
    del old["optim"]["eps"]
    assert differences(old, Config()) == ["optim.eps: absent in the checkpoint, 1e-08 now"]
