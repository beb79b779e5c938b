"""Load a model that was saved with sparse attention."""

from typing import Any

from torch import nn

from sparseformer.integrations.transformers.heads import CHILD, MapChoice
from sparseformer.integrations.transformers.probe import count_calls
from sparseformer.integrations.transformers.swap import KEY, attach, head_maps, route

_HUB_ARGUMENTS = frozenset(
    {"cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token"}
)


def from_pretrained(
    name_or_path: str, model_class: type[nn.Module] | None = None, **kwargs: Any
) -> Any:
    """Load a model that save_pretrained wrote after use_sparse_attention, alphas included.

    transformers' own from_pretrained would give the model its plain softmax back and drop the
    alphas as unexpected weights; here they are attached before the weights are loaded.

    Args:
        name_or_path: A folder or a name on the hub.
        model_class: The class to load, such as T5ForConditionalGeneration; unset, the one that was
            saved.
        **kwargs: For transformers' from_pretrained, such as dtype or device_map.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: If the folder was saved without sparse attention, or alphas are missing.
    """
    import transformers

    hub = {name: value for name, value in kwargs.items() if name in _HUB_ARGUMENTS}
    config = transformers.AutoConfig.from_pretrained(name_or_path, **hub)
    saved = getattr(config, KEY, None)
    if saved is None:
        raise ValueError(
            f"{name_or_path} was not saved with sparse attention; load it with transformers and "
            "call use_sparse_attention."
        )
    own_class = model_class or getattr(transformers, config.architectures[0], None)
    if own_class is None or not issubclass(own_class, transformers.PreTrainedModel):
        raise ValueError(
            f"{own_class or config.architectures[0]} is no model class of transformers; pass the "
            "model's own class as model_class, such as T5ForConditionalGeneration."
        )
    loading_class = _with_head_maps(own_class)
    model, info = loading_class.from_pretrained(
        name_or_path, config=config, output_loading_info=True, **kwargs
    )
    model.__class__ = own_class
    missing = sorted(name for name in info["missing_keys"] if f".{CHILD}." in name)
    if missing:
        raise ValueError(f"{name_or_path} lacks learned alphas: {missing}.")
    route(model)
    _check_calls(model)
    return model


def _with_head_maps(model_class: Any) -> Any:
    """Return a subclass whose models have their HeadMaps from the start."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        model_class.__init__(self, config, *args, **kwargs)
        saved = dict(getattr(config, KEY))
        heads = _renamed(saved.pop("modules"), self)
        del saved["replaced"]
        attach(self, heads, MapChoice(**saved))

    members = {"__init__": __init__, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members)


def _renamed(heads: dict[str, int], model: Any) -> dict[str, int]:
    """Fit module names to a class with or without a head on top, as transformers does."""
    names = {name for name, _ in model.named_modules()}
    prefix = f"{model.base_model_prefix}."
    found = {}
    for saved, num_heads in heads.items():
        candidates = (saved, saved.removeprefix(prefix), prefix + saved)
        name = next((candidate for candidate in candidates if candidate in names), None)
        if name is None:
            raise ValueError(f"{type(model).__name__} has no module {saved}, which was saved.")
        found[name] = num_heads
    return found


def _check_calls(model: Any) -> None:
    if model.main_input_name != "input_ids":
        return
    idle = head_maps(model).keys() - count_calls(model, None).keys()
    if idle:
        raise ValueError(f"These modules don't call the sparse attention: {sorted(idle)}.")
