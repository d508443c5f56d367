"""Several processes share one split, as torchrun starts them."""
