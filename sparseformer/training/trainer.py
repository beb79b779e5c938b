"""Train one run from its configuration to its report; read from top to bottom."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from sparseformer.config import LOWER_IS_BETTER, Config
from sparseformer.data import Batch
from sparseformer.errors import NumericError
from sparseformer.nn import record_attention
from sparseformer.pretrained import PretrainedSettings
from sparseformer.training.alpha_ramp import set_alpha_of_step
from sparseformer.training.checkpoint import (
    JSON,
    Checkpoint,
    load_latest_checkpoint,
    prune_checkpoints,
    restore,
    save_checkpoint,
    write_best,
)
from sparseformer.training.evaluation import derive_seed, evaluate
from sparseformer.training.finish import finish, has_results, print_report
from sparseformer.training.freezing import freeze
from sparseformer.training.log import TrainLog, peak_memory_mib
from sparseformer.training.module import (
    TrainingModule,
    autocast,
    build_module,
    choose_device,
    to_device,
)
from sparseformer.training.optim import (
    build_optimizer,
    clip_gradients,
    learning_rate_factor,
    set_learning_rates,
)
from sparseformer.training.origin import find_origin, initialize
from sparseformer.training.setup import (
    Workspace,
    load_workspace,
    open_run_folder,
    settings_of_finished_run,
    write_settings,
)
from sparseformer.training.signals import Signals, StopRequested, catch_signals
from sparseformer.training.stream import BatchStream


def train(config: Config, console: Console) -> int:
    """Train, evaluate and report one run; resume it where its newest checkpoint stands.

    Args:
        config: the resolved settings.
        console: where progress and the report are printed.

    Returns:
        0, or the exit code of the signal that ended the run early.

    Raises:
        SparseformerError: what a user can mend, in one sentence.
    """
    device = choose_device(config)
    with open_run_folder(config) as run_dir, catch_signals() as signals:
        console.print(f"run     {run_dir}", markup=False)
        checkpoint = load_latest_checkpoint(
            run_dir,
            allow_fresh=config.allow_fresh,
            report=functools.partial(console.print, markup=False),
        )
        is_resumed = checkpoint is not None
        config, published = find_origin(config, run_dir, is_resumed=is_resumed, console=console)
        workspace = load_workspace(config, run_dir, checkpoint, published, console)
        module = _build(config, workspace, published, console).to(device)
        if config.init_from and checkpoint is None:
            initialize(config, published, module.model, console)
        trainer = Trainer(config, run_dir, workspace, module, signals, console)
        if checkpoint is not None:
            trainer.resume(checkpoint)
        if checkpoint is not None and trainer.finished:
            trainer.config = config = settings_of_finished_run(config, run_dir, console)
        write_settings(config, workspace.tokenizer, run_dir, checkpoint, published, console)
        try:
            trainer.run_and_report()
        except StopRequested as stop:
            trainer.save()
            console.print(
                f"stopped at step {trainer.progress.step} of {config.train.steps} and saved; "
                "the same command goes on from here"
            )
            return stop.exit_code
    return 0


def _build(
    config: Config, workspace: Workspace, published: PretrainedSettings | None, console: Console
) -> TrainingModule:
    module = build_module(config, workspace.tokenizer, console, published, workspace.framing)
    if config.train.freeze:
        left = freeze(module, config.train.freeze)
        console.print(f"frozen  {', '.join(config.train.freeze)}; {left:,} parameters are trained")
    return module


@dataclasses.dataclass
class Progress:
    """Where a run stands; saved with every checkpoint, so that a resumed run goes on exactly."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    seconds: float = 0.0
    tokens: int = 0
    window_loss: float = 0.0
    window_targets: int = 0
    window_seconds: float = 0.0
    window_tokens: int = 0
    nonfinite_in_a_row: int = 0
    skipped_steps: int = 0
    validated_step: int = 0
    best_step: int | None = None
    best_value: float | None = None
    best_loss: float = math.inf
    stale_validations: int = 0


class StepFigures(NamedTuple):
    """What one optimiser step did."""

    loss_sum: float
    num_targets: int
    grad_norm: float
    density: dict[str, list[list[float]]] | None

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.grad_norm)


