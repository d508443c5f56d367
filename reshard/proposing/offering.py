"""Offering: a proposal for a checkpoint, as a value, as facts, and as a file that is to be checked."""

from pathlib import Path
from typing import Any, NoReturn

from manifests.errors import OutputError, PlanError
from reshard import proposing
from reshard.choosing import build_tensors, choose_architecture
from reshard.options import AUTO, Options
from reshard.planning import locate
from reshard.proposing.proposal import Proposal
from reshard.proposing.writing import format_plan
from reshard.sources.checkpoint import open_checkpoint


def propose(model: str | Path, *, tp: int, **options: Any) -> Proposal:  # noqa: ANN401 - the fields of Options
    """Propose a plan for a checkpoint, from its headers and its configuration.

    Args:
        model: A folder or a hub id.
        tp: The number of ranks that it is for.
        options: The fields of `reshard.options.Options`.

    Raises:
        CheckpointError: The checkpoint is broken, or of a kind that is not split.
    """
    chosen = Options(**{**options, "plan": AUTO})
    checkpoint = open_checkpoint(locate(model, chosen), chosen.variant)
    tensors = build_tensors(checkpoint, choose_architecture(checkpoint, chosen), chosen)
    return proposing.propose(tensors, checkpoint.config, tp)


def leave_plan(model: str, tp: int, file: Path, *, force: bool, **options: Any) -> NoReturn:  # noqa: ANN401
    """Write the plan that is proposed for a checkpoint, and say that it is to be checked before it is used.

    Raises:
        OutputError: The file is there, or cannot be written.
        PlanError: Always, once it is written.
    """
    text = format_plan(propose(model, tp=tp, **options), model)
    try:
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise OutputError(f"{file}: exists; --force replaces it, --write-plan names another") from error
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror}") from error
    raise PlanError(
        f"{model}: nothing is split by a plan that is not proved; the one proposed is {file}; check it: "
        f"reshard check {model} --tp {tp} --plan {file}; then split with --plan {file}"
    )


def build_facts(proposal: Proposal) -> dict[str, Any]:
    """Return a proposal as facts, for JSON."""
    return {
        "world_size": proposal.world_size,
        "rules": [rule._asdict() for rule in proposal.rules],
        "attributes": {pattern: dict(values) for pattern, values in proposal.attributes.items()},
        "whole": [whole._asdict() for whole in proposal.whole],
        "numel": proposal.numel,
        "document": proposal.document,
    }
