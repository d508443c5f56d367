"""One rank of the tests of diffusers' models: loads splits and the peer's own shards, and tells what it found.

Started by `test_diffusers.py`, which made the models, the expected outputs and the splits, in four processes. What
was split for two ranks is run by the last two, in a group of their own.
"""

import datetime
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests.diffusers_own import HEADS, OWN_CONFIGS, OWN_INPUTS, random_tensors

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=30)
WORLD_SIZE = 4
DEGREES = (2, 4)

Outcome = dict[str, Any]


class Case(NamedTuple):
    """One model.

    Attributes:
        name: Its name, also of its folder.
        architecture: The class.
        config: Its configuration, beside what all cases of the class have.
        calls: The arguments of its forwards that differ from the first, which come one after the other.
    """

    name: str
    architecture: str
    config: dict[str, Any] = {}  # noqa: RUF012 - never changed
    calls: tuple[dict[str, Any], ...] = ({},)


CONFIGS: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": {
        **HEADS,
        "in_channels": 4,
        "num_layers": 2,
        "num_single_layers": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": [4, 4, 8],
    },
    "Flux2Transformer2DModel": {
        **HEADS,
        "in_channels": 4,
        "num_layers": 2,
        "num_single_layers": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": [4, 4, 4, 4],
    },
    "QwenImageTransformer2DModel": {
        **HEADS,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": [8, 4, 4],
    },
    "QwenImage21Transformer2DModel": {
        **HEADS,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 2,
        "context_in_dim": 16,
        "axes_dims_rope": [8, 4, 4],
    },
}

PLAIN = [
    Case("flux", "FluxTransformer2DModel"),
    Case("flux2", "Flux2Transformer2DModel"),
    Case("qwenimage", "QwenImageTransformer2DModel"),
    Case("qwenimage21", "QwenImage21Transformer2DModel"),
]
OTHER = [
    Case("flux-guidance", "FluxTransformer2DModel", {"guidance_embeds": True, "num_layers": 3, "num_single_layers": 1}),
    Case("flux-no-single", "FluxTransformer2DModel", {"num_single_layers": 0}),
    # The class makes 160 inner features of 2.51 * 64.
    Case("flux2-no-guidance", "Flux2Transformer2DModel", {"guidance_embeds": False, "mlp_ratio": 2.51}),
    Case("qwenimage-conditions", "QwenImageTransformer2DModel", {"zero_cond_t": True, "use_additional_t_cond": True}),
    Case("qwenimage-layers", "QwenImageTransformer2DModel", {"use_layer3d_rope": True, "num_layers": 1}),
    Case("qwenimage21-cached", "QwenImage21Transformer2DModel", calls=({"mode": "extract"}, {"mode": "cached"})),
    Case("qwenimage21-not-causal", "QwenImage21Transformer2DModel", {"causal_condition": False, "num_layers": 3}),
]
CONFIGS |= OWN_CONFIGS
OWN = [Case(name.partition("Transformer")[0].lower(), name) for name in OWN_CONFIGS]
"""Classes that have a plan of ours."""

CASES = [*PLAIN, *OTHER, *OWN]


FILM = Case("film", "T5FilmDecoder")
"""A class without a plan, whose attentions count their heads."""

CONFIGS[FILM.architecture] = {
    "input_dims": 6,
    "targets_length": 10,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 16,
    "d_ff": 48,
}
FILM_PLAN = {
    "plan": {
        **{f"decoders.*.layer.*.attention.{name}": "colwise" for name in ("to_q", "to_k", "to_v")},
        "decoders.*.layer.*.attention.to_out.0": "rowwise",
        "decoders.*.layer.*.DenseReluDense.wi_0": "colwise",
        "decoders.*.layer.*.DenseReluDense.wi_1": "colwise",
        "decoders.*.layer.*.DenseReluDense.wo": "rowwise",
    },
    "sizes": {"hd": "d_kv"},
    "attributes": {"decoders.*.layer.*.attention": {"heads": "H / tp"}},
}


