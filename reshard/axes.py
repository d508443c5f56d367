"""Axes: which logical axis a rule divides, from its layout, its blocks, or the axes that are bound to its module."""

from collections.abc import Mapping

from manifests.errors import PlanError
from manifests.expression import Lookup, UnknownSizeError, parse_axis
from manifests.layout import Axis, Factor, Segment, packed_axis, plain_axis
from manifests.manifest import Rule
from manifests.shown import shown
from manifests.styles import Style
from reshard.model import RuntimeTensor
from reshard.plans import AxisBinding, Plan
from reshard.sizes import ScopedSizes

MESH_AXES = frozenset({"tp", "kv", "rep"})
"""The mesh axes that a layout may name; ``ep`` and ``etp`` are the splitter's own."""


class UnboundSizeError(UnknownSizeError):
    """A layout names a size that neither the plan nor the configuration gives."""


class AxisFinder:
    """Finds the axis of a rule.

    Attributes:
        notes: What a reader of the report should know.
        numbers: The numbers that names of modules with axes or sizes of their own have, as texts.
        same_in_layers: Whether all layers of a sub-model have the same sizes.
        looked_beside: Set once a layout asked for the shape of another module's weight.
    """

    def __init__(self, plan: Plan, sizes: ScopedSizes, tensors: Mapping[str, RuntimeTensor]) -> None:
        self._plan = plan
        self._sizes = sizes
        self._tensors = tensors
        self._by_last_part: dict[str, list[AxisBinding]] = {}
        for binding in plan.bindings:
            self._by_last_part.setdefault(binding.suffix.rpartition(".")[2], []).append(binding)
        self.notes: dict[str, None] = {}
        names = (*(f"{binding.under}.{binding.suffix}" for binding in plan.bindings), *sizes.scopes)
        self.numbers = {part for name in names for part in name.split(".") if part.isdecimal()}
        self.same_in_layers = not sizes.layered
        self.looked_beside = False

    def find(self, rule: Rule, style: Style, target: str, reference: str, size: int) -> Axis:
        """Return the axis that a rule divides.

        Args:
            rule: The rule.
            style: Its style.
            target: The module that it takes, or the parameter if it names one.
            reference: The tensor whose dimension has the axis's size.
            size: Elements of that dimension.

        Raises:
            PlanError: The layout or the blocks do not fit the dimension, or a size is not known.
        """
        if rule.layout:
            return self.bind(rule.layout, target, reference, size)
        # Blocks that the catalogue knows of a module stand for those that a plan leaves open.
        known = not (style.contiguous or rule.blocks)
        notation = self._bound(target, "in" if style.cuts == "in" else "out") if known else ""
        if not notation:
            return self._blocks(rule, reference, size) if style.packed else plain_axis(size)
        try:
            return self.bind(notation, target, reference, size)
        except UnboundSizeError as error:
            unknown = error.name
        except PlanError:
            # Sizes that are no more than the defaults of a class, and do not fit, are not those of this model.
            if not self._plan.exhaustive or not (unknown := self._assumed(notation, target)):
                raise
        if style.packed:
            return self._blocks(rule, reference, size)
        suffix = target.rpartition(".")[2]
        self.notes[f"{suffix}: cut as plain rows, since the size {unknown!r} of its heads is not known"] = None
        return plain_axis(size)

    def is_known(self, rule: Rule, style: Style, target: str) -> bool:
        """Tell whether the axis of a rule says of what it consists, arguments as of `find`."""
        bound = "" if style.contiguous or rule.blocks else self._bound(target, "in" if style.cuts == "in" else "out")
        return bool(rule.layout or bound)

    def _assumed(self, notation: str, target: str) -> str:
        """Return a size of an axis that the configuration does not state, or nothing."""
        sizes = self._sizes.of(target.rpartition(".")[0]).stated()
        try:
            parse_axis(notation, lambda name: 1 if name == "?" or "." in name else sizes.get(name))
        except UnknownSizeError as error:
            return error.name
        except PlanError:
            return ""
        return ""

    def bind(self, notation: str, target: str, reference: str, size: int | None) -> Axis:
        """Return the axis that a layout denotes for a module, its arguments as in `find`; no size fits any.

        Raises:
            UnboundSizeError: A size is not known.
            PlanError: The layout does not fit the dimension.
        """
        lookup = self.sizes_in(target.rpartition(".")[0])
        try:
            known = parse_axis(notation, lambda name: 1 if name == "?" else lookup(name))
            if "?" not in notation:
                return self._checked(known, notation, reference, known.size if size is None else size)
            if size is None:
                raise PlanError(f"{self._plan.label}: {reference}: the layout {notation} leaves a size open")
            if known.size == 0 or size % known.size:
                raise PlanError(
                    f"{self._plan.label}: {reference}: the layout {shown(notation)} needs a multiple of {known.size}, "
                    f"the tensor has {size}"
                )
            axis = parse_axis(notation, lambda name: size // known.size if name == "?" else lookup(name))
            return self._checked(axis, notation, reference, size)
        except UnknownSizeError as error:
            raise UnboundSizeError(
                f"{self._plan.label}: {target}: {error}; bind it in [sizes]", name=error.name
            ) from error

    def sizes_in(self, module: str) -> Lookup:
        """Return what looks sizes up for a module's children.

        ``q_proj.out`` are the rows of the weight of its child, or of the child of the innermost module around it that
        has one of that name.
        """
        sizes = self._sizes.of(module)

        def lookup(name: str) -> int | None:
            child, _, side = name.rpartition(".")
            if not child or side not in ("out", "in"):
                return sizes.get(name)
            self.looked_beside = True
            around = module
            while (weight := self._tensors.get(f"{around}.{child}.weight".lstrip("."))) is None and around:
                around = around.rpartition(".")[0]
            return None if weight is None else weight.shape[0 if side == "out" else -1]

        return lookup

    def _blocks(self, rule: Rule, reference: str, size: int) -> Axis:
        blocks = rule.blocks or (1, 1)
        if size % sum(blocks):
            raise PlanError(
                f"{self._plan.label}: {reference}: {size} is not a multiple of its blocks {list(blocks)}; "
                "give the blocks' proportions or sizes"
            )
        return packed_axis(tuple(block * (size // sum(blocks)) for block in blocks))

    def _checked(self, axis: Axis, notation: str, reference: str, size: int) -> Axis:
        notation = shown(notation)[1:-1]
        if unknown := axis.mesh_axes() - MESH_AXES:
            raise PlanError(
                f"{self._plan.label}: {reference}: the layout {notation} divides over {min(unknown)!r}; "
                f"known are {', '.join(sorted(MESH_AXES))} (* is tp)"
            )
        if not axis.mesh_axes():
            raise PlanError(
                f"{self._plan.label}: {reference}: the layout {notation} divides nothing; mark a factor with *"
            )
        if axis.is_padded:
            raise PlanError(
                f"{self._plan.label}: {reference}: the layout {notation} fills parts up (~); "
                "that is not for plans, --uneven pad does it where it must be"
            )
        if axis.size != size:
            raise PlanError(
                f"{self._plan.label}: {reference}: the layout {notation} has {axis.size} elements "
                f"({shown(str(axis))[1:-1]}), the tensor {size}; give its rule a layout, or bind the sizes in [sizes]"
            )
        return axis

    def _bound(self, target: str, side: str) -> str:
        """Return the axis that is bound to a module by the longest fitting suffix of its name, the innermost first."""
        candidates = self._by_last_part.get(target.rpartition(".")[2], ())
        fitting = [binding for binding in candidates if binding.fits(target)]
        best = max(fitting, key=lambda binding: (len(binding.under), len(binding.suffix)), default=AxisBinding(""))
        return best.into if side == "in" else best.out


def over(axis: Axis, mesh_axis: str) -> Axis:
    """Return the axis with what is divided over all ranks divided over a mesh axis instead.

    >>> str(over(packed_axis((4, 4)), "etp"))
    '(2, 4@etp)'
    """
    return Axis(tuple(_segment_over(segment, mesh_axis) for segment in axis.segments))


def _segment_over(segment: Segment, mesh_axis: str) -> Segment:
    factors = tuple(Factor(factor.size, mesh_axis if factor.on == "tp" else factor.on) for factor in segment.factors)
    return Segment(factors, over(segment.body, mesh_axis) if segment.body else None, segment.name)
