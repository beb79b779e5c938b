"""The model and its loss as one module, so that one forward call gives a training loss."""

import torch
from rich.console import Console
from torch import Tensor, nn

from sparseformer.config import Config
from sparseformer.data import Batch, Tokenizer
from sparseformer.errors import ConfigError
from sparseformer.nn import AttentionChoice, Seq2SeqTransformer
from sparseformer.training.objective import Objective


class TrainingModule(nn.Module):
    """A Seq2SeqTransformer and the Objective that its parameters are trained for."""

    def __init__(self, model: Seq2SeqTransformer, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: Batch, step: int | None = None) -> Tensor:
        """Return the loss summed over the batch's labels; step as in Objective."""
        hidden = self.model(batch.src, batch.src_length, batch.decoder_input)
        loss: Tensor = self.objective(hidden, self.model.output_weight, batch.labels, step)
        return loss


def build_module(config: Config, tokenizer: Tokenizer, console: Console) -> TrainingModule:
    """Build the model and the objective of a run, with weights drawn from its seed."""
    torch.manual_seed(config.seed)
    model_config = config.model
    attn = AttentionChoice(
        encoder_self=model_config.encoder_attn or config.attn,
        decoder_self=model_config.decoder_attn or config.attn,
        cross=model_config.cross_attn or config.attn,
    )
    model = Seq2SeqTransformer(
        model_config, tokenizer.vocab_size, attn=attn, pad_id=tokenizer.pad_id
    )
    objective = Objective(config.loss, config.objective, tokenizer.vocab_size, warmup_steps(config))
    module = TrainingModule(model, objective)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    console.print(f"model   {parameters:,} parameters, attention {_describe(attn)}")
    console.print(f"loss    {config.loss}{_describe_warmup(objective, config)}")
    return module


def _describe(attn: AttentionChoice) -> str:
    if len(set(attn)) == 1:
        return attn.cross
    return ", ".join(f"{name} {value}" for name, value in attn._asdict().items())


def _describe_warmup(objective: Objective, config: Config) -> str:
    if objective.warmup_steps == 0:
        return ""
    return (
        f"; the full cross-entropy for the first {objective.warmup_steps} of {config.train.steps} "
        "steps, because from random weights a truncated loss teaches only the classes on top"
    )


def warmup_steps(config: Config) -> int:
    """Return for how many steps a truncated loss is the full cross-entropy."""
    if config.objective.warmup_steps is not None:
        return config.objective.warmup_steps
    return 0 if config.init_from else config.train.steps // 4


def choose_device(config: Config) -> torch.device:
    """Return the device that --device names; auto is the GPU where there is one.

    Raises:
        ConfigError: a GPU is asked for, and PyTorch finds none.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if config.device == "cuda":
        raise ConfigError("device is 'cuda', but PyTorch finds no GPU; use --device cpu or auto.")
    return torch.device("cpu")


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Return the context that runs matrix products in bf16 when --precision says so."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors of a batch."""
    return batch._replace(
        src=batch.src.to(device),
        src_length=batch.src_length.to(device),
        decoder_input=batch.decoder_input.to(device),
        labels=batch.labels.to(device),
    )
