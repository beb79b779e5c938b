"""Break the kernels in one line each and see whether the tests notice.

    python tests/mutants.py [NAME ...]

Each mutant is applied to a copy of the checkout, where its tests must fail. Prints a table row for
each, and exits 1 if one survives. `tests/test_mutants.py` holds that each still applies.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    """One fault: a text that occurs once in a file, what it becomes, and the tests that look."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "no mask in the last tile",
        "kernels/entmax/forward.py",
        "mask = (rows < num_rows)[:, None] & (cols < length)[None, :]",
        "mask = (rows < num_rows)[:, None] & (cols < BLOCK_N)[None, :]",
        "tests/interpreter/test_entmax_rows.py",
    ),
    Mutant(
        "0 for a masked score, not -inf",
        "kernels/entmax/forward.py",
        'mask=mask, other=float("-inf")',
        "mask=mask, other=0.0",
        "tests/interpreter/test_entmax_rows.py",
    ),
    Mutant(
        "scale dropped",
        "kernels/entmax_attention/tiles.py",
        'input_precision="ieee", out_dtype=ACC) * scale',
        'input_precision="ieee", out_dtype=ACC)',
        "tests/interpreter/test_attention_forward.py",
    ),
    Mutant(
        "scale applied twice",
        "kernels/entmax_attention/backward_query.py",
        "            grad_query * scale,",
        "            grad_query * scale * scale,",
        "tests/interpreter/test_attention_backward.py",
    ),
    Mutant(
        "threshold one step short",
        "kernels/entmax/forward.py",
        "going = tl.where(steps < MAX_STEPS, tl.max(active.to(tl.int32)), 0)",
        "going = tl.where(steps < 2, tl.max(active.to(tl.int32)), 0)",
        "tests/interpreter/test_entmax_rows.py",
    ),
    Mutant(
        "no maximum subtracted",
        "kernels/entmax/forward.py",
        'y = scores - tl.where(maximum == float("-inf"), 0.0, maximum)',
        'y = scores - tl.where(maximum == float("-inf"), 0.0, 0.0 * maximum)',
        "tests/interpreter/test_entmax_rows.py",
    ),
    Mutant(
        "causal mask off by one",
        "kernels/entmax_attention/row_bounds.py",
        "(centre + arguments.right + 1)",
        "(centre + arguments.right)",
        "tests/interpreter/test_attention_forward.py",
    ),
    Mutant(
        "key length in the query mask",
        "kernels/entmax_attention/forward_device.py",
        "mask_m = offs_m < num_queries",
        "mask_m = offs_m < num_keys",
        "tests/interpreter/test_attention_forward.py",
    ),
    Mutant(
        "backward of p that doesn't sum to 1",
        "kernels/entmax_attention/tiles.py",
        "tile_powers(scores - threshold, eps, EPS, QUICK)",
        "tile_powers(scores - threshold + 0.01, eps, EPS, QUICK)",
        "tests/interpreter/test_attention_backward.py",
    ),
    Mutant(
        "sign of d alpha",
        "kernels/entmax_attention/backward_query.py",
        "alpha_sum += tl.sum(term * centred, 1)",
        "alpha_sum -= tl.sum(term * centred, 1)",
        "tests/interpreter/test_attention_backward.py",
    ),
    Mutant(
        "no series for a logarithm near 1",
        "kernels/entmax_attention/powers.py",
        "tl.where(tl.abs(gap) < NEAR_ONE, series, quick_log2(gap + 1.0))",
        "quick_log2(gap + 1.0)",
        "tests/interpreter/test_attention_powers.py",
    ),
    Mutant(
        "upstream gradient taken for contiguous",
        "kernels/entmax/backward.py",
        "grad_offsets = rows[:, None] * stride_grad_row + cols[None, :] * stride_grad_col",
        "grad_offsets = rows[:, None] * length + cols[None, :]",
        "tests/interpreter/test_entmax_row_gradients.py",
    ),
    Mutant(
        "offsets in int32",
        "kernels/sparse_loss/topk_kernel.py",
        "    row = tl.program_id(0).to(tl.int64)",
        "    row = tl.program_id(0)",
        "tests/interpreter/test_loss_top_k_kernel.py",
    ),
    Mutant(
        "sums in the dtype of the input",
        "kernels/sparse_loss/device.py",
        "sums += tl.where(present, values, 0.0)[:, None] * dense.to(tl.float32)",
        "sums = (sums + values[:, None] * dense.to(tl.float32)).to(dense.dtype).to(tl.float32)",
        "tests/interpreter/test_loss_products_kernel.py",
    ),
    Mutant(
        "target lookup without the border of the tile",
        "kernels/sparse_loss/linear.py",
        "inside = (places >= 0) & (places < scores.shape[-1])",
        "inside = places < scores.shape[-1]",
        "tests/functional/test_linear_losses.py",
    ),
)


def main(names: list[str]) -> int:
    """Run the named mutants, or all."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    print("| mutant | where | killed by |\n|---|---|---|")
    survivors = 0
    for mutant in chosen:
        killer = _killer(mutant)
        survivors += killer is None
        print(f"| {mutant.name} | {mutant.file} | {killer or 'SURVIVES'} |", flush=True)
    print(f"\n{len(chosen) - survivors} of {len(chosen)} killed")
    return 1 if survivors else 0


def _killer(mutant: Mutant) -> str | None:
    """Return the first test that fails, or that the process crashed; None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", "build", "runs", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        path = copy / mutant.file
        path.write_text(mutate(path.read_text(), mutant))
        interpreted = {"TRITON_INTERPRET": "1"} if "tests/interpreter" in mutant.tests else {}
        # The copy must come before the installed package.
        environment = {**os.environ, **interpreted, "PYTHONPATH": str(copy)}
        command = [sys.executable, "-m", "pytest", "-q", "-x", *mutant.tests.split()]
        found = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    failures = [line for line in found.stdout.splitlines() if line.startswith("FAILED")]
    if failures:
        return failures[0].removeprefix("FAILED ").split(" - ")[0]
    if found.returncode < 0:
        # Reading where nothing is.
        return f"{mutant.tests} (signal {-found.returncode})"
    assert found.returncode == 0, found.stdout[-2000:]
    return None


def mutate(text: str, mutant: Mutant) -> str:
    """Return the file's text with the fault in it."""
    count = text.count(mutant.old)
    assert count == 1, f"{mutant.name}: found {count} times in {mutant.file}: {mutant.old!r}"
    return text.replace(mutant.old, mutant.new)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
