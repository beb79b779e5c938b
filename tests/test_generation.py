"""Search strategies: against exhaustive search, batched against single, cached against uncached."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from sparseformer.config import GenerationConfig, ModelConfig
from sparseformer.errors import NumericError
from sparseformer.generation import Hypothesis, generate
from sparseformer.generation.beam import beam_search
from sparseformer.generation.decoder import StepDecoder
from sparseformer.generation.rules import SearchRules

PAD, BOS, EOS, A, B = range(5)
GREEDY = GenerationConfig(strategy="greedy")
BEAM = GenerationConfig(strategy="beam", beam_size=4)
SAMPLE = GenerationConfig(strategy="sample")
STRATEGIES = pytest.mark.parametrize(
    "config", [GREEDY, BEAM, SAMPLE], ids=["greedy", "beam", "sample"]
)


class Memory(NamedTuple):
    states: Tensor
    length: Tensor


class StateCache:
    def __init__(self, state: Tensor) -> None:
        self.state = state

    def reorder(self, index: Tensor) -> None:
        self.state = self.state[index]


class RecurrentModel(nn.Module):
    """A model whose scores depend on the source and on every token of the prefix."""

    def __init__(self, vocab_size: int, *, seed: int = 0, width: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.embedding = draw(vocab_size, width)
        self.recurrent = draw(width, width) / 2
        self.output = draw(width, vocab_size)
        self.batch_sizes: list[int] = []

    def encode(self, src: Tensor, src_length: Tensor) -> Memory:
        return Memory(self.embedding[src], src_length)

    def new_cache(self, memory: Memory) -> StateCache:
        is_real = torch.arange(memory.states.shape[1]) < memory.length[:, None]
        total = (memory.states * is_real[:, :, None]).sum(1)
        return StateCache(total / memory.length[:, None])

    def decode(self, tokens: Tensor, memory: Memory, cache: StateCache | None) -> Tensor:
        self.batch_sizes.append(len(tokens))
        cache = self.new_cache(memory) if cache is None else cache
        hidden = []
        for column in tokens.T:
            cache.state = torch.tanh(cache.state @ self.recurrent + self.embedding[column])
            hidden.append(cache.state)
        return torch.stack(hidden, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.output


class MarkovModel(RecurrentModel):
    """A model whose next-token probabilities are given for each previous token."""

    def __init__(self, rows: dict[int, dict[int, float]], vocab_size: int = 5) -> None:
        super().__init__(vocab_size)
        self.table = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
        for previous, probabilities in rows.items():
            for token, probability in probabilities.items():
                self.table[previous, token] = probability

    def decode(self, tokens: Tensor, memory: Memory, cache: StateCache | None) -> Tensor:  # noqa: ARG002
        self.batch_sizes.append(len(tokens))
        return self.table.log()[tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def pad_rows(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    src = torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])
    return src, torch.tensor([len(row) for row in rows])


def run(
    model: nn.Module,
    rows: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    max_length: int = 12,
    **kwargs: object,
) -> list[Hypothesis]:
    options = {"bos_id": BOS, "eos_id": EOS, "pad_id": PAD} | kwargs
    return generate(model, *pad_rows(rows), config, max_length=max_length, **options)


def assert_same(left: Sequence[Hypothesis], right: Sequence[Hypothesis]) -> None:
    assert [hypothesis.ids for hypothesis in left] == [hypothesis.ids for hypothesis in right]
    scores = [hypothesis.score for hypothesis in right]
    assert [hypothesis.score for hypothesis in left] == pytest.approx(scores, abs=1e-5)


ROWS = [[3, 4], [5, 6, 7, 8, 3, 4, 5, 6], [7], [8, 8, 3], [4, 5, 6, 7, 8]]


@STRATEGIES
def test_batched_equals_single(config: GenerationConfig) -> None:
    """Output depended on batch mates or on padding in several toolkits."""
    model = RecurrentModel(9, seed=31)
    single = [run(model, [row], config, seeds=[i])[0] for i, row in enumerate(ROWS)]
    assert len({len(hypothesis.ids) for hypothesis in single}) > 2, "too uniform to tell"
    assert_same(run(model, ROWS, config, seeds=range(5)), single)
    mixed = run(model, ROWS[::-1], config, seeds=range(5)[::-1])
    assert_same(mixed[::-1], single)


@STRATEGIES
def test_cached_equals_uncached(config: GenerationConfig) -> None:
    model = RecurrentModel(9, seed=31)
    cached = run(model, ROWS, config, seeds=range(5))
    assert_same(cached, run(model, ROWS, config, seeds=range(5), use_cache=False))


def exhaustive_best(
    model: RecurrentModel, row: list[int], limit: int, penalty: float
) -> Hypothesis:
    letters = [token for token in range(9) if token not in (PAD, BOS, EOS)][:2]
    ends = [[*ids, EOS] for n in range(limit) for ids in itertools.product(letters, repeat=n)]
    ends += [list(ids) for ids in itertools.product(letters, repeat=limit)]
    memory = model.encode(*pad_rows([row]))
    best = Hypothesis([], -math.inf)
    for ids in ends:
        logits = model.logits(model.decode(torch.tensor([[BOS, *ids[:-1]]]), memory, None))
        logits[..., [PAD, BOS]] = -torch.inf
        log_probs = logits.log_softmax(-1)[0]
        score = sum(log_probs[i, token].item() for i, token in enumerate(ids))
        score /= len(ids) ** penalty
        if score > best.score:
            best = Hypothesis([token for token in ids if token != EOS], score)
    return best


@pytest.mark.parametrize("penalty", [-1.0, -0.3, 0.0, 0.5, 1.0, 2.0])
def test_a_beam_that_prunes_nothing_is_exhaustive_search(penalty: float) -> None:
    rows = [[3], [4, 3], [3, 3, 4], [4]]
    for seed in range(4):
        model = RecurrentModel(5, seed=seed)
        rules = SearchRules(bos_id=BOS, eos_id=EOS, banned_ids=(PAD, BOS), max_length=4)
        found = beam_search(
            StepDecoder(model, *pad_rows(rows), use_cache=True),
            rules,
            num_sentences=len(rows),
            device=torch.device("cpu"),
            beam_size=24,
            length_penalty=penalty,
        )
        assert_same(found, [exhaustive_best(model, row, 4, penalty) for row in rows])


def test_beam_finds_what_greedy_misses() -> None:
    model = MarkovModel({BOS: {A: 0.6, B: 0.4}, A: {EOS: 0.5, A: 0.5}, B: {EOS: 1.0}})
    plain_sum = GenerationConfig(strategy="beam", beam_size=2, length_penalty=0.0)
    assert run(model, [[3]], GREEDY)[0].ids == [A]
    assert run(model, [[3]], plain_sum)[0] == ([B], pytest.approx(math.log(0.4)))


def test_beam_of_one_without_penalty_is_greedy() -> None:
    model = RecurrentModel(9, seed=31)
    config = GenerationConfig(strategy="beam", beam_size=1, length_penalty=0.0)
    assert_same(run(model, ROWS, config), run(model, ROWS, GREEDY))


def test_score_counts_eos_in_the_length() -> None:
    model = MarkovModel({BOS: {A: 0.5, B: 0.5}, A: {EOS: 0.25, B: 0.75}, B: {EOS: 1.0}})
    hypothesis = run(model, [[3]], BEAM)[0]
    assert hypothesis == ([A, B], pytest.approx(math.log(0.5 * 0.75) / 3))


def test_beam_stops_when_no_open_hypothesis_can_win() -> None:
    rows = {BOS: {EOS: 0.6, A: 0.4}, A: {EOS: 0.5, A: 0.5}}
    model = MarkovModel(rows)
    plain_sum = GenerationConfig(strategy="beam", beam_size=2, length_penalty=0.0)
    assert run(model, [[3]], plain_sum, max_length=50)[0].ids == []
    assert len(model.batch_sizes) == 1


def test_beam_goes_on_while_a_longer_hypothesis_can_win() -> None:
    """Stopping at the first beam_size complete hypotheses misses the best normalised score."""
    certain = {token: {token + 1: 1.0} for token in range(4, 9)}
    model = MarkovModel({BOS: {EOS: 0.7, A: 0.3}, A: {4: 1.0}, **certain, 9: {EOS: 1.0}}, 10)
    config = GenerationConfig(strategy="beam", beam_size=1, length_penalty=1.0)
    hypothesis = run(model, [[3]], config)[0]
    assert hypothesis == ([3, 4, 5, 6, 7, 8, 9], pytest.approx(math.log(0.3) / 8))


def test_impossible_continuations_are_dropped() -> None:
    """A sparse output made log p = -inf, and -inf minus -inf a NaN, inside beam search."""
    model = MarkovModel({BOS: {A: 1.0}, A: {A: 1.0}})
    config = GenerationConfig(strategy="beam", beam_size=3)
    assert run(model, [[3]], config, max_length=2) == [([A, A], 0.0)]


@STRATEGIES
def test_a_dead_end_returns_the_best_survivor(config: GenerationConfig) -> None:
    dead_end = MarkovModel({BOS: {A: 1.0}, A: {B: 1.0}, B: {}})
    hypothesis = run(dead_end, [[3]], config, seeds=[0], log_probabilities=lambda x: x)[0]
    assert hypothesis == ([A, B], 0.0)


@STRATEGIES
@pytest.mark.parametrize("limit", [1, 37])
def test_output_without_eos_has_exactly_max_length_tokens(
    config: GenerationConfig, limit: int
) -> None:
    """Evaluation generated 20 tokens whatever target length was configured."""
    model = MarkovModel({BOS: {A: 1.0}, A: {A: 0.5, B: 0.5}, B: {A: 1.0}})
    assert [len(h.ids) for h in run(model, [[3], [4]], config, max_length=limit)] == [limit] * 2


def test_configured_max_length_goes_before_the_argument() -> None:
    model = MarkovModel({BOS: {A: 1.0}, A: {A: 1.0}})
    config = GenerationConfig(strategy="greedy", max_length=3)
    assert run(model, [[3]], config, max_length=37)[0].ids == [A, A, A]


@STRATEGIES
def test_forbidden_ids_take_no_probability(config: GenerationConfig) -> None:
    """Rows that pad an embedding have logits too, and were generated."""
    model = RecurrentModel(9, seed=31)
    unpadded = run(model, ROWS, config, seeds=range(5))
    padding = torch.full((8, 4), 50.0, dtype=torch.float64)
    model.output = torch.cat([model.output, padding], 1)
    assert_same(run(model, ROWS, config, seeds=range(5), forbidden_ids=range(9, 13)), unpadded)


@STRATEGIES
def test_pad_and_bos_are_never_generated(config: GenerationConfig) -> None:
    model = MarkovModel({BOS: {PAD: 0.5, BOS: 0.4, A: 0.1}, A: {PAD: 0.9, EOS: 0.1}})
    assert run(model, [[3]], config, seeds=[1])[0] == ([A], pytest.approx(0.0))


@pytest.mark.parametrize("config", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_eos_may_also_be_bos(config: GenerationConfig) -> None:
    model = MarkovModel({EOS: {A: 0.9, EOS: 0.1}, A: {EOS: 0.9, B: 0.1}, B: {EOS: 1.0}})
    config = GenerationConfig(strategy=config.strategy, no_repeat_ngram=1)
    assert run(model, [[3]], config, bos_id=EOS)[0].ids == [A]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["greedy", "beam", "sample"])
def test_no_ngram_occurs_twice(strategy: str, size: int) -> None:
    config = GenerationConfig(strategy=strategy, no_repeat_ngram=size)
    loop = {A: 0.5, B: 0.4, EOS: 0.1}
    model = MarkovModel({BOS: loop, A: loop, B: loop})
    ids = run(model, [[3]], config, max_length=30, seeds=[4])[0].ids
    ngrams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    assert len(ngrams) == len(set(ngrams))


def test_finished_rows_leave_the_batch() -> None:
    model = RecurrentModel(9, seed=31)
    run(model, ROWS, GREEDY)
    assert model.batch_sizes[0] == 5
    assert model.batch_sizes[-1] < 3
    assert model.batch_sizes == sorted(model.batch_sizes, reverse=True)


def test_samples_follow_the_distribution() -> None:
    model = MarkovModel({BOS: {A: 0.2, B: 0.3, EOS: 0.5}, A: {EOS: 1.0}, B: {EOS: 1.0}})
    drawn = [tuple(h.ids) for h in run(model, [[3]] * 4000, SAMPLE, seeds=range(4000))]
    shares = [drawn.count(ids) / 4000 for ids in ((A,), (B,), ())]
    assert shares == pytest.approx([0.2, 0.3, 0.5], abs=4 * math.sqrt(0.25 / 4000))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"top_k": 1}, {(B,)}),
        ({"top_k": 2}, {(B,), (A,)}),
        ({"top_p": 0.4}, {(B,)}),
        ({"top_p": 0.6}, {(B,), (A,)}),
        ({"temperature": 0.01}, {(B,)}),
        ({"top_k": 2, "top_p": 0.6}, {(B,)}),
        ({"temperature": 5.0}, {(B,), (A,), ()}),
    ],
    ids=str,
)
def test_sampling_settings_cut_the_tail(
    settings: dict[str, float], expected: set[tuple[int, ...]]
) -> None:
    model = MarkovModel({BOS: {A: 0.3, B: 0.5, EOS: 0.2}, A: {EOS: 1.0}, B: {EOS: 1.0}})
    config = GenerationConfig(strategy="sample", **settings)
    drawn = run(model, [[3]] * 100, config, seeds=range(100))
    assert {tuple(hypothesis.ids) for hypothesis in drawn} == expected


def test_unset_seeds_follow_the_global_generator() -> None:
    model = RecurrentModel(9, seed=31)
    draws = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        draws.append(run(model, ROWS, SAMPLE))
    assert draws[0] == draws[1] != draws[2]


@STRATEGIES
def test_nan_scores_are_refused(config: GenerationConfig) -> None:
    model = RecurrentModel(9)
    model.output[0, 4] = torch.nan
    with pytest.raises(NumericError, match="target token 1 are not numbers"):
        run(model, ROWS, config, seeds=range(5))


def test_every_module_gets_its_mode_back() -> None:
    model = RecurrentModel(9)
    model.frozen, model.dropout = nn.Dropout().eval(), nn.Dropout()
    run(model, ROWS, GREEDY)
    assert (model.training, model.frozen.training, model.dropout.training) == (True, False, True)


def test_an_empty_batch_gives_no_hypotheses() -> None:
    empty = torch.zeros(0, 3, dtype=torch.int64)
    options = {"bos_id": BOS, "eos_id": EOS, "pad_id": PAD, "max_length": 4}
    assert generate(RecurrentModel(9), empty, empty[:, 0], GREEDY, **options) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": [1]}, "1 seeds for 5 rows"),
        ({"max_length": 0}, "max_length is 0"),
        ({"forbidden_ids": [9]}, "Token 9 is to be left out, but the model has 9 tokens"),
    ],
    ids=["seeds", "max_length", "forbidden"],
)
def test_wrong_arguments_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(RecurrentModel(9), ROWS, GREEDY, **options)


def transformer(attn: str) -> nn.Module:
    from sparseformer.nn import Seq2SeqTransformer

    torch.manual_seed(0)
    config = ModelConfig(d_model=16, num_heads=2, ffn_dim=32, encoder_layers=1, decoder_layers=2)
    model = Seq2SeqTransformer(config, 9, attn=attn)
    with torch.no_grad():  # untrained outputs are uniform, which hides a wrong row
        model.embedding.weight *= 4
    return model.double()


@pytest.mark.parametrize("attn", ["softmax", "entmax_adaptive"])
@STRATEGIES
def test_transformer_batched_equals_single_and_uncached(
    config: GenerationConfig, attn: str
) -> None:
    model = transformer(attn)
    batched = run(model, ROWS, config, seeds=range(5))
    assert_same(batched, [run(model, [r], config, seeds=[i])[0] for i, r in enumerate(ROWS)])
    assert_same(batched, run(model, ROWS, config, seeds=range(5), use_cache=False))


def test_a_source_without_tokens_leaves_its_batch_mates_alone() -> None:
    """A row that sees no key stopped decoding with a device assertion."""
    model = transformer("entmax15")
    assert_same(run(model, [[], *ROWS], BEAM)[1:], run(model, ROWS, BEAM))


def test_training_goes_on_after_generation() -> None:
    """Buffers that a forward pass makes in inference mode can't be saved for a backward pass."""
    model = transformer("entmax_adaptive")
    run(model, ROWS, GREEDY)
    src, length = pad_rows(ROWS)
    model(src, length, src).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
