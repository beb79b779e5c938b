"""Tiny random checkpoints, saved by transformers with a tokenizer.json, and pairs for them."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

# transformers is imported inside, since it takes seconds

WORDS = [f"w{i}" for i in range(20)]
LANGUAGES = ["en_XX", "de_DE"]


def write_pairs(path: Path, count: int = 60) -> Path:
    """Write pairs whose output is the first word of the input."""
    rows = [[WORDS[(i * step) % 20] for step in (1, 3, 7)] for i in range(count)]
    lines = [json.dumps({"src": f"{i} {' '.join(r)}", "tgt": r[0]}) for i, r in enumerate(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def save_t5(folder: Path, *, vocab_size: int = 40) -> Path:
    """Save a T5 1.1 with more rows than tokens, heads that don't divide it, and an own head."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=vocab_size, d_model=12, d_kv=5, d_ff=16, num_heads=3, num_layers=1,
        num_decoder_layers=1, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return _save_tokenizer(folder, ["<pad>", "</s>", "<unk>"])


def save_bart(folder: Path) -> Path:
    """Save a BART that forces <s> first and has a bias of the logits."""
    from transformers import BartForConditionalGeneration

    model = BartForConditionalGeneration(_bart_config("Bart"))
    model.generation_config.forced_bos_token_id = 0
    torch.nn.init.normal_(model.final_logits_bias)
    model.save_pretrained(folder)
    return _save_tokenizer(folder, ["<s>", "<pad>", "</s>", "<unk>"])


def save_mbart(folder: Path, *, start_id: int = 2) -> Path:
    """Save an mBART; start_id 2 makes it one of mBART-50's kind."""
    from transformers import MBartForConditionalGeneration

    config = _bart_config("MBart", decoder_start_token_id=start_id)
    MBartForConditionalGeneration(config).save_pretrained(folder)
    return _save_tokenizer(folder, ["<s>", "<pad>", "</s>", "<unk>"], LANGUAGES)


def _bart_config(kind: str, **settings: int):  # type: ignore[no-untyped-def]
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, f"{kind}Config")(
        vocab_size=40, d_model=12, encoder_layers=1, decoder_layers=1, encoder_attention_heads=3,
        decoder_attention_heads=3, encoder_ffn_dim=16, decoder_ffn_dim=16,
        max_position_embeddings=24, dropout=0.0, **settings,
    )  # fmt: skip


def _save_tokenizer(folder: Path, control: Sequence[str], languages: Sequence[str] = ()) -> Path:
    numbers = [str(i) for i in range(4)]
    vocab = {name: i for i, name in enumerate([*control, *WORDS, *numbers])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([*control, *languages])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


SPARSE = ["--attn", "entmax_adaptive", "--loss", "sparse_topk", "--objective.k", "4"]
SAVE = {"t5": save_t5, "bart": save_bart, "mbart": save_mbart}
LANGUAGE_FLAGS = ["--data.source-lang", LANGUAGES[0], "--data.target-lang", LANGUAGES[1]]


class Start:
    """A checkpoint, pairs, and a folder of runs; `arguments` are those of `train`."""

    def __init__(self, root: Path, family: str) -> None:
        self.family, self.runs = family, root / "runs"
        self.checkpoint = SAVE[family](root / family)
        self.pairs = write_pairs(root / "pairs.jsonl")

    def arguments(self, name: str, *extra: str) -> list[str]:
        """Return the command line of a run of 20 steps."""
        return [
            "train", "--init-from", str(self.checkpoint), "--runs-dir", str(self.runs),
            "--name", name, "--data.source", "files", "--data.train-file", str(self.pairs),
            "--data.max-source-length", "12", "--data.max-target-length", "6", "--metrics",
            "exact_match", "--train.steps", "20", "--train.eval-every", "10", "--train.save-every",
            "5", "--train.log-every", "5", "--data.batch-tokens", "200", "--optim.lr", "2e-2",
            "--optim.warmup-steps", "2", "--train.num-samples", "1",
            *(LANGUAGE_FLAGS if self.family == "mbart" else []), *extra,
        ]  # fmt: skip
