"""Hardware paths of the mechanisms: the same numbers as ``kernel_attention.functional``, sooner."""
