"""The causal language model, its decoding and what it writes."""
