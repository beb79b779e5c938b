"""The one function through which outputs are generated, in training's evaluation and after it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sparseformer.config import GenerationConfig
from sparseformer.generation.beam import beam_search
from sparseformer.generation.decoder import Seq2SeqModel, StepDecoder
from sparseformer.generation.rules import (
    Constraints,
    Hypothesis,
    LogProbabilities,
    SearchRules,
    log_softmax,
)
from sparseformer.generation.single import Greedy, Sample, search_single, uniform_numbers


def generate(
    model: Seq2SeqModel,
    src: Tensor,
    src_length: Tensor,
    config: GenerationConfig,
    *,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    max_length: int,
    forbidden_ids: Sequence[int] = (),
    seeds: Sequence[int] | None = None,
    log_probabilities: LogProbabilities = log_softmax,
    constraints: Constraints | None = None,
    use_cache: bool = True,
) -> list[Hypothesis]:
    """Generate one output per row of src.

    greedy takes argmax p(token | prefix, src). beam maximises sum log p / length ** length_penalty.
    sample draws from p at a temperature, cut by top_k, then by top_p. A row's result depends
    neither on its batch mates nor on its padding. BOS, padding and forbidden ids never occur in it,
    unless BOS is the id that the constraints force.

    Args:
        model: An encoder-decoder, such as sparseformer.nn.Seq2SeqTransformer. It runs in evaluation
            mode without gradients; each of its modules gets its mode back.
        src: int64 [B, S] token ids, padded on the right.
        src_length: int64 [B], tokens of each row in [0, S].
        config: The strategy and its settings.
        bos_id: First input of the decoder; may be pad_id or eos_id, as in T5 and BART.
        eos_id: Ends a hypothesis.
        pad_id: Padding of src.
        max_length: Longest output in tokens, EOS included, when config.max_length is unset.
        forbidden_ids: Further ids that must not be generated, such as padded rows of an embedding.
        seeds: sample: one number per row, from which alone the row's draws follow; unset, they are
            drawn from torch's global generator.
        log_probabilities: From logits [rows, vocab_size] to log-probabilities, where -inf leaves a
            token out; for a model trained with a sparse loss, the logarithm of its mapping.
        constraints: What a published checkpoint asks of its outputs; unset, nothing. An id that it
            suppresses is left out after normalising, also if it is BOS or padding.
        use_cache: Decode one token per step; else the whole prefix, which is slow and equal.

    Returns:
        B hypotheses. Scores of sample hold the temperature, but neither top_k nor top_p.

    Raises:
        ValueError: If the shapes disagree, or max_length or an id is out of range.
        NumericError: If the model's scores are NaN.
    """
    limit = max_length if config.max_length is None else config.max_length
    _check_arguments(src, src_length, limit, seeds)
    if len(src) == 0:
        return []
    constraints = constraints or Constraints()
    spared = {eos_id, constraints.forced_bos_id, *constraints.suppressed_ids}
    rules = SearchRules(
        bos_id=bos_id,
        eos_id=eos_id,
        banned_ids=tuple(sorted(({bos_id, pad_id} - spared) | set(forbidden_ids))),
        max_length=limit,
        no_repeat_ngram=config.no_repeat_ngram,
        log_probabilities=log_probabilities,
        constraints=constraints,
    )
    with torch.inference_mode(), _evaluation_mode(model):
        decoder = StepDecoder(model, src, src_length, use_cache=use_cache)
        return _search(decoder, rules, config, src, seeds)


def _search(
    decoder: StepDecoder,
    rules: SearchRules,
    config: GenerationConfig,
    src: Tensor,
    seeds: Sequence[int] | None,
) -> list[Hypothesis]:
    if config.strategy == "beam":
        return beam_search(
            decoder,
            rules,
            num_sentences=len(src),
            device=src.device,
            beam_size=config.beam_size,
            length_penalty=config.length_penalty,
        )
    choose: Greedy | Sample = Greedy(rules=rules)
    if config.strategy == "sample":
        drawn = seeds if seeds is not None else torch.randint(2**62, (len(src),)).tolist()
        choose = Sample(
            rules=rules,
            uniform=uniform_numbers(drawn, rules.max_length, src.device),
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
        )
    return search_single(decoder, rules, choose, num_rows=len(src), device=src.device)


def _check_arguments(
    src: Tensor, src_length: Tensor, max_length: int, seeds: Sequence[int] | None
) -> None:
    if src.dim() != 2 or src_length.shape != src.shape[:1]:
        raise ValueError(
            f"src has shape {tuple(src.shape)} and src_length {tuple(src_length.shape)}, "
            "but they must be [B, S] and [B]."
        )
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}, but it counts EOS and must be 1 or more.")
    if seeds is not None and len(seeds) != len(src):
        raise ValueError(f"There are {len(seeds)} seeds for {len(src)} rows; pass one per row.")


@contextmanager
def _evaluation_mode(model: Seq2SeqModel) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
