"""Prove proposed plans: tiny models whose names are scrambled, run in N processes and in one.

``python -m tools.proposals`` proves the 40 of `DRAWN` and leaves ``tools/proposals.json``, which tests read;
``--all`` proves every type that the sweep can build, those of `CLASSICS` included.

The 40 were drawn once, before anything was proposed, by the hash of their names: 26 of the sweep's single models, 5 of
its composites and 9 of `CLASSICS`. The others are what proposing was developed on.
"""

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from manifests.errors import PlanError
from reshard import proposing
from reshard.model import RuntimeTensor
from reshard.options import Options
from reshard.planning import plan_split
from reshard.proposing import Proposal
from reshard.proposing.propose import propose as propose_plan
from reshard.sources.folder import LocalFolder
from reshard.splitting import write_split
from tools.sweep.cases import ROOT, Case, subjects
from tools.sweep.pool import work_through
from tools.sweep.records import record

RECORDED = Path(__file__).with_suffix(".json")

CLASSICS = [
    "albert",
    "bert",
    "bert-generation",
    "big_bird",
    "biogpt",
    "bitnet",
    "bloom",
    "camembert",
    "convbert",
    "data2vec-text",
    "deberta",
    "deberta-v2",
    "electra",
    "ernie",
    "falcon",
    "fnet",
    "gpt2",
    "gpt_bigcode",
    "git",
    "ibert",
    "jetmoe",
    "layoutlm",
    "longformer",
    "mamba",
    "megatron-bert",
    "mobilebert",
    "modernbert",
    "modernbert-decoder",
    "mpnet",
    "mra",
    "nystromformer",
    "openai-gpt",
    "opt",
    "persimmon",
    "recurrent_gemma",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "rwkv",
    "stablelm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "yoso",
]
"""Types for which transformers has no plan. Their output layers are not tied here: a type that the catalogue does not
know does not load where its output layer is not stored."""

DRAWN = [
    "beam",
    "big_bird",
    "bitnet",
    "cohere",
    "cohere2_moe",
    "deepseek_v4",
    "diffusion_gemma_text",
    "electra",
    "emu3_text_model",
    "ernie4_5_vl_moe",
    "ernie4_5_vl_moe_text",
    "eurobert",
    "exaone4",
    "exaone_moe",
    "falcon",
    "glm4_moe",
    "glm4v_text",
    "glm_moe_dsa",
    "granitemoe_swa",
    "helium",
    "higgs_audio_v2",
    "ibert",
    "internlm3",
    "iquestcoder",
    "jais2",
    "laguna",
    "minimax_m3_vl",
    "modernbert-decoder",
    "muse_spark",
    "nanochat",
    "paddleocr_vl_text",
    "phimoe",
    "qwen2_moe",
    "qwen3_vl_text",
    "rembert",
    "smollm3",
    "t5gemma",
    "voxtral",
    "xlm-roberta",
    "yoso",
]

ENOUGH = 0.75
"""A plan that divides less of a model's parameters has declined it."""


class Proof(NamedTuple):
    """What became of one proposal.

    Attributes:
        verdict: "found", "declined" if it is right but divides little or nothing, or "wrong".
        divided: The part of the parameters that is divided.
        error: What went wrong, if anything did.
        rules: The rules, by the model's own names.
    """

    verdict: str
    divided: float
    error: str
    rules: dict[str, Any]


def scramble_word(word: str) -> str:
    """Return a word without a meaning; numbers, and the parameters of torch's own layers, keep their names."""
    if word.isdecimal() or word in ("weight", "bias"):
        return word
    return f"x{sha256(word.encode()).hexdigest()[:7]}"


def scramble_name(name: str) -> str:
    """Return a dotted name with every word scrambled.

    >>> scramble_name("layers.0.up.weight")
    'x0b02dc0.0.x9f3d12f.weight'
    """
    return ".".join(map(scramble_word, name.split(".")))


def scramble_config(config: Any) -> Any:
    """Return a configuration with every name in it scrambled."""
    if not isinstance(config, Mapping):
        return config
    return {scramble_word(key): scramble_config(value) for key, value in config.items()}


def propose_scrambled(
    tensors: Mapping[str, RuntimeTensor], config: Mapping[str, Any], ranks: int, *, with_config: bool = True
) -> Proposal:
    """Return what is proposed for a model whose names are scrambled, with its own names again.

    The tensors are in the order of their scrambled names, so their order tells nothing either.
    """
    words = {scramble_word(word): word for name in tensors for word in name.split(".")}
    scrambled = {scramble_name(name): tensor for name, tensor in tensors.items()}
    given = config if with_config else scramble_config(config)
    found = propose_plan({name: scrambled[name] for name in sorted(scrambled)}, given, ranks)

    def restored(pattern: str) -> str:
        return ".".join(words.get(word, word) for word in pattern.split("."))

    return found._replace(
        rules=tuple(rule._replace(pattern=restored(rule.pattern)) for rule in found.rules),
        attributes={restored(pattern): values for pattern, values in found.attributes.items()},
        whole=tuple(whole._replace(pattern=restored(whole.pattern)) for whole in found.whole),
    )


