"""Put sparse attention into a Hugging Face model, and look at what it does there."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from sparseformer.config import AttnName, BackendName
from sparseformer.integrations.transformers.attention import NAME, register
from sparseformer.integrations.transformers.heads import CHILD, HeadMap, MapChoice
from sparseformer.integrations.transformers.probe import attention_names, count_calls
from sparseformer.nn.recording import DensityMeter
from sparseformer.nn.transformer import alpha_parameters

# Our key of config.json.
KEY = "sparseformer"


def use_sparse_attention(
    model: nn.Module,
    attn: AttnName = "entmax_adaptive",
    *,
    init: float = 1.05,
    alpha: float = 1.5,
    k: int = 8,
    p: float = 0.9,
    layers: Sequence[str] | None = None,
    backend: BackendName = "auto",
    inputs: Mapping[str, Any] | None = None,
) -> list[str]:
    """Swap the attention of a transformers model for sparse attention, in place.

    The weights stay as they are; entmax_adaptive adds one number per head, which `save_pretrained`
    saves with them and `from_pretrained` of this package loads. One short forward pass checks that
    the modules really call the new function; if one doesn't, the model is left as it was.

    Args:
        model: A PreTrainedModel whose attention goes through transformers' AttentionInterface.
        attn: The map, as in `sparseformer.nn.MultiheadAttention`; softmax changes no result.
        init: entmax_adaptive: where the alpha of every head starts, inside (1, 2). Near 1 the
            model starts close to its own softmax.
        alpha: entmax: the alpha of every head, in [1, 2].
        k: topk: keys that a query keeps, at least 1.
        p: topp: softmax mass that a query keeps, in (0, 1].
        layers: Patterns of module names, such as ["encoder.*", "*.11.*"]; the other modules keep
            softmax. Unset, all modules.
        backend: What it runs on, as for `sparseformer.functional.entmax_attention`.
        inputs: Arguments of model.forward for the check; needed where it doesn't take token ids.

    Returns:
        The names of the swapped modules.

    Raises:
        ValueError: If a value is outside its range, a pattern fits no module, or an attention
            module doesn't call the function.
    """
    choice = MapChoice(attn=attn, init=init, alpha=alpha, k=k, p=p, backend=backend)
    with ExitStack() as undo:
        implementations = _implementations(model)
        undo.callback(_set_implementations, implementations)
        route(model)
        heads = _select(count_calls(model, inputs), attention_names(model), layers)
        undo.pop_all()
    own: Any = model
    earlier = getattr(own.config, KEY, None)
    replaced = earlier["replaced"] if earlier else implementations[0][1]
    _detach(model)
    attach(model, heads, choice)
    saved = {**choice.to_json(), "modules": heads, "replaced": replaced}
    setattr(own.config, KEY, saved)
    return list(heads)


def remove_sparse_attention(model: nn.Module) -> None:
    """Give a model back the attention that use_sparse_attention replaced; alphas are dropped.

    Raises:
        ValueError: If the model has no sparse attention.
    """
    own: Any = model
    saved = getattr(own.config, KEY, None)
    if saved is None:
        raise ValueError(f"{type(model).__name__} has no sparse attention to remove.")
    _detach(model)
    _set_implementations([(config, saved["replaced"]) for config, _ in _implementations(model)])
    delattr(own.config, KEY)


def alphas(model: nn.Module) -> dict[str, list[float]]:
    """Return the alpha of every head by the name of its module; topk and topp have none."""
    found = {name: head_map.alphas() for name, head_map in head_maps(model).items()}
    return {name: values for name, values in found.items() if values is not None}


def parameter_groups(
    model: nn.Module, *, lr: float, alpha_lr: float, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Sort the trainable parameters for an optimiser: matrices, vectors, and alphas.

    Only matrices decay. The logits of alpha must not: decay would pull alpha to 1.5.

    Args:
        model: A model with or without sparse attention.
        lr: Learning rate of the model's own parameters, above 0.
        alpha_lr: Learning rate of the alphas, above 0. Adam moves a logit by up to this in a step:
            100 steps of 1e-2 take an alpha from 1.05 to 1.13 at most.
        weight_decay: Of the matrices, 0 or more.

    Returns:
        Groups for torch.optim, without those that are empty.
    """
    learned = {id(parameter) for parameter in alpha_parameters(model)}
    own = [p for p in model.parameters() if p.requires_grad and id(p) not in learned]
    groups = [
        {"params": [p for p in own if p.dim() >= 2], "lr": lr, "weight_decay": weight_decay},
        {"params": [p for p in own if p.dim() < 2], "lr": lr, "weight_decay": 0.0},
        {
            "params": [p for p in alpha_parameters(model) if p.requires_grad],
            "lr": alpha_lr,
            "weight_decay": 0.0,
        },
    ]
    return [group for group in groups if group["params"]]


