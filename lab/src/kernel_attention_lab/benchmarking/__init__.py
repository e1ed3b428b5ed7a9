"""Time, memory and operations of attention layers: ours, and those that a user might take instead.

``run_benchmark`` measures a ``Plan``; ``SUITES`` are the plans whose figures the documentation
shows. ``measure_against`` compares two revisions of the code. The command is ``kernel-attention bench``.
"""

from kernel_attention_lab.benchmarking.contenders import contender_names, find_contender
from kernel_attention_lab.benchmarking.plans import Plan, Setting
from kernel_attention_lab.benchmarking.revisions import measure_against
from kernel_attention_lab.benchmarking.run import run_benchmark
from kernel_attention_lab.benchmarking.suites import SUITES, plan_from_options

__all__ = [
    "SUITES", "Plan", "Setting", "contender_names", "find_contender", "measure_against", "plan_from_options",
    "run_benchmark",
]  # fmt: skip
