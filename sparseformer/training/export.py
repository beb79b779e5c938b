"""Write the weights of a run in the format of the published checkpoint that it was built on."""

from pathlib import Path

from sparseformer.errors import ConfigError
from sparseformer.pretrained import attention_of, save_pretrained
from sparseformer.training.load_run import load_run


def export_run(run_dir: Path, folder: Path) -> str:
    """Save the best weights of a run as its checkpoint was; with softmax, transformers loads them.

    Args:
        run_dir: a run that was fine-tuned from a published checkpoint.
        folder: where to write; it must be new or empty.

    Returns:
        One sentence on what can load the folder.

    Raises:
        ConfigError: the run has another origin, or the folder isn't empty.
        CheckpointError: the run has no usable checkpoint, or the disk refuses a file.
    """
    run = load_run(run_dir)
    if run.published is None:
        raise ConfigError(
            f"{run_dir} wasn't fine-tuned from a published checkpoint, so there is no format to "
            "export it to; load it with sparseformer.training.load_run.load_run."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder; choose another one with --to.")
    model = run.module.model.cpu()
    save_pretrained(model, folder, like=run.published, tokenizer=run.tokenizer)
    if set(attention_of(model)) == {"softmax"}:
        return f"wrote {folder}; transformers and --init-from load it"
    return (
        f"wrote {folder}; its attention isn't softmax, so sparseformer.pretrained.load_pretrained "
        "and --init-from load it, and transformers doesn't"
    )
