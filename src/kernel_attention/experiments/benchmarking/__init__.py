"""Time, memory and operations of attention layers: ours, and those that a user might take instead.

``run_benchmark`` measures a ``Plan``; ``SUITES`` are the plans whose figures the documentation
shows. The command is ``kernel-attention bench``.
"""

from kernel_attention.experiments.benchmarking.contenders import contender_names, find_contender
from kernel_attention.experiments.benchmarking.options import plan_from_options
from kernel_attention.experiments.benchmarking.plans import Plan, Setting
from kernel_attention.experiments.benchmarking.run import run_benchmark
from kernel_attention.experiments.benchmarking.suites import SUITES

__all__ = [
    "SUITES", "Plan", "Setting", "contender_names", "find_contender", "plan_from_options", "run_benchmark",
]  # fmt: skip
