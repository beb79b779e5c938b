"""The schedule of a fixed alpha: a straight line from model.alpha to optim.alpha_end."""

from sparseformer.config import Config
from sparseformer.nn import Seq2SeqTransformer


def scheduled_alpha(config: Config, step: int) -> float | None:
    """Return the alpha of attention entmax after `step` steps, or None when it doesn't move.

    With start a, end b and n ramp steps it is a + (b - a) min(1, step / n).
    """
    start, end = config.model.start_alpha, config.optim.alpha_end
    if end is None:
        return None
    ramp_steps = config.optim.alpha_ramp_steps or max(1, config.train.steps // 2)
    return start + (end - start) * min(1.0, step / ramp_steps)


def set_alpha_of_step(model: Seq2SeqTransformer, config: Config, step: int) -> None:
    """Give every entmax head the alpha of a step; a pure function, so nothing of it is saved."""
    alpha = scheduled_alpha(config, step)
    if alpha is None:
        return
    for layers in model.attention_layers().values():
        for layer in layers:
            if layer.attn == "entmax":
                layer.fixed_alpha = alpha
