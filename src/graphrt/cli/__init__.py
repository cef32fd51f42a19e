"""The command line: the only room that prints. ``main`` is the ``graphrt`` script."""

from graphrt.cli.application import main as main
