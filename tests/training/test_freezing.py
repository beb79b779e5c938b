"""Which parameters a name freezes, and the schedule of a fixed alpha."""

import pytest

from sparseformer.config import Config, ModelConfig, ObjectiveConfig, OptimConfig, TrainConfig
from sparseformer.errors import ConfigError
from sparseformer.nn import Seq2SeqTransformer
from sparseformer.training.alpha_ramp import scheduled_alpha, set_alpha_of_step
from sparseformer.training.freezing import freeze
from sparseformer.training.module import TrainingModule
from sparseformer.training.objective import Objective


def _module(attn: str = "entmax_adaptive", loss: str = "cross_entropy") -> TrainingModule:
    config = ModelConfig(d_model=8, num_heads=2, ffn_dim=8, encoder_layers=1, decoder_layers=2)
    model = Seq2SeqTransformer(config, 20, attn=attn)  # type: ignore[arg-type]
    return TrainingModule(model, Objective(loss, ObjectiveConfig(), 20))  # type: ignore[arg-type]


def _trained(module: TrainingModule) -> set[str]:
    return {name for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("names", "frozen"),
    [
        (["encoder"], "model.encoder."),
        (["embedding"], "model.embedding."),
        (["decoder.blocks.1"], "model.decoder.blocks.1."),
        (["decoder.blocks.0.self_attention.in_proj.weight"],
         "model.decoder.blocks.0.self_attention.in_proj.weight"),
    ],
    ids=["encoder", "embedding", "block", "parameter"],
)  # fmt: skip
def test_a_name_freezes_what_starts_with_it(names: list[str], frozen: str) -> None:
    module = _module()
    everything = _trained(module)
    left = freeze(module, names)
    assert _trained(module) == {name for name in everything if not name.startswith(frozen)}
    assert left == sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_all_but_alpha_leaves_the_alphas_of_attention_and_loss() -> None:
    module = _module(loss="entmax_adaptive")
    freeze(module, ["all_but_alpha"])
    names = _trained(module)
    assert all("alpha" in name for name in names)
    assert len(names) == 1 + 2 * 2 + 1


@pytest.mark.parametrize("name", ["encode", "blocks", "", "decoder.blocks.2"])
def test_a_name_that_fits_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"decoder.*embedding.*encoder.*all_but_alpha"):
        freeze(_module(), [name])


def test_nothing_left_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        freeze(_module("softmax"), ["all_but_alpha"])


def _ramp(**optim: object) -> Config:
    return Config(
        attn="entmax",
        model=ModelConfig(alpha=1.1),
        optim=OptimConfig(**optim),  # type: ignore[arg-type]
        train=TrainConfig(steps=40),
    )


@pytest.mark.parametrize(
    ("step", "alpha"), [(0, 1.1), (5, 1.2), (20, 1.5), (40, 1.5)], ids=["0", "5", "20", "40"]
)
def test_alpha_moves_in_a_straight_line_over_half_of_the_run(step: int, alpha: float) -> None:
    assert scheduled_alpha(_ramp(alpha_end=1.5), step) == pytest.approx(alpha)


def test_ramp_steps_are_those_that_are_set_and_no_end_means_no_schedule() -> None:
    assert scheduled_alpha(_ramp(alpha_end=1.5, alpha_ramp_steps=4), 1) == pytest.approx(1.2)
    assert scheduled_alpha(_ramp(), 10) is None


def test_schedule_moves_entmax_heads_only() -> None:
    config = ModelConfig(d_model=8, num_heads=2, ffn_dim=8, cross_attn="entmax15")
    model = Seq2SeqTransformer(config, 20, attn="entmax")
    set_alpha_of_step(model, _ramp(alpha_end=1.5), 20)
    alphas = model.alphas()
    assert alphas["encoder_self"] == alphas["decoder_self"] == [[1.5, 1.5]] * 2
    assert alphas["cross"] == [[1.5, 1.5]] * 2
    set_alpha_of_step(model, _ramp(alpha_end=1.5), 0)
    assert model.alphas()["encoder_self"] == [[1.1, 1.1]] * 2
    assert model.alphas()["cross"] == [[1.5, 1.5]] * 2
