"""The command line: train, evaluate, generate, inspect, export, data."""

import dataclasses
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sparseformer import __version__
from sparseformer.arguments import dump_toml, parse_config, parse_dataclass
from sparseformer.config import DataConfig, GenerationConfig, MetricName, SourceName
from sparseformer.errors import ConfigError, DataError, SparseformerError

if TYPE_CHECKING:
    from rich.console import Console

_USAGE = """\
usage: sparseformer VERB [OPTIONS]

  train                train, evaluate and report one run; the same command resumes it
  evaluate RUN         evaluate the best weights of a run folder
  generate RUN [TEXT]  write outputs for the texts, or for the lines of standard input
  inspect RUN          show what each head's alpha became; --html writes report.html
  export RUN --to DIR  write a fine-tuned checkpoint in the format that it was published in
  data SOURCE          build or check a source of pairs, and print its counts

`sparseformer VERB --help` lists the options of a verb."""


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run one verb and return the process's exit code.

    Args:
        argv: the verb and its arguments; None takes those of the process.
        prog: the command that messages name; None means `sparseformer VERB`.

    Returns:
        0 done, 2 usage or configuration, 3 numeric, 4 data, 5 checkpoint or disk, 130 Ctrl-C,
        143 terminated.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"sparseformer {__version__}")
        return 0
    verb, rest = arguments[0], arguments[1:]
    prog = prog or f"sparseformer {verb}"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal that can't show a letter shows its code instead
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _verb(verb)(rest, prog)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # the reader is gone; what is still buffered would raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SparseformerError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted; nothing since the last checkpoint is kept", file=sys.stderr)
        return 130
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        print(
            f"{prog}: {error.strerror}{place}; mend that and run the same command again.",
            file=sys.stderr,
        )
        return 5
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0


def train(argv: Sequence[str], prog: str) -> int:
    """`sparseformer train`."""
    config, print_only = parse_config(argv, prog)
    if print_only:
        print(dump_toml(config), end="")
        return 0
    from sparseformer.training.trainer import train as train_run

    return train_run(config, _console())


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Evaluate the best weights of a run folder."""

    split: Literal["validation", "test"] = "test"
    metrics: tuple[MetricName, ...] = ("exact_match", "per", "chrf")
    allow_changed_data: bool = False
    """Go on although the data are no longer those that the run was trained on."""
    generation: GenerationConfig = dataclasses.field(default_factory=GenerationConfig)


def evaluate(argv: Sequence[str], prog: str) -> int:
    """`sparseformer evaluate RUN`."""
    run_dir, rest = _run_argument(argv, prog, EvaluateOptions)
    from sparseformer.inspection import results_table
    from sparseformer.training.load_run import evaluate_split, load_run

    run = load_run(run_dir)
    defaults = EvaluateOptions(metrics=run.config.metrics, generation=run.config.generation)
    options = parse_dataclass(EvaluateOptions, rest, prog, default=defaults)
    config = dataclasses.replace(
        run.config,
        metrics=options.metrics,
        generation=options.generation,
        train=dataclasses.replace(run.config.train, metric=None),
        allow_changed_data=options.allow_changed_data or run.config.allow_changed_data,
    )
    evaluation = evaluate_split(run._replace(config=config), options.split)
    _console().print(results_table({options.split: evaluation.metrics}))
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Write one output per text, in order, to standard output."""

    generation: GenerationConfig = dataclasses.field(default_factory=GenerationConfig)


def generate(argv: Sequence[str], prog: str) -> int:
    """`sparseformer generate RUN [TEXT ...]`."""
    run_dir, rest = _run_argument(argv, prog, GenerateOptions)
    texts, flags = _leading_texts(rest)
    from sparseformer.training.load_run import generate_outputs, load_run

    run = load_run(run_dir)
    defaults = GenerateOptions(generation=run.config.generation)
    options = parse_dataclass(GenerateOptions, flags, prog, default=defaults)
    config = dataclasses.replace(run.config, generation=options.generation)
    texts = _as_utf8([os.fsencode(text) for text in texts] or _standard_input())
    run = run._replace(config=config)
    for output in generate_outputs(run, texts, warn=lambda text: print(text, file=sys.stderr)):
        print(output)
    return 0


def _standard_input() -> list[bytes]:
    content = sys.stdin.buffer.read()
    return content.removesuffix(b"\n").split(b"\n") if content else []


def _as_utf8(texts: list[bytes]) -> list[str]:
    try:
        return [text.decode("utf-8").rstrip("\r") for text in texts]
    except UnicodeDecodeError as error:
        place = texts.index(error.object) + 1
        raise DataError(
            f"Text {place} is not UTF-8; convert it first, for example with iconv."
        ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Show the figures of a run, and what each head's alpha and density became."""

    html: bool = False
    """Also write report.html into the run folder (extra `report`)."""


def inspect(argv: Sequence[str], prog: str) -> int:
    """`sparseformer inspect RUN`."""
    run_dir, rest = _run_argument(argv, prog, InspectOptions)
    options = parse_dataclass(InspectOptions, rest, prog)
    from sparseformer.inspection import print_run, write_report

    console = _console()
    print_run(run_dir, console)
    if options.html:
        console.print(f"wrote {write_report(run_dir)}")
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write the best weights of a run in the format of the checkpoint that it was built on."""

    to: str
    """The folder to write; new or empty."""


def export(argv: Sequence[str], prog: str) -> int:
    """`sparseformer export RUN --to FOLDER`."""
    run_dir, rest = _run_argument(argv, prog, ExportOptions)
    options = parse_dataclass(ExportOptions, rest, prog)
    from sparseformer.training.export import export_run

    _console().print(export_run(run_dir, Path(options.to)), markup=False)
    return 0


def data(argv: Sequence[str], prog: str) -> int:
    """`sparseformer data SOURCE`."""
    from typing import get_args

    if not argv or argv[0].startswith("-"):
        parse_dataclass(DataConfig, [flag for flag in argv if flag in ("-h", "--help")], prog)
        raise ConfigError(f"Say which source: {', '.join(get_args(SourceName))}.")
    config = parse_dataclass(DataConfig, ["--source", *argv], prog)
    from sparseformer.data import describe, load_dataset

    _console().print(describe(load_dataset(config, seed=1)))
    return 0


def _verb(name: str) -> Callable[[Sequence[str], str], int]:
    verbs = {f.__name__: f for f in (train, evaluate, generate, inspect, export, data)}
    if name not in verbs:
        import difflib

        nearest = difflib.get_close_matches(name, verbs, n=1, cutoff=0.3)
        hint = f"did you mean {nearest[0]}" if nearest else f"the verbs are {', '.join(verbs)}"
        raise ConfigError(f"There is no verb {name!r}; {hint}?")
    return verbs[name]


def _run_argument(argv: Sequence[str], prog: str, options: type) -> tuple[Path, list[str]]:
    """Split the run folder off the arguments; without one, answer --help or refuse."""
    if not argv or argv[0].startswith("-"):
        parse_dataclass(options, [flag for flag in argv if flag in ("-h", "--help")], prog)
        raise ConfigError(f"Say which run folder: {prog} RUN.")
    return Path(argv[0]), list(argv[1:])


def _leading_texts(arguments: list[str]) -> tuple[list[str], list[str]]:
    first_flag = next(
        (i for i, argument in enumerate(arguments) if argument.startswith("--")), len(arguments)
    )
    return arguments[:first_flag], arguments[first_flag:]


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())
