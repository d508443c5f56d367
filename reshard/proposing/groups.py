"""Groups: which linear layers belong together, and what each of a group should have.

A group is looked for in every module, the innermost first, among the linear layers that no group inside of it has
taken. Nothing is taken unless the shapes leave one reading; what is left in a block is judged layer by layer
(`reshard.proposing.alone`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reshard.proposing.numbers import Numbers
from reshard.proposing.proposal import Confidence, Suggestion
from reshard.proposing.tree import Linear

OUTPUT_NAMES = frozenset({"o_proj", "out_proj", "o", "wo", "to_out", "out_lin", "c_proj", "linear_proj"})
QUERY_NAMES = frozenset({"q_proj", "q", "wq", "query", "to_q", "q_lin"})
"""Well-known names of two layers that shapes may not tell apart."""

ASSUMED = "if the module takes its number of heads from the shape"


class Setting(NamedTuple):
    """Where a group is looked for.

    Attributes:
        width: Of the hidden states.
        ranks: Number of ranks.
        numbers: What the configuration counts.
        extras: Shapes of the module's tensors that belong to none of the layers, by name.
        outermost: Whether the module is a block, or directly in one.
        uniform: Whether the modules of this name in other blocks have the same layers.
    """

    width: int
    ranks: int
    numbers: Numbers
    extras: dict[str, tuple[int, ...]]
    outermost: bool = False
    uniform: bool = True

    def beside(self, *widths: int) -> str:
        """Return a tensor that is beside the layers and no norm over the hidden states or over these widths, or ""."""
        allowed = {(size,) for size in (self.width, *widths)}
        return next(
            (
                _last(name, 2)
                for name, shape in self.extras.items()
                if shape not in allowed or _last(name) not in ("weight", "bias")
            ),
            "",
        )


class Sides(NamedTuple):
    """Linear layers by what they do to the hidden states' width."""

    expanding: list[Linear]
    contracting: list[Linear]
    keeping: list[Linear]
    others: list[Linear]


def sort_sides(linears: Sequence[Linear], width: int) -> Sides:
    """Sort linear layers by which of their sides have a width."""
    sides = Sides([], [], [], [])
    for linear in linears:
        if linear.into == width:
            (sides.keeping if linear.out == width else sides.expanding).append(linear)
        else:
            (sides.contracting if linear.out == width else sides.others).append(linear)
    return sides


def find_group(linears: Sequence[Linear], setting: Setting) -> list[Suggestion] | None:
    """Return what the layers of a module should have if they are a group; None if they are not one that is known."""
    sides = sort_sides(linears, setting.width)
    if sides.others:
        return None
    return _feed_forward(sides, setting) or _attention(sides, setting)


def _feed_forward(sides: Sides, setting: Setting) -> list[Suggestion] | None:
    """One layer contracts what one expands, or two whose outputs are multiplied."""
    if sides.keeping or len(sides.contracting) != 1 or not 1 <= len(sides.expanding) <= 2:
        return None
    (down,), ups = sides.contracting, sides.expanding
    if any(up.turned is None for up in (*ups, down)):
        return None
    inner, width = down.into, setting.width
    if {up.out for up in ups} != {inner}:
        return None
    shapes = " and ".join(f"{_last(up.name)} {width}->{up.out}" for up in ups)
    reason = f"{shapes} into {_last(down.name)} {inner}->{width}: the only layers of their module"
    known = setting.numbers.inner.get(inner)
    if doubt := _doubt_features(len(ups), inner, setting):
        return [*_gathered([*ups, down], setting, f"{reason}, but {doubt}")]
    if inner % setting.ranks:
        return [
            Suggestion(one.name, "", f"{setting.ranks} ranks do not divide its {inner} features")
            for one in (*ups, down)
        ]
    confidence: Confidence = "certain" if len(ups) == 2 and known else "likely"
    reason += f"; {inner} is {known}" if known else ""
    return [*(divided(up, "out", reason, confidence) for up in ups), divided(down, "in", reason, confidence)]


def _doubt_features(ups: int, inner: int, setting: Setting) -> str:
    """Return why the features of a feed-forward module are better not divided, or ""."""
    numbers = setting.numbers
    if beside := setting.beside():
        return f"{beside} may be over their features"
    if numbers.mixing:
        return f"{numbers.mixing} may look at all features"
    if ups == 1 and not (inner in numbers.inner and setting.outermost):
        return "what is between may be met by something whole"
    if inner not in numbers.inner and any(
        inner == heads * width for heads in numbers.heads for width in numbers.head_dims
    ):
        return f"{inner} is as wide as all heads"
    return ""


def _attention(sides: Sides, setting: Setting) -> list[Suggestion] | None:
    """Queries, keys, values and the output."""
    four = [*sides.expanding, *sides.contracting, *sides.keeping]
    if len(four) != 4 or len(sides.contracting) > 1 or any(linear.turned is None for linear in four):
        return None
    found = _find_roles(sides, setting)
    if found is None:
        return None
    query, key, value, output = found
    counted = _count_heads(query, key, setting)
    if isinstance(counted, str):
        return [*_gathered(four, setting, counted)]
    heads, kv_heads, named = counted
    width = query.out // heads
    if doubt := _doubt_heads(heads, kv_heads, width, setting):
        return [*_gathered(four, setting, f"attention, but {doubt}")]
    reason = (
        f"{heads} heads of {width} ({named}), {kv_heads} of keys and values; "
        f"{_last(output.name)} {output.into}->{output.out} is the output"
    )
    of_queries, of_keys = f"({heads}*, {width})", f"({kv_heads}*, {width})"
    return [
        *(
            divided(one, "out", f"{reason}; {ASSUMED}", "likely", layout)
            for one, layout in ((query, of_queries), (key, of_keys), (value, of_keys))
        ),
        divided(output, "in", f"{reason}; {ASSUMED}", "likely", of_queries),
    ]


