"""Recorded episodes of control tasks: sets, files of other formats, and the batches of a policy."""
