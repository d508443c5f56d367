"""What the sweep compares: cases, their names, and what decides their outcome."""

import ast
import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from tools.sweep.own import OWN_COMPOSITES, OWN_VARIANTS, own_types
from tools.sweep.types import COMPOSITES, STANDS, VARIANTS

ROOT = Path(__file__).parents[2]
OURS = ("manifests", "reshard", "loader", "tools/sweep")
"""Folders whose source decides an outcome of ours."""

MODELS = ("tools/sweep/sizes.py", "tools/sweep/types.py", "tools/sweep/tiny.py", "tools/sweep/inputs.py")
"""Files that decide a tiny model; with the versions, they decide an outcome of the peer."""


class Case(NamedTuple):
    """One comparison of several processes with one.

    Attributes:
        name: Its name, also of its folder.
        model_type: Of the tiny model.
        kind: "run" compares logits and tokens with one process; "peer" does so for transformers' own tensor
            parallelism; "shards" compares the tensors of a split with those that transformers' ranks hold; "given" is
            "run" of a split that is there.
        experts: Over how many ranks experts are divided.
        uneven: What becomes of what the ranks do not divide; empty to refuse it.
        plan_source: Whose plan the split follows.
        values: Of the configuration, beside the tiny ones.
        generations: Arguments of `generate` by the name of a run.
    """

    name: str
    model_type: str
    kind: str = "run"
    experts: int = 1
    uneven: str = ""
    plan_source: str = "reshard"
    values: dict[str, Any] = {}  # noqa: RUF012 - never changed
    generations: dict[str, dict[str, Any]] = {"greedy": {}}  # noqa: RUF012

    @property
    def model_name(self) -> str:
        """Name of the model's folder, which cases of one model share."""
        if not self.values:
            return self.model_type
        digest = hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()
        return f"{self.model_type}-{digest[:8]}"


class Subject(NamedTuple):
    """A row of the table.

    Attributes:
        name: A model type, or a variant of one.
        model_type: The type of the tiny model, which may be a composite that the type is a part of.
        values: Of the configuration, beside the tiny ones.
        has_experts: Whether transformers has a plan that divides the experts.
        has_peer: Whether transformers has a plan at all.
    """

    name: str
    model_type: str
    values: dict[str, Any]
    has_experts: bool
    has_peer: bool = True


def subjects(work: Path) -> list[Subject]:
    """Return every type with a plan in the installed transformers or of our own, the variants and the composites."""
    planned = planned_types(work)
    rows = [Subject(name, STANDS.get(name, name), {}, experts) for name, experts in planned.items()]
    for name, (model_type, values) in VARIANTS.items():
        rows.append(Subject(name, model_type, values, planned[model_type] and values.get("enable_moe_block", True)))
    known = {row.name for row in rows}
    rows += [Subject(name, name, {}, composite_has_experts(name, planned)) for name in COMPOSITES if name not in known]
    rows += [Subject(name, name, {}, False, False) for name in (*own_types(), *OWN_COMPOSITES)]
    rows += [Subject(name, *variant, False, False) for name, variant in OWN_VARIANTS.items()]
    return sorted(rows)


def planned_types(work: Path) -> dict[str, bool]:
    """Return the types of transformers that have a plan, and whether it divides experts; asking takes 5 s, once."""
    file = work / f"types-{version('transformers')}.json"
    if not file.exists():
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        found = {}
        for name in CONFIG_MAPPING_NAMES:
            config_class = CONFIG_MAPPING[name]
            experts = bool(getattr(config_class, "base_model_ep_plan", None))
            if experts or getattr(config_class, "base_model_tp_plan", None):
                found[name] = experts
        work.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1, sort_keys=True))
    planned: dict[str, bool] = json.loads(file.read_text())
    return planned


def composite_has_experts(name: str, planned: dict[str, bool]) -> bool:
    """Tell whether a sub-model of a composite has a plan that divides experts."""
    from transformers import CONFIG_MAPPING

    specs = CONFIG_MAPPING[name].sub_configs_defaults.values()
    return any(planned.get(spec.model_type, False) for spec in specs)


def cases_of(subject: Subject, tp: int, *, peer: bool, uneven: str = "") -> Iterator[Case]:
    """Yield a subject's cases at a number of ranks: every expert on all of them, then experts over two and over all.

    The peer divides experts over all ranks or none.
    """
    if peer and not subject.has_peer:
        return
    kind = "peer" if peer else "run"
    degrees = [1]
    if subject.has_experts:
        degrees += [tp] if peer or tp % 2 else sorted({2, tp})
    for experts in degrees:
        name = f"{subject.name}@tp{tp}" + (f"-ep{experts}" if experts > 1 else "") + ("-peer" if peer else "")
        name += f"-{uneven}" if uneven else ""
        yield Case(name, subject.model_type, kind=kind, experts=experts, uneven=uneven, values=subject.values)


def ours_key() -> str:
    """Return a digest of what decides an outcome of ours."""
    files = [file for folder in OURS for file in sorted((ROOT / folder).rglob("*")) if file.suffix in SOURCES]
    return digest([file for file in files if file.name not in REPORTED])


def peer_key() -> str:
    """Return a digest of what decides an outcome of the peer."""
    return digest([ROOT / name for name in MODELS])


SOURCES = (".py", ".json", ".toml")
REPORTED = ("report.py", "reasons.toml", "peer.json", "__main__.py")
"""Files of the sweep that come after it."""


def digest(files: list[Path]) -> str:
    """Return a digest of files and of the versions of torch and transformers."""
    hashed = hashlib.sha256(f"torch {version('torch')} transformers {version('transformers')}".encode())
    for file in files:
        content = code_of(file) if file.suffix == ".py" else file.read_bytes()
        hashed.update(file.name.encode() + b"\0" + content)
    return hashed.hexdigest()[:16]


def code_of(file: Path) -> bytes:
    """Return a module without its comments, its layout and its bare strings, which decide nothing."""
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [child for child in node.body if not is_text(child)]
    return ast.dump(tree).encode()


def is_text(node: ast.stmt) -> bool:
    """Tell whether a statement is a bare string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
