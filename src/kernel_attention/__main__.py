"""``python -m kernel_attention`` is the command ``kernel-attention``."""

import sys

from kernel_attention.experiments.cli import main

sys.exit(main())