def _doubt_heads(heads: int, kv_heads: int, width: int, setting: Setting) -> str:
    """Return why the heads of an attention are better not divided, or ""."""
    if beside := setting.beside(width):
        return f"what {beside} does to its heads is not known"
    if not setting.uniform:
        return "blocks differ in its layers, so one may use what another has computed"
    if heads == kv_heads:
        return f"with {heads} heads of each kind, nothing shows that they are counted by the shape"
    return ""


def _find_roles(sides: Sides, setting: Setting) -> tuple[Linear, Linear, Linear, Linear] | None:
    """Return the layers of queries, keys, values and the output; None if they cannot be told apart."""
    if sides.contracting:
        (output,) = sides.contracting
        queries = [one for one in (*sides.expanding, *sides.keeping) if one.out == output.into]
        others = [one for one in (*sides.expanding, *sides.keeping) if one not in queries]
    elif len(sides.keeping) == 4:
        # Which is which matters only where heads are divided; of as many keys as queries they are not.
        return sides.keeping[0], sides.keeping[1], sides.keeping[2], sides.keeping[3]
    else:
        queries, others = sides.keeping, sides.expanding
        chosen = _square_output(queries, others)
        if chosen is None:
            return None
        output = chosen
        queries = [one for one in queries if one is not output]
    if len(queries) == 3 and not others:
        return queries[0], queries[1], queries[2], output
    if len(queries) == 1 and len(others) == 2 and others[0].out == others[1].out:
        return queries[0], others[0], others[1], output
    return None


def _square_output(squares: list[Linear], others: list[Linear]) -> Linear | None:
    """Return the output layer of two square ones: that whose bias is unlike that of keys and values, or by its name."""
    if len(squares) != 2 or len(others) != 2:
        return None
    if others[0].biased == others[1].biased:
        unlike = [one for one in squares if one.biased != others[0].biased]
        if len(unlike) == 1:
            return unlike[0]
    named = [one for one in squares if _last(one.name) in OUTPUT_NAMES]
    queries = [one for one in squares if _last(one.name) in QUERY_NAMES]
    return named[0] if len(named) == len(queries) == 1 else None


def _count_heads(query: Linear, key: Linear, setting: Setting) -> tuple[int, int, str] | str:
    """Return the heads of queries and of keys and where they are from; or why they are not known."""
    numbers, readings = setting.numbers, []
    for heads, named in numbers.heads.items():
        if query.out % heads:
            continue
        width = query.out // heads
        if width in numbers.widths or key.out % width:
            continue
        kv_heads = key.out // width
        if heads % kv_heads == 0 and (kv_heads == heads or kv_heads in numbers.kv_heads):
            readings.append((heads, kv_heads, named))
    if len(readings) > 1:
        readings = [one for one in readings if query.out // one[0] in numbers.head_dims] or readings
    if not readings:
        return "attention, if anything; no number of heads in config.json fits, so no cut between heads is known"
    # The fewest heads are the widest: a cut between these is one between narrower ones too, if both divide.
    for heads, kv_heads, _ in readings:
        if heads % setting.ranks or kv_heads % setting.ranks:
            return f"{heads} heads, {kv_heads} of keys and values, which {setting.ranks} ranks do not divide"
    return min(readings)


def _gathered(linears: Sequence[Linear], setting: Setting, reason: str) -> Iterator[Suggestion]:
    for linear in linears:
        yield gathered(linear, setting, reason)


def gathered(linear: Linear, setting: Setting, reason: str) -> Suggestion:
    """Return the exact form of a linear layer whose part in the whole is not known."""
    if linear.turned is None:
        return Suggestion(linear.name, "", f"{reason}; whether its weight is (out, in) or (in, out) is not known")
    exact = f"{reason}; exact whatever the layer is for"
    if linear.out != setting.width or linear.into == setting.width:
        if linear.out % setting.ranks == 0:
            return divided(linear, "out", exact, "certain")._replace(style="colwise_gather_output")
    elif linear.into % setting.ranks == 0:
        return divided(linear, "in", exact, "certain")._replace(style="rowwise_split_input")
    return Suggestion(linear.name, "", f"{reason}; {setting.ranks} ranks do not divide it")


def divided(linear: Linear, side: str, reason: str, confidence: Confidence, layout: str = "") -> Suggestion:
    """Return the suggestion to cut a linear layer by its outputs or by its inputs."""
    style = "colwise" if side == "out" else "rowwise"
    if not linear.turned:
        return Suggestion(linear.name, style, reason, confidence, layout)
    reason += "; its bias says that the weight is (in, out), so it is a Conv1D, which keeps its outputs in nf"
    attributes = (("nf", f"{linear.out} / tp"),) if side == "out" else ()
    return Suggestion(linear.name, style, reason, "likely", layout, 1 if side == "out" else 0, attributes)


def _last(name: str, parts: int = 1) -> str:
    return ".".join(name.split(".")[-parts:])
