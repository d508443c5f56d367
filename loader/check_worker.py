"""One process of ``reshard check``: runs models, and leaves a trace of each.

    python -m loader.check_worker reference JOBS
    python -m loader.check_worker rank JOBS RANK WORLD_SIZE
    python -m loader.check_worker tiny JOBS

JOBS is a JSON file, a list of jobs. The first two run every job's model on the same ids: one process as transformers
loads it from ``source``, a rank from ``split``. The third makes tiny models from configurations (`loader.tiny`). A rank
starts when its standard input ends, so that the whole model and its parts need not be in memory at once. What goes
wrong is written to the trace, and the process goes on with the next job.
"""

import datetime
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loader.models import load_model
from loader.tracing import Collectives, Trace
from manifests.errors import LoadError, ReshardError

Job = dict[str, Any]

SEED = 1
FIRST_ID = 3
"""Ids below are often those of padding, beginning and end."""
WAIT = datetime.timedelta(days=1)
"""How long ranks wait for each other between models; the process that started them ends them if one fails."""


def main(role: str, jobs_file: str, *place: str) -> None:
    """Go through the jobs."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    jobs: list[Job] = json.loads(Path(jobs_file).read_text())
    if role == "tiny":
        for job in jobs:
            Path(job["report"]).write_text(json.dumps(tiny(job)))
    elif role == "reference":
        for job in jobs:
            run(job, "reference", lambda job=job: load_reference(job))
    else:
        rank, world_size = (int(number) for number in place)
        sys.stdin.read()
        with joined(Path(jobs_file), rank, world_size) as groups:
            for job in jobs:
                group = groups(job)
                run(job, f"rank-{rank}", lambda job=job, group=group: load_rank(job, group))


def tiny(job: Job) -> dict[str, Any]:
    """Make a tiny model; return what was made smaller, or why it cannot be made."""
    from loader.tiny import make_tiny

    try:
        return make_tiny(Path(job["config"]), Path(job["out"]), job["tp"])
    except LoadError as error:
        return {"failed": f"{job['label']}: {error}"}


def run(job: Job, name: str, load: Any) -> None:  # noqa: ANN401
    """Load a model, trace one forward, and write what happened."""
    path = Path(job["traces"]) / name
    try:
        model = load()
        inputs = build_inputs(model, job["tokens"])
    except Exception as error:  # noqa: BLE001 - written down, and raised by the process that started this one
        failure = {"kind": type(error).__name__, "message": str(error), "ours": isinstance(error, ReshardError)}
        path.with_suffix(".json").write_text(json.dumps({"failed": failure}))
        return
    trace = Trace(model, path)
    collectives = Collectives()
    try:
        with torch.inference_mode(), collectives:
            model(**inputs)
    except Exception as error:  # noqa: BLE001 - it is what a wrong plan does
        trace.close(error=error, collectives=collectives.counts)
    else:
        trace.close(collectives=collectives.counts)


def load_reference(job: Job) -> Any:  # noqa: ANN401
    """Return the whole model, as transformers loads it.

    Raises:
        LoadError: transformers lacks the class, or the checkpoint lacks parameters of it.
    """
    import transformers

    model_class = getattr(transformers, job["architecture"], None)
    if model_class is None:
        raise LoadError(f"transformers {transformers.__version__} has no class {job['architecture']}")
    model, found = model_class.from_pretrained(
        job["source"],
        dtype=torch.float32,
        attn_implementation="eager",
        variant=job["variant"] or None,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise LoadError(
            f"{job['label']}: lacks {len(missing)} parameters of {job['architecture']}: {', '.join(missing[:5])}{more}"
        )
    return model.eval()


def load_rank(job: Job, group: dist.ProcessGroup | None) -> Any:  # noqa: ANN401
    """Return this rank's part of the model."""
    return load_model(job["split"], group=group, dtype=torch.float32, attn_implementation="eager")


@contextmanager
def joined(jobs_file: Path, rank: int, world_size: int) -> Iterator[Callable[[Job], dist.ProcessGroup]]:
    """Give what makes the group of a job: a new one each, since a job that fails may spoil its own."""
    store = dist.FileStore(  # type: ignore[attr-defined]
        str(jobs_file.with_name("store")), world_size
    )
    store.set_timeout(WAIT)
    made = 0

    def group_of(job: Job) -> dist.ProcessGroup:
        nonlocal made
        timeout = datetime.timedelta(seconds=job["timeout_s"])
        if not made:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=WAIT)
        made += 1
        # All ranks come together through the store, where a slow one is waited for.
        store.set(f"check/{made}/{rank}", "here")
        store.wait([f"check/{made}/{other}" for other in range(world_size)])
        group: dist.ProcessGroup = dist.new_group(timeout=timeout)
        return group

    try:
        yield group_of
    finally:
        if made:
            dist.destroy_process_group()


def build_inputs(model: Any, tokens: int) -> dict[str, Any]:  # noqa: ANN401
    """Return the arguments of a forward: one prompt of random ids, the same in every process.

    Raises:
        LoadError: The model takes no ids.
    """
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes:
        raise LoadError(f"{type(model).__name__}: its forward takes no input_ids, and no other input is made here")
    config = model.config
    vocabulary = config.get_text_config().vocab_size
    reserved = set(special_ids(config.to_dict()))
    ids = [number for number in range(min(FIRST_ID, vocabulary - 1), vocabulary) if number not in reserved]
    chosen = torch.randint(len(ids), (1, tokens), generator=torch.Generator().manual_seed(SEED))
    prompt = torch.tensor(ids)[chosen]
    inputs: dict[str, Any] = {"input_ids": prompt}
    if "use_cache" in takes:
        # Nothing follows the prompt, and some classes want layers of every kind for a cache.
        inputs["use_cache"] = False
    if "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = prompt.flip(1)
    return inputs


def special_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the ids that a configuration gives a meaning, those of its parts included."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from special_ids(value)
        elif str(name).endswith(("token_id", "token_index")) and type(value) is int:
            yield value


if __name__ == "__main__":
    main(*sys.argv[1:])
