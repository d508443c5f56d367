"""Scales of blocks: what a converter does with FP8 weights it does with their scales, under names of their own.

Source: ``update_weight_conversions`` in ``transformers/quantizers/base.py`` of transformers 5.24.
"""

from collections.abc import Iterable

from reshard.catalogue.architecture import Converter

SCALE = "_scale_inv"
"""Ends the name of the scales of what is named before it."""


def scale_converters(converters: Iterable[Converter], names: Iterable[str]) -> tuple[Converter, ...]:
    """Return the converters of scales for the converters of weights, if a checkpoint with these names has scales.

    >>> converter = Converter(("experts.*.up.weight",), ("experts.up",), (("stack", 0),))
    >>> [made.targets for made in scale_converters([converter], ["experts.0.up.weight_scale_inv"])]
    [('experts.up_scale_inv',)]
    """
    if not any(name.endswith(f".weight{SCALE}") for name in names):
        return ()
    return tuple(
        converter._replace(
            sources=tuple(source + SCALE for source in converter.sources),
            targets=tuple(target + SCALE for target in converter.targets),
        )
        for converter in converters
        if all(source.endswith(".weight") for source in converter.sources)
    )
