"""Proposing: a plan for a model that nobody has planned, from its names, shapes and configuration alone.

    tree        names, part by part: modules, linear layers, and the width that the blocks of a list share
    numbers     what the configuration counts: heads, experts, words, inner widths
    groups      which linear layers belong together: feed-forward, attention
    experts     experts that are stacked in one tensor
    alone       layers that belong to no group
    tables      the embedding and the output layer
    merging     from what single modules should have to rules with ``*``
    writing     the plan file, with the reason of every rule

Evidence is read from the inside out. The blocks of a list share a width, that of the hidden states: most of their
linear layers have it on one side, and their norms have it. A linear layer then expands it, contracts to it, keeps it,
or does neither. The smallest module that holds a known set of these is a group; what belongs to none is taken alone.

There are three forms, and the choice between them is what keeps a proposal from erring:

    divided     colwise into rowwise. What is between them must be known: features that no one mixes, or whole heads.
    gathered    the outputs of a linear layer joined again, or its inputs sliced. This is exact whatever the layer is
                for, at the price of a collective: it is proposed where roles cannot be told apart (a square query
                layer from a square output layer, the order of a fused one).
    whole       what may be no linear layer at all, and what no form is exact for; the proposal says why.

A rule is *certain* where shapes and numbers leave one reading, *likely* where they leave one if the class does what
nearly all do, which its reason says, and a *guess* where they leave several. Guesses are written as comments, never as
rules. A proposal is for one number of ranks, since what does not divide takes another form. It is never run as it is:
`reshard.check` proves it.
"""

from reshard.proposing.proposal import Confidence, Proposal, ProposedRule
from reshard.proposing.propose import propose
from reshard.proposing.writing import format_plan

__all__ = ["Confidence", "Proposal", "ProposedRule", "format_plan", "propose"]
