"""What run folders show, also when they are unfinished or broken."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table

from sparseformer.config import ModelConfig
from sparseformer.errors import CheckpointError, ConfigError
from sparseformer.inspection import (
    Head,
    alpha_history,
    alpha_table,
    density_history,
    density_table,
    print_run,
    read_run,
    results_table,
    write_report,
)
from sparseformer.inspection.figures import curves

ALPHA = {"encoder_self": [[1.25, 1.5]], "cross": [[1.0, 2.0], [1.75, 1.1]]}
RESULTS = {
    "test": {"loss": 0.51234, "exact_match": 85.5},
    "validation": {"loss": 0.5, "exact_match": 86.0},
    "baseline": {"exact_match": 80.25},
    "alpha": ALPHA,
    "density": {"encoder_self": [[0.5, None]]},
    "train": {"steps": 20, "seconds": 12.5, "tokens_per_second": 900.0, "parameters": 123456},
}
METRICS = [
    {"step": 10, "loss": 2.5, "alpha": {"cross": [[1.5, 1.6]]}, "density": {"cross": [[1.0, 0.9]]}},
    {"step": 10, "validation": {"loss": 2.25, "exact_match": 10.0}, "is_best": True},
    {"step": 20, "loss": "NaN", "alpha": {"cross": [[1.4, 1.7]]}, "density": None},
]
PREDICTIONS = [{"src": f"s{i}", "tgt": f"t{i}", "prediction": f"p{i}"} for i in range(10)]
EVIL = '</script><img src=x onerror="alert(1)">'


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "config.toml").write_text('attn = "entmax"\n[train]\nsteps = 20\nnum_samples = 3\n')
    write_lines(folder / "metrics.jsonl", METRICS)
    (folder / "results.json").write_text(json.dumps(RESULTS))
    write_lines(folder / "predictions.jsonl", PREDICTIONS)
    return folder


def write_lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def rendered(table: Table) -> list[list[str]]:
    """Return the cells of every line that holds a digit."""
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    lines = console.file.getvalue().splitlines()
    rows = [re.split(r"\s*[\u2502\u2503]\s*", line.strip(" \u2502\u2503")) for line in lines]
    return [row for row in rows if len(row) > 1]


def test_alpha_table_has_a_row_per_layer_and_a_column_per_head() -> None:
    assert rendered(alpha_table(ALPHA)) == [
        ["attention", "head 1", "head 2"],
        ["encoder_self 1", "1.250", "1.500"],
        ["cross 1", "1.000", "2.000"],
        ["cross 2", "1.750", "1.100"],
    ]


def test_density_table_shows_heads_that_saw_no_key() -> None:
    assert rendered(density_table(RESULTS["density"]))[1:] == [["encoder_self 1", "50.0%", "-"]]


def test_results_table_puts_splits_side_by_side() -> None:
    assert rendered(results_table(RESULTS)) == [
        ["metric", "validation", "test", "baseline"],
        ["loss", "0.5000", "0.5123", "-"],
        ["exact_match", "86.00", "85.50", "80.25"],
    ]


def test_results_table_of_one_split() -> None:
    table = results_table({"test": {"exact_match": 50.0}})
    assert rendered(table) == [["metric", "test"], ["exact_match", "50.00"]]


def test_histories_are_per_head_and_by_step(run_dir: Path) -> None:
    alphas = alpha_history(run_dir / "metrics.jsonl")
    assert alphas == {
        Head("cross", 1, 1): [(10, 1.5), (20, 1.4)],
        Head("cross", 1, 2): [(10, 1.6), (20, 1.7)],
    }
    assert density_history(run_dir / "metrics.jsonl")[Head("cross", 1, 2)] == [(10, 0.9)]


def test_print_run_shows_figures_and_alphas(run_dir: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    print_run(run_dir, console)
    text = console.file.getvalue()
    assert all(part in text for part in ("80.25", "1.750", "50.0%"))


def test_a_run_in_training_shows_its_last_logged_step(run_dir: Path) -> None:
    (run_dir / "results.json").unlink()
    (run_dir / "predictions.jsonl").unlink()
    console = Console(file=io.StringIO(), width=120)
    print_run(run_dir, console)
    text = console.file.getvalue()
    assert "has no results yet" in text
    assert "1.700" in text, "alpha of step 20"
    assert "90.0%" in text, "density of step 10, as step 20 has none"
    assert write_report(run_dir).exists()


def test_loss_curve_holds_training_and_validation(run_dir: Path) -> None:
    loss, validation, alpha, density = curves(read_run(run_dir).metrics)
    assert loss.lines["training"] == [(10, 2.5), (20, pytest.approx(float("nan"), nan_ok=True))]
    assert loss.lines["validation"] == [(10, 2.25)]
    assert validation.lines == {"exact_match": [(10, 10.0)]}
    assert alpha.title == "Alpha: cross-attention"
    assert list(alpha.lines) == ["layer 1 head 1", "layer 1 head 2"]
    assert density.y_range == (-0.02, 1.02)


def test_report_is_one_file_with_everything(run_dir: Path) -> None:
    path = write_report(run_dir)
    text = path.read_text(encoding="utf-8")
    assert path == run_dir / "report.html"
    assert not list(run_dir.glob("*.tmp"))
    assert text.count("plotly.js v") == 1, "plotly's script comes once, and in the file"
    assert not re.search(r"<(script|link|img)[^>]* (src|href)=", text), "needs the network"
    for part in ("<h1>demo</h1>", "85.50", "123,456", "layer 1 head 2", "Loss per target token"):
        assert part in text
    assert re.findall(r"<td>p\d</td>", text) == ["<td>p0</td>", "<td>p3</td>", "<td>p6</td>"]


def test_report_escapes_every_text(run_dir: Path) -> None:
    write_lines(
        run_dir / "predictions.jsonl", [PREDICTIONS[0] | {"src": EVIL, "tgt": EVIL, EVIL: EVIL}]
    )
    settings = f"name = '{EVIL}'\n['{EVIL}']\nkey = '{EVIL}'\n[train]\nnum_samples = 1\n"
    (run_dir / "config.toml").write_text(settings)
    evil_metrics = {"step": 1, "validation": {EVIL: 1.0}, "alpha": {EVIL: [[1.5]]}}
    write_lines(run_dir / "metrics.jsonl", [evil_metrics])
    results = RESULTS | {"test": {EVIL: 1.0}, "train": RESULTS["train"] | {EVIL: 1.0}}
    (run_dir / "results.json").write_text(json.dumps(results))
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert "<img src=x" not in text
    assert text.count("&lt;img src=x") > 8


def test_a_line_that_a_crash_cut_short_is_left_out(run_dir: Path) -> None:
    whole = read_run(run_dir).metrics
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "lo')
    assert len(whole) == 3
    assert len(read_run(run_dir).metrics) == 3


def test_a_last_line_without_line_break_counts(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30}')
    assert read_run(run_dir).metrics[-1] == {"step": 30}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.toml", "a = ", "config.toml is not TOML"),
        ("config.toml", "a = 1", "config.toml lacks train.num_samples"),
        ("metrics.jsonl", '{"step": 1}\n{oops\n{"step": 2}\n', "metrics.jsonl line 2 is not JSON"),
        ("metrics.jsonl", '{"loss": 1}\n', "metrics.jsonl has a line without a step"),
        ("results.json", '{"test": {}}', "results.json lacks the table 'validation'"),
        ("results.json", "[1]", "results.json is not a JSON object"),
        ("results.json", "[" * 100_000, "results.json is not JSON"),
        ("predictions.jsonl", "\n\ud800\n", "Can't read .*predictions.jsonl"),
    ],
    ids=str,
)
def test_a_broken_run_folder_is_named(
    run_dir: Path, name: str, content: str | None, message: str
) -> None:
    (run_dir / name).unlink()
    if content is not None:
        (run_dir / name).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match=message):
        write_report(run_dir)


def _changed(part: str, value: object) -> str:
    return json.dumps(RESULTS | {part: value})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(_changed("train", {}), "no number in train.steps", id="empty-train"),
        pytest.param(
            _changed("train", RESULTS["train"] | {"seconds": None}), "train.seconds", id="no-time"
        ),
        pytest.param(
            _changed("train", RESULTS["train"] | {"best_step": "x"}), "train.best_step", id="text"
        ),
        pytest.param(_changed("test", {"loss": "low"}), "no number in test.loss", id="metric"),
        pytest.param(_changed("baseline", {"bleu": True}), "baseline.bleu", id="boolean"),
        pytest.param(_changed("alpha", {"cross": [1.5]}), "head in 'alpha'", id="flat-alpha"),
        pytest.param(_changed("alpha", {"cross": [["a"]]}), "head in 'alpha'", id="alpha-text"),
        pytest.param(_changed("density", [0.5]), "head in 'density'", id="density-list"),
    ],
)
def test_results_of_another_shape_are_refused(run_dir: Path, content: str, message: str) -> None:
    """`"train": {}` passed as results, and the trainer and the tables ended in a KeyError."""
    (run_dir / "results.json").write_text(content)
    remedy = "; delete it and run the same command again"
    with pytest.raises(CheckpointError, match=f"results.json .*{message}{remedy}"):
        read_run(run_dir)


def test_figures_that_are_null_are_dashes(run_dir: Path) -> None:
    """A loss that is not finite is null in results.json; a strict check must not refuse it."""
    train = RESULTS["train"] | {"best_step": None}
    changed = RESULTS | {"test": {"loss": None}, "train": train}
    (run_dir / "results.json").write_text(json.dumps(changed))
    assert "<td>-</td>" in write_report(run_dir).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["src", "tgt", "prediction"])
def test_predictions_without_their_texts_are_refused(run_dir: Path, name: str) -> None:
    """A row without a prediction was a KeyError in the table of samples."""
    write_lines(run_dir / "predictions.jsonl", [PREDICTIONS[0], PREDICTIONS[1] | {name: None}])
    with pytest.raises(CheckpointError, match=f"predictions.jsonl has no text '{name}' in row 2"):
        read_run(run_dir)


def test_alphas_of_another_shape_in_the_log_are_refused(run_dir: Path) -> None:
    """A flat list of alphas was an AttributeError in the report."""
    write_lines(run_dir / "metrics.jsonl", [{"step": 7, "alpha": [1.5]}])
    with pytest.raises(CheckpointError, match=r"metrics.jsonl .* 'alpha' of step 7"):
        read_run(run_dir)


def test_a_run_without_logged_steps_is_readable(run_dir: Path) -> None:
    """Without metrics.jsonl a whole run was called `not the folder of a run`."""
    (run_dir / "metrics.jsonl").unlink()
    assert read_run(run_dir).metrics == []
    assert write_report(run_dir).exists()


def test_a_folder_without_config_is_a_usage_error(run_dir: Path) -> None:
    """It was exit code 5, as if the disk were broken; the other verbs say 2."""
    (run_dir / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"is not a run folder: it has no config.toml"):
        read_run(run_dir)


def test_a_folder_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a folder; pass the folder of a run"):
        read_run(tmp_path / "nowhere")


def test_a_report_that_cannot_be_written_is_named(run_dir: Path) -> None:
    (run_dir / "report.html").mkdir()
    with pytest.raises(CheckpointError, match=r"Can't write .*report.html"):
        write_report(run_dir)
    assert not list(run_dir.glob("*.tmp"))


def test_report_without_plotly_names_the_extra(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=r'pip install "sparseformer\[report\]"'):
        write_report(run_dir)


@pytest.mark.parametrize("attn", ["softmax", "entmax_adaptive", "topk"])
def test_attention_maps_are_probabilities_over_visible_keys(attn: str) -> None:
    from sparseformer.inspection.attention import attention_maps
    from sparseformer.nn import Seq2SeqTransformer

    torch.manual_seed(0)
    config = ModelConfig(
        d_model=16, num_heads=4, num_kv_heads=2, ffn_dim=16, encoder_layers=1, decoder_layers=2,
        attn_k=2,
    )  # fmt: skip
    model = Seq2SeqTransformer(config, 9, attn=attn)
    src, tokens = torch.randint(3, 9, (2, 5)), torch.randint(3, 9, (2, 4))
    maps = attention_maps(model, src, torch.tensor([5, 3]), tokens)
    assert {name: [tuple(m.shape) for m in layers] for name, layers in maps.items()} == {
        "encoder_self": [(2, 4, 5, 5)],
        "decoder_self": [(2, 4, 4, 4)] * 2,
        "cross": [(2, 4, 4, 5)] * 2,
    }
    for layer in (*maps["encoder_self"], *maps["decoder_self"], *maps["cross"]):
        torch.testing.assert_close(layer.sum(-1), torch.ones(layer.shape[:-1]))
    assert (maps["cross"][0][1, :, :, 3:] == 0).all(), "padding is seen"
    assert (maps["decoder_self"][0].triu(1) == 0).all(), "the future is seen"
    if attn == "topk":
        assert ((maps["encoder_self"][0] > 0).sum(-1) == 2).all()
    assert model.training
