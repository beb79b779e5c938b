"""The losses over a vocabulary cut between two processes equal those of one process."""

import subprocess
import sys
from pathlib import Path

import parallel_worker
import pytest
import torch
from parallel_worker import CASES, CUTS, evaluate, operands
from torch import Tensor

from sparseformer.functional import linear_entmax_loss, linear_sparse_cross_entropy

Results = list[dict[str, list[Tensor]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Run every case in two processes and return what each of them found."""
    folder = tmp_path_factory.mktemp("parallel")
    command = [sys.executable, parallel_worker.__file__]
    workers = [
        subprocess.Popen([*command, str(rank), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=300)
        assert worker.returncode == 0, errors
    return [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(2)]


def single(name: str) -> list[Tensor]:
    """Return loss and gradients of the whole matrix in one process."""
    _, options, change = CASES[name]
    *leaves, target = operands(change)
    loss = linear_sparse_cross_entropy if "k" in options else linear_entmax_loss
    return evaluate(loss, tuple(leaves), target, options)


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("nan")])
def test_two_processes_give_the_loss_and_gradients_of_one(results: Results, name: str) -> None:
    cut, options, _ = CASES[name]
    loss, hidden, weight, bias, *alpha = single(name)
    borders = [0, CUTS[cut][0], sum(CUTS[cut])]
    for rank in range(2):
        own = slice(borders[rank], borders[rank + 1])
        expected = [loss, hidden, weight[own], bias[own], *alpha]
        torch.testing.assert_close(results[rank][name], expected, rtol=1e-9, atol=1e-9)
    if "ignored" in name:
        assert not loss.any()
    else:
        assert hidden.abs().max() > 1e-3
    assert len(alpha) == isinstance(options.get("alpha"), Tensor)


@pytest.mark.parametrize("name", ["top-k-nan", "entmax-nan"])
def test_a_nan_in_one_process_makes_the_loss_nan_in_all(results: Results, name: str) -> None:
    """An error in one process alone would leave the others waiting for it."""
    for found in results:
        losses = found[name][0]
        assert losses[[0, 1, 2, 3, 5, 6]].isnan().all()
        assert losses[4] == 0


def test_ties_across_processes_are_ties() -> None:
    """The case is one: logits are equal in pairs, one of each pair in either slice."""
    hidden, weight, bias, _ = operands("ties")
    logits = hidden @ weight.T + bias
    assert torch.equal(logits[:, :9], logits[:, 9:18])
    assert CUTS[CASES["top-k-ties"][0]][0] == 9
    assert (logits[2] == logits[2, 0]).all()
