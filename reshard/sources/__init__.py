"""Where checkpoints are read from: a folder, the hub."""
