"""Train, evaluate and report a seq2seq transformer; the same as `sparseformer train`."""

import sys

from sparseformer.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]], prog="train.py"))
