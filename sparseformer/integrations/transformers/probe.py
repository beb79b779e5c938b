"""Find the attention modules of a model by running it once and counting the calls."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparseformer.functional import entmax_attention
from sparseformer.integrations.transformers.attention import NAME
from sparseformer.integrations.transformers.heads import CHILD
from sparseformer.nn.attention_map import AttentionOptions
from sparseformer.nn.modes import evaluating

# Tokens of the trial sequence.
_LENGTH = 6


class CallCounter:
    """Attend by softmax, and remember that the module called, with how many heads."""

    def __init__(self) -> None:
        self.num_heads: int | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Return what softmax attention returns."""
        self.num_heads = q.shape[1]
        return entmax_attention(q, k, v, 1.0, **options)


def count_calls(model: nn.Module, inputs: Mapping[str, Any] | None) -> dict[str, int]:
    """Run a model whose attention implementation is ours, and see which modules call it.

    Args:
        model: A PreTrainedModel; nothing of it is changed.
        inputs: Arguments of its forward; None makes token ids.

    Returns:
        The number of heads of each module that called, by name, in the order of named_modules.

    Raises:
        ValueError: If nothing called, or inputs are needed.
    """
    arguments = trial_inputs(model) if inputs is None else inputs
    counters = {name: CallCounter() for name, _ in model.named_modules()}
    modules = dict(model.named_modules())
    # A plain attribute, since a container may not get another submodule.
    kept = {name: module._modules.pop(CHILD, None) for name, module in modules.items()}
    for name, module in modules.items():
        module.__dict__[CHILD] = counters[name]
    try:
        with evaluating(model), torch.no_grad():
            model(**arguments)
    finally:
        for name, module in modules.items():
            del module.__dict__[CHILD]
            if kept[name] is not None:
                module._modules[CHILD] = kept[name]
    heads = {name: c.num_heads for name, c in counters.items() if c.num_heads is not None}
    if not heads:
        raise ValueError(
            f"No module of {type(model).__name__} calls the attention function {NAME!r}: the model "
            "doesn't take its attention from transformers' AttentionInterface."
        )
    return heads


def attention_names(model: nn.Module) -> list[str]:
    """List the modules that are attention by the name of their class, innermost ones only."""

    def named_attention(module: nn.Module) -> bool:
        return "Attention" in type(module).__name__

    return [
        name
        for name, module in model.named_modules()
        if named_attention(module)
        and not any(named_attention(m) for m in module.modules() if m is not module)
    ]


def trial_inputs(model: Any) -> dict[str, Tensor]:
    """Make the token ids of one short sequence, for the decoder too where there is one.

    Raises:
        ValueError: If the model's input isn't token ids.
    """
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{type(model).__name__} takes {model.main_input_name}, so pass arguments of its "
            "forward as inputs={...}, for one trial run."
        )
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(_LENGTH, device=model.device)[None] + 3) % vocab_size
    found = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = ids
    return found