class DensityRecord:
    """What `record_density` has measured so far."""

    def __init__(self, meters: Mapping[str, DensityMeter]) -> None:
        self._meters = meters

    def densities(self) -> dict[str, list[float]]:
        """Return the share of visible keys with a weight above 0, per head, by module name.

        It is the mean over the calls, weighted by their queries; queries at padded positions count
        like others. Modules that did not run are left out.
        """
        found = {name: meter.density() for name, meter in self._meters.items()}
        return {name: values for name, values in found.items() if values is not None}

    def share_of_zeros(self) -> float:
        """Return the share of visible keys whose weight is exactly 0, mean over all heads."""
        values = [value for heads in self.densities().values() for value in heads]
        return 1.0 - sum(values) / len(values)


@contextmanager
def record_density(model: nn.Module) -> Iterator[DensityRecord]:
    """Measure how sparse every head is in whatever runs inside the block.

    Outputs and gradients stay the same; the counting costs some time.

    Raises:
        ValueError: If the model has no sparse attention.
    """
    found = head_maps(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no sparse attention to record.")
    meters = {name: DensityMeter() for name in found}
    for name, head_map in found.items():
        head_map.meter = meters[name]
    try:
        yield DensityRecord(meters)
    finally:
        for head_map in found.values():
            head_map.meter = None


def head_maps(model: nn.Module) -> dict[str, HeadMap]:
    """Return what sits in the swapped modules, by the name of the module."""
    suffix = f".{CHILD}"
    return {
        name.removesuffix(suffix): module
        for name, module in model.named_modules()
        if isinstance(module, HeadMap)
    }


def route(model: nn.Module) -> None:
    """Make our function the attention implementation of a model and of all its parts."""
    register()
    # set_attn_implementation misses parts with a configuration of their own (T5's decoder).
    _set_implementations([(config, NAME) for config, _ in _implementations(model)])


def attach(model: nn.Module, heads: Mapping[str, int], choice: MapChoice) -> None:
    """Give each named module a HeadMap, on the module's device."""
    modules = dict(model.named_modules())
    for name, num_heads in heads.items():
        module = modules[name]
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        module.add_module(CHILD, HeadMap(num_heads, choice).to(device))


def _detach(model: nn.Module) -> None:
    for module in list(model.modules()):
        module._modules.pop(CHILD, None)


def _select(
    called: Mapping[str, int], expected: Sequence[str], layers: Sequence[str] | None
) -> dict[str, int]:
    """Return the modules to swap, and refuse when one that should be swapped did not call."""

    def is_wanted(name: str) -> bool:
        return layers is None or any(fnmatchcase(name, pattern) for pattern in layers)

    for pattern in layers or ():
        if not any(fnmatchcase(name, pattern) for name in called):
            raise ValueError(
                f"layers has {pattern!r}, which fits no attention module; they are {list(called)}."
            )
    missing = [name for name in expected if is_wanted(name) and name not in called]
    if missing:
        raise ValueError(
            f"{len(called)} modules called the sparse attention, but these did not: {missing}. "
            "Leave them out with layers=[...], or pass inputs={...} with which they run."
        )
    return {name: heads for name, heads in called.items() if is_wanted(name)}


def _implementations(model: nn.Module) -> list[tuple[Any, str | None]]:
    """Return every configuration that a part of the model reads, the model's own first."""
    from transformers import PreTrainedConfig

    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs.setdefault(id(config), config)
    if not configs:
        raise ValueError(f"{type(model).__name__} is no model of transformers: it has no config.")
    return [(config, config._attn_implementation) for config in configs.values()]


def _set_implementations(implementations: Sequence[tuple[Any, str | None]]) -> None:
    for config, name in implementations:
        config._attn_implementation = name
