"""Each --loss is the function that it is documented to be, summed over the target tokens."""

import pytest
import torch
from torch.nn import functional as F

from sparseformer.config import LOSS_NAMES, LossName, ObjectiveConfig
from sparseformer.errors import ConfigError
from sparseformer.functional import entmax, entmax_loss, sparse_cross_entropy
from sparseformer.training.objective import TRUNCATED, Objective

HIDDEN = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(11, 8, generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([[1, 4, 10, -100, -100], [0, 3, 3, 7, 2]])
CONFIG = ObjectiveConfig(k=3, p=0.7, alpha=1.3)


def _expected(loss: LossName) -> torch.Tensor:
    logits, labels = HIDDEN @ WEIGHT.T, LABELS
    if loss == "cross_entropy":
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    if loss == "sparse_topk":
        return sparse_cross_entropy(logits, labels, k=3, reduction="sum")
    if loss == "sparse_topp":
        return sparse_cross_entropy(logits, labels, top_p=0.7, reduction="sum")
    alpha = {"sparsemax": 2.0, "entmax15": 1.5}.get(loss, 1.3)
    return entmax_loss(logits, labels, alpha, reduction="sum")


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_objective_is_the_sum_of_the_named_loss(loss: LossName) -> None:
    found = Objective(loss, CONFIG, 11)(HIDDEN, WEIGHT, LABELS)
    torch.testing.assert_close(found, _expected(loss))


@pytest.mark.parametrize("loss", LOSS_NAMES)
@pytest.mark.parametrize("step", [0, None], ids=["warm-up", "after"])
def test_a_bias_of_the_logits_is_one_more_column(loss: LossName, step: int | None) -> None:
    objective = Objective(loss, CONFIG, 11, warmup_steps=1)
    bias = torch.linspace(-2.0, 2.0, 11)
    found = objective(HIDDEN, WEIGHT, LABELS, step, bias)
    hidden = torch.cat([HIDDEN, torch.ones(2, 5, 1)], dim=-1)
    expected = objective(hidden, torch.cat([WEIGHT, bias[:, None]], dim=-1), LABELS, step)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, objective(HIDDEN, WEIGHT, LABELS, step))


@pytest.mark.parametrize("loss", sorted(TRUNCATED))
def test_warm_up_is_the_full_cross_entropy_and_ends(loss: LossName) -> None:
    objective = Objective(loss, CONFIG, 11, warmup_steps=4)
    full, truncated = _expected("cross_entropy"), _expected(loss)
    torch.testing.assert_close(objective(HIDDEN, WEIGHT, LABELS, step=3), full)
    torch.testing.assert_close(objective(HIDDEN, WEIGHT, LABELS, step=4), truncated)
    torch.testing.assert_close(objective(HIDDEN, WEIGHT, LABELS), truncated)


def test_only_truncated_losses_warm_up() -> None:
    assert Objective("sparsemax", CONFIG, 11, warmup_steps=4).warmup_steps == 0


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_log_probabilities_are_those_of_the_loss(loss: LossName) -> None:
    logits = 3 * HIDDEN @ WEIGHT.T
    log_probs = Objective(loss, CONFIG, 11).log_probabilities(logits)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 5))
    if loss == "sparsemax":
        assert torch.equal(log_probs == -torch.inf, entmax(logits, 2.0) == 0)
        assert (log_probs == -torch.inf).any()


def test_learned_alpha_of_the_loss_gets_a_gradient() -> None:
    objective = Objective("entmax_adaptive", CONFIG, 11)
    objective(HIDDEN, WEIGHT, LABELS).backward()
    (alpha,) = objective.parameters()
    assert alpha.grad is not None
    assert alpha.grad.item() < 0  # a larger alpha always lowers the loss of a class id


def test_k_larger_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"objective\.k is 12.* only 11 tokens.*11 or less"):
        Objective("sparse_topk", ObjectiveConfig(k=12), 11)
