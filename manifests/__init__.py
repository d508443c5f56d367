"""The contract between the splitter and the loader: layouts, placements, styles, headers, the manifest, the errors.

    runs -> layout -> expression      which entries of an axis a rank owns
    dtypes, placement                 which bytes of a tensor
    styles                            what a plan may choose for a module
    header, manifest                  what lies on disk
    errors                            the one tree of errors

It imports nothing beyond the standard library, msgspec and xxhash, and neither `reshard` nor `loader`.
"""
