"""Fast forms of the mechanisms: the same numbers as ``kernel_attention.functional``, in less time."""
