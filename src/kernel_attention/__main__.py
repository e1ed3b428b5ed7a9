"""``python -m kernel_attention``."""

import sys

from kernel_attention.experiments.cli import main

sys.exit(main())
