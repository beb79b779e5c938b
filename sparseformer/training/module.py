"""The model and its loss as one module, so that one forward call gives a training loss."""

import torch
from rich.console import Console
from torch import Tensor, nn

from sparseformer.config import Config
from sparseformer.data import Batch, Tokenizer
from sparseformer.errors import ConfigError
from sparseformer.nn import AttentionChoice, Seq2SeqTransformer
from sparseformer.pretrained import PretrainedSettings
from sparseformer.training.framing import Framing
from sparseformer.training.objective import Objective


class TrainingModule(nn.Module):
    """A Seq2SeqTransformer and the Objective that its parameters are trained for.

    Args:
        model: the model.
        objective: the loss.
        framing: what the model expects around a text, and asks of its outputs.
    """

    def __init__(
        self, model: Seq2SeqTransformer, objective: Objective, framing: Framing | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.framing = framing or Framing()

    def forward(self, batch: Batch, step: int | None = None) -> Tensor:
        """Return the loss summed over the batch's labels; step as in Objective."""
        hidden = self.model(batch.src, batch.src_length, batch.decoder_input)
        loss: Tensor = self.objective(
            hidden, self.model.output_weight, batch.labels, step, self.model.logits_bias
        )
        return loss


def build_module(
    config: Config,
    tokenizer: Tokenizer,
    console: Console,
    published: PretrainedSettings | None = None,
    framing: Framing | None = None,
) -> TrainingModule:
    """Build the model and the objective of a run, with weights drawn from its seed.

    Args:
        config: the settings, with the model's shape.
        tokenizer: gives the vocabulary.
        console: where the parts are printed.
        published: the published checkpoint that the model comes from; it has its conventions and
            its rows of the embedding, which may be more than tokens.
        framing: as for TrainingModule.
    """
    torch.manual_seed(config.seed)
    model_config = config.model
    attn = AttentionChoice(
        encoder_self=model_config.encoder_attn or config.attn,
        decoder_self=model_config.decoder_attn or config.attn,
        cross=model_config.cross_attn or config.attn,
    )
    vocab_size = tokenizer.vocab_size if published is None else published.vocab_size
    model = Seq2SeqTransformer(
        model_config,
        vocab_size,
        attn=attn,
        pad_id=tokenizer.pad_id,
        conventions=None if published is None else published.conventions,
    )
    objective = Objective(config.loss, config.objective, vocab_size, warmup_steps(config))
    module = TrainingModule(model, objective, framing)
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
