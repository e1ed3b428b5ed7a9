"""Images with a class for every pixel: sets, caching, crops and batches."""
