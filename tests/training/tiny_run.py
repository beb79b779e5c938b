"""A tiny training run with checkpoints, imported by tests and started by them to be killed."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from sparseformer.training.checkpoint import (
    load_latest_checkpoint,
    prune_checkpoints,
    restore,
    save_checkpoint,
)

VOCAB_SIZE = 64


class TinyModel(nn.Module):
    """Predict the next token from one token; the output matrix may be the embedding."""

    def __init__(self, *, is_tied: bool = True, vocab_size: int = VOCAB_SIZE) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.inner = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, vocab_size, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.dropout(self.inner(self.embed(tokens)).relu()))
        return self.head(hidden)


def build(
    *, seed: int = 0, lr: float = 1e-2, **options: object
) -> tuple[TinyModel, torch.optim.AdamW]:
    """Return a model and its optimiser with two groups, matrices and the rest."""
    torch.manual_seed(seed)
    model = TinyModel(**options)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": matrices}]
    return model, torch.optim.AdamW(groups, lr=lr, fused=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Take one step whose data and dropout are a function of the step."""
    torch.manual_seed(step)
    tokens = torch.randint(VOCAB_SIZE, (2, 8))
    loss = nn.functional.cross_entropy(model(tokens[0]), tokens[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def run(
    run_dir: Path, steps: int, save_every: int = 2, best_step: int = 2
) -> tuple[list[str], dict]:
    """Train to a step, resuming where a checkpoint is; return losses in hex and the weights."""
    torch.set_num_threads(1)
    model, optimizer = build()
    losses: list[str] = []
    checkpoint = load_latest_checkpoint(run_dir)
    if checkpoint is not None:
        restore(checkpoint, model, optimizer)
        losses = checkpoint.state["losses"]
    for step in range(len(losses), steps):
        losses.append(train_step(model, optimizer, step).hex())
        if (step + 1) % save_every == 0:
            save_checkpoint(run_dir, step + 1, model, optimizer, {"losses": losses})
            prune_checkpoints(run_dir, keep=1, best_step=best_step)
    return losses, model.state_dict()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
