"""Tests, one file a module; a package so that they can import what they share."""
