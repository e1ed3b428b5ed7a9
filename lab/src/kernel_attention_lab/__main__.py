"""``python -m kernel_attention_lab`` is the command ``kernel-attention``."""

import sys

from kernel_attention_lab.cli import main

sys.exit(main())