def flux_inputs(config: dict[str, Any]) -> dict[str, Any]:
    image_ids = torch.zeros(16, 3)
    image_ids[:, 1], image_ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    guidance = {"guidance": torch.tensor([3.5, 4.0])} if config.get("guidance_embeds") else {}
    return {
        "hidden_states": random_tensors(2, 16, 4),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "pooled_projections": random_tensors(2, 32),
        "img_ids": image_ids,
        "txt_ids": torch.zeros(8, 3),
        "timestep": torch.tensor([1.0, 0.5]),
        **guidance,
    }


def flux2_inputs(config: dict[str, Any]) -> dict[str, Any]:
    one, four = torch.arange(1), torch.arange(4)
    guidance = {"guidance": torch.tensor([3.5, 4.0])} if config.get("guidance_embeds", True) else {}
    return {
        "hidden_states": random_tensors(2, 16, 4),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "img_ids": torch.cartesian_prod(one, four, four, one)[None].expand(2, -1, -1),
        "txt_ids": torch.cartesian_prod(one, one, one, torch.arange(8))[None].expand(2, -1, -1),
        "timestep": torch.tensor([1.0, 0.5]),
        **guidance,
    }


def qwenimage_inputs(config: dict[str, Any]) -> dict[str, Any]:
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 6:] = False
    condition = {"additional_t_cond": torch.tensor([1])} if config.get("use_additional_t_cond") else {}
    layers = 2 if config.get("use_layer3d_rope") else 1
    return {
        "hidden_states": random_tensors(2, 16 * layers, 16),
        "encoder_hidden_states": random_tensors(2, 8, 16),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([1.0, 0.5]),
        "img_shapes": [[(1, 4, 4)] * layers] * 2,
        **condition,
    }


def qwenimage21_inputs(config: dict[str, Any]) -> dict[str, Any]:
    slots = torch.zeros(2, 12, dtype=torch.bool)  # 8 tokens of text, then 4 slots of 2 x 2 image tokens
    slots[:, 8:] = True
    return {
        "hidden_states": random_tensors(2, 16, 16),
        "encoder_hidden_states": random_tensors(2, 8, 16),
        "timestep": torch.tensor([0.5]) if config.get("causal_condition", True) else torch.tensor([0.5, 0.25]),
        "img_shapes": [[(1, 4, 4)]] * 2,
        "img_mask": slots,
    }


def film_inputs(_: dict[str, Any]) -> dict[str, Any]:
    return {
        "encodings_and_masks": [(random_tensors(2, 5, 32), torch.ones(2, 5))],
        "decoder_input_tokens": random_tensors(2, 10, 6),
        "decoder_noise_time": torch.tensor([0.3, 0.5]),
    }


INPUTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "FluxTransformer2DModel": flux_inputs,
    "Flux2Transformer2DModel": flux2_inputs,
    "QwenImageTransformer2DModel": qwenimage_inputs,
    "QwenImage21Transformer2DModel": qwenimage21_inputs,
    "T5FilmDecoder": film_inputs,
    **OWN_INPUTS,
}


def outputs(model: Any, case: Case) -> dict[str, torch.Tensor]:
    """Return the outputs of a case's forwards, by their numbers."""
    cache: dict[str, Any] = {}
    found: dict[str, torch.Tensor] = {}
    for number, call in enumerate(case.calls):
        arguments = INPUTS[case.architecture](case.config)
        if mode := call.get("mode"):
            from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

            cache = cache or {"kv_cache": QwenImage21KVCache(CONFIGS[case.architecture]["num_layers"])}
            arguments |= cache | {"kv_cache_mode": mode}
        with torch.inference_mode():
            output = model(**arguments) if case is FILM else model(**arguments, return_dict=False)[0]
        found[str(number)] = output.contiguous()
    return found


class Collectives(TorchDispatchMode):
    """Counts the collectives that are started within it, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # counted by what it starts on plain tensors
        name = func.overloadpacket._qualified_op_name
        if name.startswith(("c10d::", "_c10d_functional::")) and "tensor" not in name:  # not the waiting and wrapping
            self.counts[name.partition("::")[2].strip("_").replace("_", "")] += 1
        return func(*args, **(kwargs or {}))


class Ranks(NamedTuple):
    """This process's group of as many ranks as a split is for."""

    degree: int
    group: Any
    mesh: Any

    @property
    def rank(self) -> int:
        """The rank in it."""
        return dist.get_rank(self.group)


