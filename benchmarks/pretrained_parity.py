"""Print how far the logits of loaded checkpoints are from those of transformers.

    python benchmarks/pretrained_parity.py

Every checkpoint is small and random: no norm is 1 and no bias is 0. Four sources of 12, 9, 5 and 1
tokens, padded, and targets of 10 tokens, in fp32; both sides see the same ids.
"""

import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from published_models import PUBLISHED, VOCAB, publish
from torch import Tensor, nn

from sparseformer.pretrained import PretrainedCheckpoint, read_pretrained

LENGTH = torch.tensor([12, 9, 5, 1])


def random_batch(pad_id: int) -> tuple[Tensor, Tensor]:
    """Return sources [4, 12] with padding after LENGTH tokens, and decoder input [4, 10]."""
    generator = torch.Generator().manual_seed(1)
    src = torch.randint(3, VOCAB - 1, (4, 12), generator=generator)
    tgt = torch.randint(3, VOCAB - 1, (4, 10), generator=generator)
    is_real = torch.arange(12) < LENGTH[:, None]
    return torch.where(is_real, src, pad_id), tgt


@torch.no_grad()
def logits_of_both(theirs: nn.Module, checkpoint: PretrainedCheckpoint) -> tuple[Tensor, Tensor]:
    """Return transformers' logits and ours, [4, 10, VOCAB]."""
    src, tgt = random_batch(checkpoint.pad_id)
    mask = (torch.arange(12) < LENGTH[:, None]).long()
    expected = theirs(input_ids=src, attention_mask=mask, decoder_input_ids=tgt).logits
    model = checkpoint.build().eval()
    return expected, model.logits(model(src, LENGTH, tgt))


def main() -> None:
    """Print the table."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    print(f"{versions}, CPU, fp32\n")
    print("| checkpoint | files | parameters | std of logits | largest difference |")
    print("|---|---|---|---|---|")
    for name in PUBLISHED:
        with tempfile.TemporaryDirectory() as folder:
            theirs = publish(name, Path(folder))
            checkpoint = read_pretrained(folder)
            files = len(list(Path(folder).glob("*.safetensors")))
            expected, actual = logits_of_both(theirs, checkpoint)
        parameters = sum(parameter.numel() for parameter in theirs.parameters())
        difference = float((expected - actual).abs().max())
        spread = float(expected.std())
        print(f"| {name} | {files} | {parameters:,} | {spread:.2f} | {difference:.1e} |")


if __name__ == "__main__":
    main()
