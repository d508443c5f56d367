"""The catalogue: what is known of each model type, as data in this package.

``transformers.json`` is exported from transformers by ``tools/export_catalogue.py``. The tables in ``ours`` are written
by hand: the axes of well-known modules, better plans, and plans of types for which transformers has none. Splitting
needs neither transformers nor torch.
"""

from reshard.catalogue.architecture import Architecture, Converter, Operation, Rename, Scope
from reshard.catalogue.builtin import PLAN_SOURCES, built_in_plan, default_bindings, default_sizes, join_plan
from reshard.catalogue.finding import find_architecture
from reshard.catalogue.tables import exported, model_types, ours, own_plans, part_of_config, type_values

__all__ = [
    "PLAN_SOURCES",
    "Architecture",
    "Converter",
    "Operation",
    "Rename",
    "Scope",
    "built_in_plan",
    "default_bindings",
    "default_sizes",
    "exported",
    "find_architecture",
    "join_plan",
    "model_types",
    "ours",
    "own_plans",
    "part_of_config",
    "type_values",
]