def run_rank(folder: str, work_through: Callable[[Path], dict[str, Outcome]]) -> None:
    """Join the other ranks, work through a folder, and leave there what this rank found."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=COLLECTIVE_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=COLLECTIVE_TIMEOUT)
    found = work_through(Path(folder))
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def work_through(folder: Path) -> dict[str, Outcome]:
    """Return what this rank found, by the name of a case or check and the number of ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    prepare_peer()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "tp"))["tp"]
    four = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    found: dict[str, Outcome] = {}
    for ranks in (Ranks(4, four.get_group(), four), Ranks(2, pairs.get_group(), pairs)):
        if ranks.degree == 2 and dist.get_rank() < 2:
            break
        for case in PLAIN:
            found[f"{case.name} peer {ranks.degree}"] = attempt(compare_with_peer, case, folder, ranks)
        for case in CASES:
            found[f"{case.name} {ranks.degree}"] = attempt(run, case, folder, ranks)
        if ranks.degree == 2:
            for name, check in CHECKS.items():
                found[name] = attempt(check, PLAIN[0], folder, ranks)
    return found


def prepare_peer() -> None:
    """Let diffusers divide models on a CPU, which it knows of accelerators only."""
    import diffusers.hooks.tensor_parallel as peer

    peer._SUPPORTED_TP_DEVICES = (*peer._SUPPORTED_TP_DEVICES, "cpu")
    # The rank modulo the number of accelerators is taken before the kind of device is looked at.
    torch.accelerator.device_count = lambda: 1


def attempt(action: Any, *args: Any) -> Outcome:
    """Return an action's outcome, or its error as text."""
    try:
        return {"error": "", **action(*args)}
    except Exception:  # noqa: BLE001 - told to the test
        return {"error": traceback.format_exc()}


def load(case: Case, folder: Path, ranks: Ranks, **options: Any) -> Any:
    from loader import load_model

    return load_model(folder / f"{case.name}-tp{ranks.degree}", group=ranks.group, **options)


def difference(found: dict[str, torch.Tensor], folder: Path, case: Case) -> Outcome:
    """Compare outputs with those of one process."""
    expected = load_file(folder / f"{case.name}-expected.safetensors")
    assert found.keys() == expected.keys()
    return {
        "shapes": [list(found[name].shape) for name in found],
        "expected_shapes": [list(expected[name].shape) for name in found],
        "difference": max(float((found[name] - expected[name]).abs().max()) for name in found),
        "largest": max(float(tensor.abs().max()) for tensor in expected.values()),
        "finite": all(bool(tensor.isfinite().all()) for tensor in found.values()),
    }


def run(case: Case, folder: Path, ranks: Ranks) -> Outcome:
    """Compare a case's outputs with those of one process, and count collectives."""
    model = load(case, folder, ranks)
    with Collectives() as collectives:
        found = outputs(model, case)
    return {
        **difference(found, folder, case),
        "collectives": dict(collectives.counts),
        "class": type(model).__name__,
        "training": model.training,
    }


def compare_with_peer(case: Case, folder: Path, ranks: Ranks) -> Outcome:
    """Compare a rank's tensors with those that diffusers' own tensor parallelism holds, bit for bit."""
    import diffusers
    from torch.distributed.tensor import DTensor

    from loader import open_shard

    config = diffusers.TensorParallelConfig(mesh=ranks.mesh)
    model = getattr(diffusers, case.architecture).from_pretrained(folder / case.name, parallel_config=config).eval()
    peer = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
    shard = open_shard(folder / f"{case.name}-tp{ranks.degree}", ranks.rank)
    placements = {name: shard.manifest.tensors[name].placement for name in shard}
    # A bias that is counted once is rank 0's, where the peer adds it on every rank after the sum.
    summed = {name for name, placement in placements.items() if placement.partial}
    wanted = {n: torch.zeros_like(t) if n in summed and ranks.rank else t for n, t in peer.items()}
    with Collectives() as collectives:
        found = outputs(model, case)
    return {
        **difference(found, folder, case),
        "names": sorted(shard),
        "peer_names": sorted(peer),
        "different": [name for name in shard if not torch.equal(shard[name], wanted[name])],
        "summed": sorted(summed),
        "cut": sorted(name for name, placement in placements.items() if placement.cuts),
        "collectives": dict(collectives.counts),
    }


