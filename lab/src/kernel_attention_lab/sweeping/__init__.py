"""Sweeps: many points of one recipe, run by any number of processes. Needs the extra ``sweep``."""

from kernel_attention_lab.sweeping.plan import SweepPlan, make_plan, read_plan
from kernel_attention_lab.sweeping.run import join_sweep, run_sweep, sweep_record
from kernel_attention_lab.sweeping.space import Choices, Range, read_space
from kernel_attention_lab.sweeping.study import SweepFolder, open_sweep, start_sweep
from kernel_attention_lab.sweeping.worker import work

__all__ = [
    "Choices",
    "Range",
    "SweepFolder",
    "SweepPlan",
    "join_sweep",
    "make_plan",
    "open_sweep",
    "read_plan",
    "read_space",
    "run_sweep",
    "start_sweep",
    "sweep_record",
    "work",
]