def case_of(name: str, ranks: int) -> Case:
    """Return the comparison of a type's proposal with one process."""
    values = {"tie_word_embeddings": False} if name in CLASSICS else {}
    return Case(f"{name}@auto{ranks}", name, kind="given", values=values)


def make_model(case: Case, work: Path) -> Path:
    """Save the tiny model of a case, unless it is there."""
    from tools.sweep.tiny import tiny_model

    folder = work / "models" / case.model_name
    if not (folder / "config.json").exists():
        tiny_model(case.model_type, case.values).save_pretrained(folder)
    return folder


def split_scrambled(folder: Path, out: Path, ranks: int, *, with_config: bool = True) -> dict[str, Any]:
    """Split a model by what is proposed for it with scrambled names; return the rules.

    Raises:
        PlanError: Nothing is proposed, or what is proposed does not fit.
    """
    shutil.rmtree(out, ignore_errors=True)
    found: list[Proposal] = []

    def propose(tensors: Mapping[str, RuntimeTensor], config: Mapping[str, Any], degree: int) -> Proposal:
        found.append(propose_scrambled(tensors, config, degree, with_config=with_config))
        return found[-1]

    with mock.patch.object(proposing, "propose", propose):
        planned = plan_split(LocalFolder(folder), ranks, Options(plan="auto"))
    out.mkdir(parents=True)
    write_split(planned, out)
    rules: dict[str, Any] = found[0].document["plan"]
    return rules


def prove(names: Iterable[str], ranks: int, work: Path, *, with_config: bool = True) -> dict[str, Proof]:
    """Return what becomes of the proposals for types."""
    proofs: dict[str, Proof] = {}
    rules: dict[str, dict[str, Any]] = {}
    cases: list[Case] = []
    for name in names:
        case = case_of(name, ranks)
        folder = make_model(case, work)
        try:
            rules[name] = split_scrambled(folder, work / "splits" / case.name, ranks, with_config=with_config)
        except PlanError as error:
            declined = "no rule can be proposed" in str(error)
            proofs[name] = Proof("declined" if declined else "wrong", 0.0, str(error), {})
        else:
            cases.append(case)
    outcomes = work_through(ranks, cases, work) if cases else {}
    for case in cases:
        proofs[case.model_type] = judge(outcomes[case.name], ranks, rules[case.model_type])
    return proofs


def judge(outcomes: Sequence[dict[str, Any]], ranks: int, rules: dict[str, Any]) -> Proof:
    """Return what the ranks' outcomes amount to."""
    found = record(outcomes)
    if not found.right or found.share is None:
        return Proof("wrong", 0.0, f"{found.stage}: {found.error}", rules)
    divided = round((1 - found.share) * ranks / (ranks - 1), 3)
    return Proof("found" if divided >= ENOUGH else "declined", divided, "", rules)


def main() -> int:
    """Prove the proposals, and tell how many are found, declined and wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.proposals", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every type, not only the 40 that were drawn")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "proposals", help="folder for models and splits")
    options = parser.parse_args()
    quiet()
    rows = [row.name for row in subjects(options.work) if row.name == row.model_type] if options.all else []
    names = sorted({*DRAWN, *rows, *(CLASSICS if options.all else ())})
    recorded: dict[str, Any] = {}
    wrong = 0
    for with_config in (True, False):
        for ranks in (2, 4):
            proofs = prove(names, ranks, options.work, with_config=with_config)
            key = f"tp {ranks}" + ("" if with_config else ", config scrambled")
            recorded[key] = {name: proof._asdict() for name, proof in sorted(proofs.items())}
            wrong += tell(key, proofs)
    if not options.all:
        lines = [
            f"  {json.dumps(key)}: {{\n"
            + ",\n".join(f"    {json.dumps(name)}: {json.dumps(proof)}" for name, proof in proofs.items())
            + "\n  }"
            for key, proofs in recorded.items()
        ]
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return int(wrong > 0)


def quiet() -> None:
    """Show nothing of how models are saved."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def tell(key: str, proofs: Mapping[str, Proof]) -> int:
    """Print what became of proposals; return how many are wrong."""
    counts = Counter(proof.verdict for proof in proofs.values())
    print(f"{key}: {counts['found']} found, {counts['declined']} declined, {counts['wrong']} wrong", flush=True)
    for name, proof in sorted(proofs.items()):
        if proof.verdict != "found":
            print(f"  {name}: {proof.verdict}, {proof.divided:.2f} divided {proof.error[:200]}", flush=True)
    return counts["wrong"]


if __name__ == "__main__":
    sys.exit(main())
