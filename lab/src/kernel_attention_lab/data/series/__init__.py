"""Time series: the `.ts` format, sets by name, users' arrays, padded batches."""