class Trainer:
    """The loop and its state."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        workspace: Workspace,
        module: TrainingModule,
        signals: Signals,
        console: Console,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.workspace = workspace
        self.module = module
        self.signals = signals
        self.console = console
        self.device = next(module.parameters()).device
        self.optimizer = build_optimizer(module, config.optim)
        self.progress = Progress()
        self.saved_step = 0

    @property
    def finished(self) -> bool:
        """Whether no step is left, or validations have stopped getting better."""
        patience = self.config.train.patience
        out_of_patience = patience is not None and self.progress.stale_validations >= patience
        return self.progress.step >= self.config.train.steps or out_of_patience

    def resume(self, checkpoint: Checkpoint) -> None:
        """Take over the weights, the optimiser and the position of a checkpoint."""
        restore(checkpoint, self.module, self.optimizer)
        self.progress = Progress(**checkpoint.state["progress"])
        self.saved_step = checkpoint.step
        if checkpoint.state["metric"] != self.config.selection_metric:
            # figures of two metrics can't be compared, so the search for the best starts again
            self.progress.best_step = self.progress.best_value = None
            self.progress.best_loss, self.progress.stale_validations = math.inf, 0
        if self.progress.best_step is not None and self.progress.best_value is not None:
            # best.json may be older or newer than the checkpoint that could be used
            metric = self.config.selection_metric
            write_best(self.run_dir, self.progress.best_step, metric, self.progress.best_value)
        self.console.print(f"resumed at step {checkpoint.step} of {self.config.train.steps}")

    def run_and_report(self) -> None:
        """Train to the end, evaluate the best weights and report; all of it only once."""
        step, steps = self.progress.step, self.config.train.steps
        if self.finished and has_results(self.run_dir, step, self.config):
            self.console.print(f"already at step {step} of {steps}: nothing left to train")
        else:
            self.run()
            finish(
                self.config,
                self.run_dir,
                self.workspace,
                self.module,
                self.signals,
                dataclasses.asdict(self.progress),
            )
        print_report(self.run_dir, self.config, self.console)

    def run(self) -> None:
        """Take the steps that are left."""
        config, progress = self.config, self.progress
        stream = BatchStream(
            self.workspace.train,
            self.workspace.tokenizer,
            batch_tokens=config.data.batch_tokens,
            seed=config.seed,
            epoch=progress.epoch,
            index=progress.index,
        )
        with TrainLog(
            self.run_dir,
            config.train.steps,
            console=self.console,
            resume_step=progress.step,
            tensorboard=config.train.tensorboard,
        ) as log:
            while True:
                self.signals.raise_if_stopped()
                if (
                    self._is_due(config.train.eval_every)
                    and progress.validated_step < progress.step
                ):
                    self.validate(log)
                if self._is_due(config.train.save_every) or self.signals.take_save_request():
                    self.save()
                if self.finished:
                    return
                figures = self.step(stream)
                if progress.step % config.train.log_every == 0:
                    self._log_step(log, figures)

    def step(self, stream: BatchStream) -> StepFigures:
        """Take one optimiser step; its randomness is a pure function of (seed, step)."""
        config, progress = self.config, self.progress
        started = time.perf_counter()
        batches = [next(stream) for _ in range(config.train.accumulate)]
        torch.manual_seed(derive_seed(config.seed, "step", progress.step))
        set_learning_rates(
            self.optimizer, learning_rate_factor(progress.step, config.optim, config.train.steps)
        )
        set_alpha_of_step(self.module.model, config, progress.step)
        figures = self._backward(batches)
        if figures.is_finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.epoch, progress.index = stream.epoch, stream.index
        self._count(figures, batches, time.perf_counter() - started)
        return figures

    def validate(self, log: TrainLog) -> None:
        """Evaluate the validation split, and save when it is the best so far."""
        metric, progress = self.config.selection_metric, self.progress
        set_alpha_of_step(self.module.model, self.config, progress.step)
        references = [pair.tgt for pair in self.workspace.dataset.validation]
        figures = evaluate(
            self.module,
            self.workspace.validation,
            references,
            self.workspace.tokenizer,
            self.config,
            between_batches=self.signals.raise_if_stopped,
        ).metrics
        value = figures[metric]
        progress.validated_step = progress.step
        if self._is_better(value, figures["loss"]):
            progress.best_step, progress.best_value = progress.step, value
            progress.best_loss = figures["loss"]
            progress.stale_validations = 0
            self.save()
            write_best(self.run_dir, progress.step, metric, value)
        else:
            progress.stale_validations += 1
        log.validation(progress.step, figures, is_best=progress.best_step == progress.step)

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one, and prune the old ones."""
        progress = self.progress
        if progress.step == self.saved_step:
            return
        state: dict[str, JSON] = {
            "progress": dataclasses.asdict(progress),
            "config": dataclasses.asdict(self.config),
            "metric": self.config.selection_metric,
            "data_hash": self.workspace.dataset.content_hash,
            "tokenizer_hash": self.workspace.tokenizer.content_hash,
        }
        save_checkpoint(self.run_dir, progress.step, self.module, self.optimizer, state)
        self.saved_step = progress.step
        prune_checkpoints(self.run_dir, self.config.train.keep_checkpoints, progress.best_step)

    def _backward(self, batches: Sequence[Batch]) -> StepFigures:
        """Accumulate gradients of the loss per target token of the whole step, and clip them."""
        num_targets = sum(batch.num_targets for batch in batches)
        step = self.progress.step
        logging = (step + 1) % self.config.train.log_every == 0
        loss_sum = 0.0
        with record_attention(self.module.model) if logging else contextlib.nullcontext() as record:
            for batch in batches:
                with autocast(self.config, self.device):
                    loss = self.module(to_device(batch, self.device), step)
                (loss / num_targets).backward()
                loss_sum += loss.item()
        norm = clip_gradients(self.module.parameters(), self.config.optim.clip_norm)
        density = None if record is None else record.densities()
        return StepFigures(loss_sum, num_targets, norm.item(), density)

    def _count(self, figures: StepFigures, batches: Sequence[Batch], seconds: float) -> None:
        progress = self.progress
        tokens = sum(batch.num_targets + int(batch.src_length.sum()) for batch in batches)
        progress.seconds += seconds
        progress.tokens += tokens
        progress.window_seconds += seconds
        progress.window_tokens += tokens
        progress.window_loss += figures.loss_sum
        progress.window_targets += figures.num_targets
        if figures.is_finite:
            progress.nonfinite_in_a_row = 0
            return
        progress.nonfinite_in_a_row += 1
        progress.skipped_steps += 1
        rows = [row for batch in batches for row in batch.rows]
        what = (
            f"step {progress.step}: loss {figures.loss_sum / figures.num_targets:g} and gradient "
            f"norm {figures.grad_norm:g} are not both finite; training rows {_shorten(rows)}"
        )
        self.console.print(f"{what}; no update was made")
        if progress.nonfinite_in_a_row >= self.config.train.max_nonfinite:
            raise NumericError(
                f"{what}; {progress.nonfinite_in_a_row} steps in a row gave no update, so try a "
                "lower --optim.lr or a longer --optim.warmup-steps."
            )

    def _log_step(self, log: TrainLog, figures: StepFigures) -> None:
        progress = self.progress
        log.step(
            {
                "step": progress.step,
                "loss": progress.window_loss / max(progress.window_targets, 1),
                "lr": self.optimizer.param_groups[0]["lr"],
                "grad_norm": figures.grad_norm,
                "tokens_per_second": progress.window_tokens / progress.window_seconds,
                "memory_mib": peak_memory_mib(self.device),
                "skipped_steps": progress.skipped_steps,
                "alpha": self.module.model.alphas(),
                "density": figures.density,
            }
        )
        progress.window_loss, progress.window_targets = 0.0, 0
        progress.window_seconds, progress.window_tokens = 0.0, 0

    def _is_due(self, every: int) -> bool:
        step = self.progress.step
        return step > 0 and (step % every == 0 or step >= self.config.train.steps)

    def _is_better(self, value: float, loss: float) -> bool:
        best = self.progress.best_value
        if best is None or math.isnan(best):
            return True
        if value == best:
            return loss < self.progress.best_loss
        return value < best if self.config.selection_metric in LOWER_IS_BETTER else value > best


def _shorten(rows: Sequence[int], limit: int = 8) -> str:
    shown = ", ".join(map(str, rows[:limit]))
    return shown if len(rows) <= limit else f"{shown} and {len(rows) - limit} more"
