"""The command line, a file for each group of commands; their options are in the module ``options`` beside it.

Each command imports what it needs when it is called. So ``--help`` does not wait for torch, and a missing
extra ``train`` is reported in one line.
"""

from kernel_attention.experiments.cli.dispatch import main

__all__ = ["main"]
