"""Crash tests: splits that are killed, or that the system refuses something, at every moment and at every call.

After each, what has the destination's name is whole or not there, and the same command completes with the same bytes.
`make test` runs samples (tests/test_crash.py), ``python -m tools.crash`` all of them, and prints the counts.
"""
