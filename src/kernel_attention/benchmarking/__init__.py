"""Time, memory and operations of attention layers, ours beside what a user would pick instead.

:func:`run_benchmark` measures a :class:`Plan`; :data:`SUITES` are the plans whose figures the documentation
shows. On the command line: ``kernel-attention bench``.
"""

from kernel_attention.benchmarking.contenders import contender_names, find_contender
from kernel_attention.benchmarking.options import plan_from_options
from kernel_attention.benchmarking.plans import Plan, Setting
from kernel_attention.benchmarking.run import run_benchmark
from kernel_attention.benchmarking.suites import SUITES

__all__ = [
    "SUITES", "Plan", "Setting", "contender_names", "find_contender", "plan_from_options", "run_benchmark",
]  # fmt: skip
