"""Parts of a model that keep their weights."""

from collections.abc import Sequence

from torch import nn

from sparseformer.errors import ConfigError
from sparseformer.nn import alpha_parameters
from sparseformer.training.module import TrainingModule

ALL_BUT_ALPHA = "all_but_alpha"


def freeze(module: TrainingModule, names: Sequence[str]) -> int:
    """Turn off the gradients of parts of a model.

    Args:
        module: the model and its loss.
        names: starts of parameter names of the model, at a dot: `encoder`, `decoder.blocks.0`,
            `embedding` (a tied output matrix too); or all_but_alpha, everything but the learned
            alphas of attention and loss.

    Returns:
        How many numbers are still trained.

    Raises:
        ConfigError: a name fits nothing, or nothing is left to train.
    """
    for name in names:
        for parameter in _named(module, name):
            parameter.requires_grad_(False)
    left = sum(p.numel() for p in module.parameters() if p.requires_grad)
    if left == 0:
        raise ConfigError(
            f"train.freeze is {' '.join(names)}, which leaves nothing to train; leave a part out, "
            "or choose --attn entmax_adaptive."
        )
    return left


def _named(module: TrainingModule, name: str) -> list[nn.Parameter]:
    if name == ALL_BUT_ALPHA:
        alphas = {id(parameter) for parameter in alpha_parameters(module)}
        return [p for p in module.parameters() if id(p) not in alphas]
    model = dict(module.model.named_parameters())
    found = [p for key, p in model.items() if key == name or key.startswith(f"{name}.")]
    if not found:
        parts = sorted({key.split(".")[0] for key in model})
        raise ConfigError(
            f"train.freeze names {name!r}, but no part of the model is called so: they are "
            f"{', '.join(parts)}, parts of these such as decoder.blocks.0, and {ALL_BUT_ALPHA}."
        )
    return found
