"""Errors that a user can mend: one sentence with the remedy, and the exit code of each kind."""


class SparseformerError(Exception):
    """The root of the errors that the command line prints as one sentence, without a traceback."""

    exit_code = 1


class ConfigError(SparseformerError, ValueError):
    """A flag, a TOML key or a value that can't be used, or a missing extra."""

    exit_code = 2


class NumericError(SparseformerError, ArithmeticError):
    """The loss or the gradients stopped being finite."""

    exit_code = 3


class DataError(SparseformerError, ValueError):
    """A data file, a column or a row that can't be used."""

    exit_code = 4


class CheckpointError(SparseformerError, OSError):
    """A checkpoint or a disk that can't be read or written."""

    exit_code = 5
