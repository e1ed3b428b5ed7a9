"""Image sets: their files and layouts, decoding and caching, batches, augmentation."""
