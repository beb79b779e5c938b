"""Estimate the label proportions of documents with sparse losses and with softmax cross-entropy.

The task of Martins and Astudillo 2016, section 4.1 (arXiv 1602.02068), on synthetic documents: each
has 1 to 5 of 10 labels in some proportion, and its words are drawn from the labels' own word
distributions. A linear model learns the proportions. A label counts as found where its probability
is above 0, which needs no threshold, or above the threshold that is best on validation documents.

    python examples/multilabel.py
"""

import argparse
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sparseformer.functional import entmax, entmax_loss

NUM_LABELS = 10
NUM_WORDS = 1000
WORDS_PER_DOCUMENT = 200
MODELS = {"softmax": 1.0, "1.5-entmax": 1.5, "sparsemax": 2.0}
WEIGHT_DECAYS = (1e-3, 3e-3, 1e-2, 3e-2)
THRESHOLDS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15)


@dataclass(frozen=True)
class Documents:
    """Shares of the words [documents, words] and proportions of the labels [documents, labels]."""

    words: Tensor
    proportions: Tensor

    def slice(self, start: int, stop: int) -> "Documents":
        """Return the documents from start to stop."""
        return Documents(self.words[start:stop], self.proportions[start:stop])


@dataclass(frozen=True)
class Result:
    """How one model does on the test documents."""

    squared_error: float
    divergence: float
    labels_above_0: float
    f1_above_0: float
    f1: float
    threshold: float


@dataclass(frozen=True)
class Model:
    """p = entmax(words W^T + b), alpha = 1 being softmax."""

    weight: Tensor
    bias: Tensor
    alpha: float

    def __call__(self, words: Tensor) -> Tensor:
        return entmax(_logits(words, self.weight, self.bias), self.alpha)


def make_documents(count: int, generator: torch.Generator) -> Documents:
    """Draw labels, proportions that are uniform on the simplex of the labels, and then words."""
    topics = _exponential(NUM_LABELS, NUM_WORDS, generator).pow(3)
    how_many = torch.randint(1, 6, (count, 1), generator=generator)
    rank = torch.rand(count, NUM_LABELS, generator=generator).argsort(-1)
    shares = _exponential(count, NUM_LABELS, generator).masked_fill(rank >= how_many, 0.0)
    proportions = shares / shares.sum(-1, keepdim=True)
    mixture = proportions @ (topics / topics.sum(-1, keepdim=True))
    drawn = mixture.multinomial(WORDS_PER_DOCUMENT, replacement=True, generator=generator)
    counts = torch.zeros(count, NUM_WORDS).scatter_add_(1, drawn, torch.ones(drawn.shape))
    return Documents(counts / WORDS_PER_DOCUMENT, proportions)


def _exponential(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return -torch.rand(rows, columns, generator=generator).clamp(min=1e-9).log()


def _logits(words: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # Shares of a thousand words are small numbers.
    return NUM_WORDS**0.5 * words @ weight.T + bias


def fit(documents: Documents, alpha: float, weight_decay: float) -> Model:
    """Minimise the alpha-entmax loss of the proportions: convex, so L-BFGS ends at its minimum."""
    weight = torch.zeros(NUM_LABELS, NUM_WORDS, requires_grad=True)
    bias = torch.zeros(NUM_LABELS, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        logits = _logits(documents.words, weight, bias)
        loss = entmax_loss(logits, documents.proportions, alpha)
        loss = loss + 0.5 * weight_decay * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    return Model(weight.detach(), bias.detach(), alpha)


def squared_error(probs: Tensor, proportions: Tensor) -> float:
    """Return the mean over documents of |p - q|**2."""
    return float((probs - proportions).square().sum(-1).mean())


def divergence(probs: Tensor, proportions: Tensor) -> float:
    """Return the mean Jensen-Shannon divergence in bits; it takes zeros on either side."""
    middle = (probs + proportions) / 2
    terms = [torch.special.xlogy(p, p / middle.clamp(min=1e-30)) for p in (probs, proportions)]
    return float((terms[0] + terms[1]).sum(-1).mean() / (2 * torch.log(torch.tensor(2.0))))


def f1(probs: Tensor, proportions: Tensor, threshold: float) -> float:
    """Return the F1 of the labels above the threshold, over all documents."""
    found, true = probs > threshold, proportions > 0
    return float(2 * (found & true).sum() / (found.sum() + true.sum()))


def evaluate(alpha: float, splits: tuple[Documents, Documents, Documents]) -> Result:
    """Fit on the first split, choose weight decay and threshold on the second, and test."""
    train, validation, test = splits
    models = [fit(train, alpha, weight_decay) for weight_decay in WEIGHT_DECAYS]
    model = min(models, key=lambda m: squared_error(m(validation.words), validation.proportions))
    guess = model(validation.words)
    threshold = max(THRESHOLDS, key=lambda level: f1(guess, validation.proportions, level))
    probs = model(test.words)
    return Result(
        squared_error=squared_error(probs, test.proportions),
        divergence=divergence(probs, test.proportions),
        labels_above_0=float((probs > 0).sum(-1).float().mean()),
        f1_above_0=f1(probs, test.proportions, 0.0),
        f1=f1(probs, test.proportions, threshold),
        threshold=threshold,
    )


def main(arguments: list[str] | None = None) -> dict[str, Result]:
    """Print the table and return it, one result for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=1200, help="training documents")
    parser.add_argument("--test", type=int, default=1000, help="test documents")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    validation = options.train // 3
    ends = [0, options.train, options.train + validation]
    ends.append(ends[-1] + options.test)
    documents = make_documents(ends[-1], torch.Generator().manual_seed(options.seed))
    train, chosen, test = (documents.slice(start, stop) for start, stop in pairwise(ends))
    results = {name: evaluate(alpha, (train, chosen, test)) for name, alpha in MODELS.items()}
    true = float((test.proportions > 0).sum(-1).float().mean())
    print(f"{true:.2f} labels per test document")
    print("model       sq. error   JS bits   labels p > 0   F1 p > 0   best F1 at threshold")
    for name, found in results.items():
        print(
            f"{name:11s} {found.squared_error:9.4f} {found.divergence:9.4f} "
            f"{found.labels_above_0:14.2f} {found.f1_above_0:10.3f} {found.f1:9.3f} "
            f"{found.threshold:12.2f}"
        )
    return results


if __name__ == "__main__":
    main()
