"""Sweeps: many points of one recipe, run by any number of processes. Needs the extra ``sweep``."""

from kernel_attention_lab.sweeping.plan import SweepPlan, make_plan, read_plan
from kernel_attention_lab.sweeping.report import resume_command, sweep_table, write_sweep_report
from kernel_attention_lab.sweeping.space import read_space
from kernel_attention_lab.sweeping.study import SweepFolder, SweepPoint, open_sweep, start_sweep
from kernel_attention_lab.sweeping.workers import join_sweep, run_sweep

__all__ = [
    "SweepFolder",
    "SweepPlan",
    "SweepPoint",
    "join_sweep",
    "make_plan",
    "open_sweep",
    "read_plan",
    "read_space",
    "resume_command",
    "run_sweep",
    "start_sweep",
    "sweep_table",
    "write_sweep_report",
]
