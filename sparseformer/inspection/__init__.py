"""What a run became: its figures, each head's alpha, how sparse its attention is.

Reading a run folder needs no torch, so `attention_maps`, which looks into a model, is imported from
`sparseformer.inspection.attention`.
"""

from sparseformer.inspection.history import Head, alpha_history, density_history
from sparseformer.inspection.report import write_report
from sparseformer.inspection.run_folder import RunRecord, read_run
from sparseformer.inspection.tables import alpha_table, density_table, print_run, results_table

__all__ = [
    "Head",
    "RunRecord",
    "alpha_history",
    "alpha_table",
    "density_history",
    "density_table",
    "print_run",
    "read_run",
    "results_table",
    "write_report",
]
