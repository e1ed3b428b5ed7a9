"""Hardware paths of the mechanisms: the same numbers as :mod:`kernel_attention.functional`, sooner."""
