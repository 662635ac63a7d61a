"""Interpreters of other environments: a checkout of a revision, an installed version, a command."""
