"""The cache: splits that many processes share, on one machine or on a file system that many machines mount.

    DIR/<model>-tp4-<first 16 digits of the key>/   a split, which appears there whole, by one rename
    DIR/.<split>.partial-*                          one that is being made (`reshard.publishing`)
    DIR/.<key>.turn                                 whose turn it is to make it (`turn`)
    DIR/.<split>.removed-*                          one that is being removed (`removing`)
    DIR/.uses/<split>/                              who uses it, and when it was wanted last (`manifests.uses`)

A split is found by its key, whatever stands before it. It is there if its manifest decodes, has the whole key, and
every file has the size in it: neither the folder's being there nor a lock says so. Finding one needs no right to write.

Whoever finds none takes the turn, a folder of a given name, of all that try one, and makes the split. The others
wait until the split is there, or the one whose turn it is has died: the turn has an owner, as folders of publishing
have, with a process and a heartbeat, and is claimed by renaming it. No lock of the file system is taken, so one that
lies, or fails, changes nothing. Nor does a wrong belief about who lives: two that make the same split make the same
bytes, each in a folder of its own, the first to finish gives it the name, and the other finds it there.

Nothing finished is changed in place. What is removed, a damaged split included, is first renamed to a hidden name.
"""
