"""The training loop and what it stands on: objective, optimiser, checkpoints, log."""
