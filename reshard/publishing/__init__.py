"""Publishing: what has a destination's name is whole, and what a killed run made is gone on with.

A run works in a hidden folder beside its destination, under a name of its own (`staging`):

    .OUT.partial-TOKEN/
        .owner-...      whose it is, and that its owner lives (`owner`)
        journal         what is finished, with its hashes (`reshard.engine.journal`)
        content/        the files that will be OUT

Only ``content`` is published: its files are synced, the manifest last, then the folder, then it is renamed to OUT and
the parent is synced (`renaming`). The journal and the owner are never part of the output, and the hidden folder is
removed afterwards. So OUT is there as a whole or not at all, and an older OUT stays until the instant at which the new
one has its name.

The next run for OUT looks at what dead owners left beside it. Content of the same key (source, plan, options, version)
is claimed, by renaming it, and gone on with: what the journal says to be finished is read again and compared with its
hash before it counts. Everything else that dead owners left is claimed likewise and removed; what living ones make is
left alone. The same key means the same bytes, so an owner that was only slow, and wrongly taken for dead, does no harm.
"""