def run_compiled(case: Case, folder: Path, ranks: Ranks) -> Outcome:
    model = load(case, folder, ranks)
    return difference(outputs(torch.compile(model, backend="eager", fullgraph=True), case), folder, case)


def run_fused(case: Case, folder: Path, ranks: Ranks) -> Outcome:
    """Fuse the projections of a loaded model, which joins the rank's own rows."""
    model = load(case, folder, ranks)
    model.fuse_qkv_projections()
    fused = model.transformer_blocks[0].attn.to_qkv.weight
    return {**difference(outputs(model, case), folder, case), "fused": list(fused.shape)}


def run_from_fused(case: Case, folder: Path, ranks: Ranks) -> Outcome:
    """Run the split of a checkpoint that holds fused projections beside the others."""
    return difference(outputs(load(case._replace(name="fused"), folder, ranks), case), folder, case)


def run_own_plan(_: Case, folder: Path, ranks: Ranks) -> Outcome:
    """Run a class that the catalogue does not know, split by a plan of one's own."""
    model = load(FILM, folder, ranks)
    heads = [model.decoders[1].layer[at].attention.heads for at in (0, 1)]
    return {**difference(outputs(model, FILM), folder, FILM), "heads": heads}


def run_layerwise(case: Case, folder: Path, ranks: Ranks) -> Outcome:
    """Store the weights in fewer bits, as one process does."""
    import diffusers

    whole = getattr(diffusers, case.architecture).from_pretrained(folder / case.name)
    model = load(case, folder, ranks)
    for each in (whole, model):
        each.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    expected, found = outputs(whole, case)["0"], outputs(model, case)["0"]
    return {
        "difference": float((found - expected).abs().max()),
        "largest": float(expected.abs().max()),
        "stored": str(model.transformer_blocks[0].attn.to_q.weight.dtype),
    }


def run_converted(case: Case, folder: Path, ranks: Ranks) -> Outcome:
    """Load as bfloat16, and with a part that the class wants in float32."""
    import diffusers

    cls = getattr(diffusers, case.architecture)
    model = load(case, folder, ranks, dtype="bfloat16")
    cls._keep_in_fp32_modules = ["proj_out"]
    try:
        kept = load(case, folder, ranks, dtype="bfloat16")
    finally:
        cls._keep_in_fp32_modules = None
    return {
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "kept": sorted(n for n, parameter in kept.named_parameters() if parameter.dtype == torch.float32),
    }


def call_what_is_refused(case: Case, folder: Path, ranks: Ranks) -> Outcome:
    """Return the messages of the methods that are refused."""
    import diffusers

    from manifests.errors import LoadError

    model = load(case, folder, ranks)
    calls: dict[str, Callable[[], object]] = {
        "save_pretrained": lambda: model.save_pretrained(folder / "saved"),
        "load_lora_adapter": lambda: model.load_lora_adapter({}),
        "add_adapter": lambda: model.add_adapter(None),
        "_load_ip_adapter_weights": lambda: model._load_ip_adapter_weights([]),
        "enable_parallelism": lambda: model.enable_parallelism(config=diffusers.TensorParallelConfig(tp_degree=2)),
        "enable_group_offload": lambda: model.enable_group_offload(torch.device("cpu")),
        "load_state_dict": lambda: model.load_state_dict({}),
    }
    messages: dict[str, str] = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = ""
        except LoadError as error:
            messages[name] = str(error)
    return {"messages": messages}


CHECKS = {
    "compiled": run_compiled,
    "fused after loading": run_fused,
    "fused before splitting": run_from_fused,
    "own plan": run_own_plan,
    "layerwise": run_layerwise,
    "converted": run_converted,
    "refused": call_what_is_refused,
}


if __name__ == "__main__":
    run_rank(sys.argv[1], work_through)
