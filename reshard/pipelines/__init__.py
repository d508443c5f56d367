"""Pipelines of diffusers: every part that has a plan is split, the others are carried over as they are.

    planning    which parts are split, which stay whole and why; nothing is written
    splitting   one folder with a split in the place of each split part, published by one rename
    merging     a split pipeline verified, and the pipeline again

A split part is an ordinary split with a manifest of its own, so `loader.load_model(OUT/transformer)` works too.
``pipeline.json`` (`manifests.pipeline`) is written last and names the key of every part and the hash of every other
file.
"""

from reshard.pipelines.merging import merge, verify
from reshard.pipelines.splitting import plan, split

__all__ = ["merge", "plan", "split", "verify"]
