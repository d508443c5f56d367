"""The parsers that take what others wrote, each as a function of bytes, with a good input of each."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from manifests.errors import ReshardError
from manifests.header import header_length, parse_header
from manifests.manifest import decode_manifest, read_manifest
from manifests.runtime import read_runtime
from reshard import merge, plan, split, verify
from reshard.planfile import read_plan
from tests.checkpoints import LLAMA, count, save, save_indexed

RULES = {
    "plan": {
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": {"style": "packed_rowwise", "blocks": [1, 3]},
        "model.layers.*.attn[q].out": {"style": "colwise", "layout": "(g, 2*, hd)", "dim": 0},
    },
    "sizes": {"g": "num_attention_heads / num_key_value_heads", "hd": "head_dim | hidden_size / 4"},
    "attributes": {"model.layers.*.attn": {"groups": "g"}},
}
TENSORS = {
    "model.layers.0.mlp.up_proj.weight": count(8, 8),
    "model.layers.0.mlp.down_proj.weight": count(4, 8),
    "model.layers.0.mlp.down_proj.bias": count(4),
    "model.layers.0.attn.q.weight": count(8, 2),
    "model.layers.0.attn.out.weight": count(8, 2),
    "model.norm.weight": count(3),
}


class Target(NamedTuple):
    """A parser.

    Attributes:
        seed: A good input.
        read: Reads an input, all the way to where the numbers are used.
        document: The JSON value that the good input holds, for structured mutations.
        wrap: From the JSON text of a mutated value to an input; as it is if None.
    """

    seed: bytes
    read: Callable[[bytes], object]
    document: Any
    wrap: Callable[[bytes], bytes] | None = None


def build_targets(folder: Path) -> dict[str, Target]:
    """Return the targets; they write into the folder and nowhere else."""
    source = save(folder / "source", TENSORS, LLAMA)
    made = folder / "split"
    split(source, made, tp=2, plan=RULES, layout="checkpoint")
    indexed = save_indexed(folder / "indexed", TENSORS, {"model.head.weight": count(4, 4)}, config=LLAMA)
    index = indexed / "model.safetensors.index.json"
    header = (source / "model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    manifest = (made / "manifest.json").read_bytes()
    rules = json.dumps(RULES).encode()
    toml = (
        b'[plan]\n"model.layers.*.mlp.up_proj" = "colwise"\n"model.layers.*.mlp.down_proj" = '
        b'{style = "packed_rowwise", blocks = [1, 3]}\n[sizes]\ng = "H / KV"\n'
    )

    def plan_of(path: Path, content: bytes, model: Path, **options: Any) -> None:
        path.write_bytes(content)
        plan(model, tp=2, layout="checkpoint", **options)

    def read_header(content: bytes) -> None:
        raw = content[8 : 8 + header_length(content[:64], len(content), "x")]
        parse_header(raw, len(content), "x")

    def read_split(content: bytes) -> None:
        _each(lambda: read_manifest_of_split(content), lambda: read_manifest_of_split(resealed(content)))

    def read_manifest_of_split(content: bytes) -> None:
        (made / "manifest.json").write_bytes(content)
        try:
            _each(
                lambda: decode_manifest(content),
                lambda: read_manifest(made),
                lambda: _extents(made),
                lambda: verify(made, jobs=1),
                lambda: merge(made, folder / "again", jobs=1),
            )
        finally:
            shutil.rmtree(folder / "again", ignore_errors=True)

    return {
        "header": Target(
            header,
            read_header,
            json.loads(header[8 : 8 + length]),
            lambda text: len(text).to_bytes(8, "little") + text + header[8 + length :],
        ),
        "index": Target(
            index.read_bytes(),
            lambda content: plan_of(index, content, indexed, plan=RULES),
            json.loads(index.read_bytes()),
        ),
        "config": Target(
            json.dumps(LLAMA).encode(),
            lambda content: _each(
                lambda: plan_of(source / "config.json", content, source),
                lambda: plan_of(source / "config.json", content, source, plan=RULES),
            ),
            {**LLAMA, "quantization_config": {}, "text_config": {}, "per_layer_config": {"0": {"head_dim": 2}}},
        ),
        "json plan": Target(
            rules,
            lambda content: plan_of(folder / "plan.json", content, source, plan=folder / "plan.json"),
            RULES,
        ),
        "toml plan": Target(toml, lambda content: _read_toml(folder / "plan.toml", content), {}, lambda _: toml),
        "manifest": Target(manifest, read_split, {**json.loads(manifest), "digest": None}, sealed),
    }


def _read_toml(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    read_plan(path)


def _extents(folder: Path) -> None:
    manifest = read_runtime(folder)
    for file in manifest.files:
        manifest.extents(file)


def _each(*reads: Callable[[], object]) -> None:
    """Do all of them, and raise the last refusal."""
    refusal = None
    for read in reads:
        try:
            read()
        except ReshardError as error:
            refusal = error
    if refusal is not None:
        raise refusal


def sealed(text: bytes) -> bytes:
    """Return a manifest's text with a digest that is right, so that it is not all that refuses it."""
    head, mark, _ = text.rpartition(b'"digest":null')
    return resealed(head + b'"digest":"') if mark and text.endswith(b"}") else text


def resealed(text: bytes) -> bytes:
    """Return a manifest's text with the digest that its bytes have now."""
    head, mark, _ = text.rpartition(b'"digest":"')
    if not mark:
        return text
    head += mark
    return head + xxhash.xxh3_128_hexdigest(head + b'"}').encode() + b'"}\n'
