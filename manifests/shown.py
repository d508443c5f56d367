"""What messages show of values from files: one line, and not all of what is long."""

from reprlib import Repr

_MOST = 200

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = _MOST
_short.maxlist = _short.maxtuple = _short.maxdict = 12


def shown(value: object) -> str:
    r"""Return a value as Python writes it, shortened where it is long or deep.

    >>> shown("a\nb"), shown(list(range(100)))[-8:], len(shown("x" * 10**6))
    ("'a\\nb'", '11, ...]', 200)
    """
    try:
        return _short.repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"


def shown_name(name: str) -> str:
    r"""Return a name as it is, or as `shown` does if a line of text cannot hold it.

    >>> shown_name("model.norm.weight"), shown_name("a\x1b[2J")
    ('model.norm.weight', "'a\\x1b[2J'")
    """
    return name if name.isprintable() and len(name) <= _MOST else shown(name)
