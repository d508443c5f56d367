"""Run a model from the rank files of a split: map them, attach them, install the hooks.

    load_model      the whole job, for a model of transformers or diffusers
    load_pipeline   the same for a pipeline of diffusers
    open_shard      a rank's tensors by name, mapped, without a process group
    attach          give a module its rank's parameters
    install_hooks   put the collectives around the forwards of its sub-modules
    parallelize     cut a model that is in memory, in place

The package needs torch and `manifests`; transformers and diffusers are imported only where such a model is built.
"""

from loader.attaching import attach
from loader.hooks import install_hooks
from loader.models import load_model
from loader.parallel import parallelize
from loader.pipelines import load_pipeline
from loader.shard import Shard, open_shard

__all__ = ["Shard", "attach", "install_hooks", "load_model", "load_pipeline", "open_shard", "parallelize"]
