"""Loading a pipeline of diffusers at tp 2: ready, ready and a forward of its models, memory of a rank."""

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from tools.bench.common import MIB, MODELS, ROOT, Options, middle, ratio, rows, warm
from tools.bench.ranks import Ranks

TP = 2
LABELS = {
    "reshard": "`loader.load_pipeline`",
    "shard on read": "diffusers, divided while it is read (`parallel_config`)",
    "enable_parallelism": "diffusers, divided when it is loaded (`enable_parallelism`)",
}


def run(options: Options) -> dict[str, Any]:
    """Take all samples."""
    source = _pipeline(small=options.small)
    split = _split(source)
    folders = dict.fromkeys(LABELS, source) | {"reshard": split}
    samples: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with Ranks("tools.bench.pipeline_worker", TP) as ranks:
        for folder in (source, split):
            warm(folder)
        for number in range(options.rounds + 1):
            for contender, folder in folders.items():
                found = ranks.measure({"contender": contender, "folder": str(folder), "first": number == 0})
                if number:
                    samples[contender].append({key: max(each[key] for each in found) for key in found[0]})
    nbytes = sum(path.stat().st_size for path in source.rglob("*.safetensors"))
    return {"samples": samples, "nbytes": nbytes}


def _pipeline(*, small: bool) -> Path:
    """Return a pipeline of the shape of FLUX.2, with random weights, made if it is not there.

    Of FLUX.2 [dev] the transformer has 32 billion parameters in 8 and 48 blocks, the text encoder 24 billion.
    """
    folder = MODELS / ("pipeline-small" if small else "pipeline")
    if (folder / "model_index.json").exists():
        return folder
    import diffusers
    import torch
    import transformers

    heads, layers, width = (2, 1, 64) if small else (8, 2, 1024)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    text = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 12 * layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": width // heads,
        "vocab_size": 32000,
    }
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(
            text_config={"model_type": "mistral", **text}, vision_config={"model_type": "pixtral", **vision}
        )
    )
    transformer = diffusers.Flux2Transformer2DModel(
        num_layers=layers,
        num_single_layers=6 * layers,
        attention_head_dim=width // heads,
        num_attention_heads=heads,
        joint_attention_dim=width,
        axes_dims_rope=[width // heads // 4] * 4,
    )
    vae = diffusers.AutoencoderKLFlux2(block_out_channels=(32, 32, 32, 32), norm_num_groups=8)
    torch.set_default_dtype(torch.float32)
    pipeline = diffusers.Flux2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=encoder,
        tokenizer=None,
        transformer=transformer,
    )
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    pipeline.save_pretrained(partial)
    partial.rename(folder)
    return folder


def _split(source: Path) -> Path:
    out = source.with_name(f"{source.name}-tp{TP}")
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "reshard", str(source), "--tp", str(TP), "-o", str(out), "-q", "--json"]
    facts = json.loads(subprocess.run(command, check=True, cwd=ROOT, capture_output=True).stdout)
    if {*facts["parts"]} != {"transformer", "text_encoder"}:
        raise RuntimeError(f"divided are {', '.join(facts['parts'])}")
    return out


def table(result: dict[str, Any]) -> list[str]:
    """Return what the page says."""
    samples = result["samples"]
    lines: list[list[object]] = []
    for contender, label in LABELS.items():
        taken = samples[contender]

        def over(key: str, taken: list[dict[str, Any]] = taken) -> str:
            peer = [sample[key] for sample in samples["shard on read"]]
            return f"{ratio([sample[key] for sample in taken], peer):.2f}"

        lines.append(
            [
                label,
                f"{middle(sample['ready'] for sample in taken):.3f}",
                over("ready"),
                f"{middle(sample['ended'] for sample in taken):.3f}",
                over("ended"),
                f"{middle(sample['held'] for sample in taken) / MIB:.0f}",
                f"{middle(sample['private'] for sample in taken) / MIB:.0f}",
                f"{middle(sample['peak'] for sample in taken) / MIB:.0f}",
            ]
        )
    header = ["", "ready, s", "x", "and a forward, s", "x", "weights MiB", "private MiB", "peak MiB"]
    return [
        "## Loading a pipeline",
        "",
        f"A pipeline of the shape of FLUX.2 with {result['nbytes'] / 1e9:.1f} GB of weights in bfloat16 at tp {TP}, "
        "warm, the slower rank; a forward is one of the text encoder and one of the transformer. `x` is against "
        "diffusers' own way of dividing while it reads. Private is RssAnon when ready, peak the highest resident "
        "memory, mapped pages included. diffusers keeps the text encoder whole on every rank, and its tensor "
        "parallelism takes no CPU without a change to its list of devices, which is made here.",
        "",
        *rows(header, lines),
    ]
