"""Arguments and TOML files: precedence, round trip, one sentence for every mistake."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparseformer.arguments import dump_toml, load_run_config, parse_config
from sparseformer.config import Config, DataConfig, TrainConfig
from sparseformer.errors import ConfigError


def _write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_flags_win_over_files_and_later_files_over_earlier_ones(tmp_path: Path) -> None:
    first = _write(tmp_path / "a.toml", 'attn = "topk"\n[train]\nsteps = 5\nlog_every = 7\n')
    second = _write(tmp_path / "b.toml", "[train]\nsteps = 6\nlog_every = 8\n")
    config, print_only = parse_config(
        ["--config", first, second, "--train.steps", "9", "--print-config"], "train.py"
    )
    assert (config.attn, config.train.steps, config.train.log_every) == ("topk", 9, 8)
    assert print_only


def test_a_file_can_turn_a_switch_off_again(tmp_path: Path) -> None:
    on = _write(tmp_path / "on.toml", "[train]\ntensorboard = true\n")
    off = _write(tmp_path / "off.toml", "[train]\ntensorboard = false\n")
    assert parse_config(["--config", on], "p")[0].train.tensorboard
    assert not parse_config(["--config", on, off], "p")[0].train.tensorboard


def test_dumped_toml_reads_back_equal(tmp_path: Path) -> None:
    config = Config(
        metrics=("bleu", "chrf"),
        data=DataConfig(source="files", train_file='a "b"\\c\n.tsv', source_prefix="über: "),
        train=TrainConfig(metric="bleu", patience=3, tensorboard=True),
    )
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(config), encoding="utf-8")
    assert load_run_config(path) == config


def test_underscores_and_equal_signs_are_accepted_in_flags() -> None:
    config, _ = parse_config(["--model.d_model=64", "--train.log_every", "3"], "p")
    assert (config.model.d_model, config.train.log_every) == (64, 3)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--train.stesp", "4"], ["--train.stesp", "--train.steps"]),
        (["--alpha", "1.2"], ["--alpha", "--model.alpha"]),
        (["--attn", "entmx"], ["entmx", "--attn", "did you mean entmax"]),
        (["--train.steps", "many"], ["--train.steps", "many"]),
        (["--train.steps", "3.5"], ["--train.steps", "3.5"]),
        (["--train.steps"], ["--train.steps"]),
        (["--config"], ["--config"]),
        (["stray"], ["stray"]),
        (["--model.alpha", "2.5"], ["model.alpha", "2.5", "[1, 2]"]),
        (["--model.alpha", "nan"], ["model.alpha", "nan", "[1, 2]"]),
        (["--objective.k", "0"], ["objective.k", "0", "1 or more"]),
        (["--model.num-heads", "3"], ["model.num_heads", "3", "divisor"]),
        (["--name", "a/b"], ["name", "a/b"]),
        (["--data.max-source-length", "900"], ["model.max_positions", "900"]),
        (["--train.metric", "bleu"], ["train.metric", "bleu", "exact_match"]),
        (["--train.patience", "x"], ["--train.patience", "x", "INT"]),
        (["--attn", "entmax_adaptive", "--model.alpha", "2"], ["model.alpha", "1.999"]),
        (["--model.decoder-attn", "entmax_adaptive", "--model.alpha", "1"], ["model.alpha"]),
        (["--loss", "entmax_adaptive", "--objective.alpha", "1"], ["objective.alpha", "1.001"]),
        (["--generation.max-length", "900"], ["model.max_positions", "generation.max_length"]),
        (["--generation.temperature", "1e-300"], ["generation.temperature"]),
        (["--optim.lr", "inf"], ["optim.lr", "finite"]),
        (["--seed", str(2**63)], ["seed"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_flag_is_one_sentence_with_the_remedy(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(argv, "train.py")
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data]\nsorce = 1\n", ["data.sorce", "data.source"]),
        ("[trian]\nsteps = 1\n", ["trian.steps", "train.steps"]),
        ('attn = "softmx"\n', ["softmx", "did you mean softmax"]),
        ("[train]\nsteps = 1.5\n", ["train.steps", "1.5", "a whole number"]),
        ("[train]\nsteps = [1, 2]\n", ["train.steps", "[1, 2]", "a whole number"]),
        ("[train]\ntensorboard = 1\n", ["train.tensorboard", "true or false"]),
        ("[train]\npatience = false\n", ["train.patience", "a whole number"]),
        ("seed = true\n", ["seed", "a whole number"]),
        ("name = 5\n", ["name", "a text"]),
        ('name = "a\\u0000b"\n', ["name", "a text"]),
        ('metrics = "bleu"\n', ["metrics", "a list"]),
        ("[train\n", ["not valid TOML"]),
    ],
)
def test_a_wrong_file_is_one_sentence_with_the_remedy(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = _write(tmp_path / "run.toml", text)
    with pytest.raises(ConfigError) as caught:
        parse_config(["--config", path], "train.py")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_values_may_begin_with_a_dash(tmp_path: Path) -> None:
    """A source prefix such as "-x" made a run folder that no verb could load."""
    path = _write(tmp_path / "run.toml", '[data]\nsource_prefix = "--attn"\n')
    assert load_run_config(Path(path)).data.source_prefix == "--attn"


def test_metric_defaults_to_the_first_of_metrics() -> None:
    config, _ = parse_config(["--metrics", "bleu", "chrf"], "p")
    assert config.selection_metric == "bleu"


def test_a_terminal_without_box_letters_gets_the_same_sentence() -> None:
    """The frame that tyro draws in ASCII was taken for a part of the message."""
    code = (
        "from sparseformer.cli import main; import sys; sys.exit(main(['train', '--attn', 'foo']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("sparseformer train: Invalid choice 'foo' for argument")
    assert "---" not in result.stderr


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        parse_config(["--config", str(tmp_path / "absent.toml")], "train.py")


def test_every_setting_has_a_default_that_is_valid() -> None:
    assert dataclasses.replace(Config()) == Config()
    assert parse_config([], "p")[0] == Config()
