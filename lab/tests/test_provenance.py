"""A record names the processor on which a model was trained."""

from __future__ import annotations

import os
import platform

import torch

from kernel_attention_lab.provenance import processor_name
from kernel_attention_lab.runs.run import machine

DESCRIBED = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz

processor\t: 1
model name\t: another one
"""


def test_the_model_that_linux_describes(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(DESCRIBED)
    assert processor_name(path) == "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"


def test_a_system_that_names_no_model(tmp_path):
    path = tmp_path / "cpuinfo"
    expected = platform.processor() or platform.machine()
    assert processor_name(path) == expected
    path.write_text("processor\t: 0\nmodel name\t:\nBogoMIPS\t: 243.75\n")
    assert processor_name(path) == expected


def test_the_line_of_a_record():
    name, cores, threads, *accelerator = machine().rsplit(", ", 3)
    assert name == processor_name()
    assert cores == f"{os.cpu_count()} cores"
    assert threads.split()[0] == str(torch.get_num_threads())
    assert accelerator
